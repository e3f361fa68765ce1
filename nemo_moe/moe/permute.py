"""Pure functions that group rows by expert within a rank and add them back per token; none is differentiable.

The autograd of dispatch and combine is written once above the managers (`dispatch.fused_a2a`), so these run without a
graph. Every function here is deterministic, on the CPU and on CUDA, and none synchronises with the host.

N rows (tokens), K slots of a row, L local experts, R grouped rows, H hidden size. A slot is an entry of an [N, K] table
of local expert ids; its flat number is row * K + slot. -1 marks a slot that belongs to no local expert.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Bags(NamedTuple):
    """Which rows add up to which output row: output i is the sum of source rows members[offsets[i] : offsets[i + 1]].

    Attributes:
        members: [M] int64 source rows; entries past offsets[-1] are ignored.
        offsets: [N + 1] int64, non-decreasing.
    """

    members: Tensor
    offsets: Tensor


def count_per_expert(expert_ids: Tensor, num_experts: int) -> Tensor:
    """How many entries of `expert_ids` (any shape, int64, -1 counts nowhere) name each expert: [num_experts] int64.

    `torch.bincount` is not used because it synchronises with the host on CUDA.
    """
    flat = expert_ids.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, torch.where(flat < 0, num_experts, flat), torch.ones_like(flat))
    return counts[:num_experts]


def slots_by_expert(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Flat slot numbers of an [N, K] table ordered by expert, and by slot number within an expert; -1 slots come last.

    Returns [N * K] int64. The first `count_per_expert(...).sum()` entries are the real ones.
    """
    flat = expert_ids.reshape(-1)
    return torch.where(flat < 0, num_experts, flat).argsort(stable=True)


def bags_of_slots(slot_order: Tensor, expert_ids: Tensor) -> Bags:
    """The bags that add grouped rows back to their N rows: grouped row i came from slot `slot_order[i]`.

    Args:
        slot_order: [R] int64 from `slots_by_expert`, possibly cut to the real ones.
        expert_ids: [N, K] the same table; row n's bag holds its real slots.
    """
    ends = (expert_ids >= 0).sum(dim=1).cumsum(0)
    by_slot = torch.where(expert_ids.reshape(-1)[slot_order] < 0, expert_ids.numel(), slot_order).argsort(stable=True)
    return Bags(members=by_slot, offsets=F.pad(ends, (1, 0)))


def sum_bags(rows: Tensor, bags: Bags) -> Tensor:
    """Add rows up per bag with fp32 accumulation.

    Args:
        rows: [R, H] fp32, bf16 or fp16; rows that no bag holds may be uninitialised memory, they are not read.

    Returns:
        [N, H] in the dtype of `rows`; an empty bag gives a row of exact zeros.
    """
    num_bags = bags.offsets.numel() - 1
    if rows.shape[0] == 0 or num_bags == 0:
        return rows.new_zeros(num_bags, rows.shape[1])
    # CUDA accumulates 16-bit rows in fp32; the CPU kernel does not, so it gets fp32 rows.
    source = rows.float() if rows.device.type == "cpu" else rows
    return F.embedding_bag(bags.members, source, bags.offsets, mode="sum", include_last_offset=True).to(rows.dtype)


def reference_sum_bags(rows: Tensor, bags: Bags) -> Tensor:
    """The slow, obvious form of `sum_bags`, for tests and benchmarks."""
    offsets = bags.offsets.tolist()
    sums = [rows[bags.members[start:end]].float().sum(0) for start, end in itertools.pairwise(offsets)]
    return torch.stack(sums).to(rows.dtype) if sums else rows.new_zeros(0, rows.shape[1])


def reference_group_rows(hidden_states: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Rows [R, H] grouped by expert and the count of each, by plain loops; for tests."""
    groups = [[row for row, ids in enumerate(expert_ids.tolist()) for expert in ids if expert == wanted] for wanted in range(num_experts)]
    order = torch.tensor([row for group in groups for row in group], dtype=torch.int64)
    return hidden_states[order], [len(group) for group in groups]
