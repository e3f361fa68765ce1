"""Pure functions that group rows by expert within a rank and add them back per token; none is differentiable.

The autograd of dispatch and combine is written once above the managers (`dispatch.fused_a2a`), so these run without a
graph. Every function here is deterministic, on the CPU and on CUDA, and none synchronises with the host.

N rows (tokens), K slots of a row, L local experts, R grouped rows, H hidden size. A slot is an entry of an [N, K] table
of local expert ids; its flat number is row * K + slot. -1 marks a slot that belongs to no local expert.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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


def rows_of_slots(slot_order: Tensor, expert_ids: Tensor) -> Tensor:
    """Which grouped row each slot became, -1 where it became none: [N, K] int64, the inverse of `slots_by_expert`.

    Args:
        slot_order: [R] int64 from `slots_by_expert`, possibly cut to the real ones; grouped row i came from its entry i.
        expert_ids: [N, K] the same table.
    """
    rows = torch.full((expert_ids.numel(),), -1, dtype=torch.int64, device=expert_ids.device)
    rows.scatter_(0, slot_order, torch.arange(slot_order.numel(), device=expert_ids.device))
    return torch.where(expert_ids < 0, -1, rows.view(expert_ids.shape))


def sum_slots(rows: Tensor, slot_rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Output row n is the sum of the source rows that slot_rows[n] names, accumulated in fp32.

    Args:
        rows: [R, H] fp32, bf16 or fp16; rows that no slot names may be uninitialised memory, they are not read.
        slot_rows: [N, K] int64, -1 for none.
        dtype: of the result; None is that of `rows`.

    Returns:
        [N, H]; a row of -1 gives exact zeros.
    """
    dtype = dtype or rows.dtype
    (num_outputs, num_slots), hidden_size = slot_rows.shape, rows.shape[1]
    if rows.shape[0] == 0 or num_outputs == 0:
        return rows.new_zeros(num_outputs, hidden_size, dtype=dtype)
    if rows.device.type == "cpu":
        named = slot_rows >= 0
        offsets = F.pad(named.sum(dim=1).cumsum(0), (1, 0))
        return F.embedding_bag(slot_rows[named], rows.float(), offsets, mode="sum", include_last_offset=True).to(dtype)
    # Not embedding_bag on CUDA: there the last bag runs to the end of the indices, whatever the last offset says, and
    # their number cannot be cut without a host synchronisation.
    total = torch.empty(num_outputs, hidden_size, dtype=dtype, device=rows.device)
    for chunk, names in zip(total.split(_chunk(num_slots * hidden_size)), slot_rows.split(_chunk(num_slots * hidden_size)), strict=True):
        gathered = rows.index_select(0, names.clamp(min=0).view(-1)).view(*names.shape, hidden_size)
        chunk.copy_(gathered.masked_fill_((names < 0)[..., None], 0.0).sum(dim=1, dtype=torch.float32))
    return total


def _chunk(elements_per_output: int) -> int:
    """Output rows at a time, so that the gathered rows take some 64 MiB whatever the number of tokens."""
    return max(1, 2**25 // max(1, elements_per_output))


def merge_duplicates(topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give each expert that a token names twice to its first slot, with the sum of the weights; the other slots become -1.

    For libraries that send a token to an expert once. No host synchronisation.

    Args:
        topk_idx: [T, K] int64, -1 for dropped slots.
        topk_weights: [T, K] fp32.

    Returns:
        ids [T, K] and weights [T, K] without duplicates (0 for dropped slots), and first_slot [T, K] int64, the slot that
        each slot was given to (itself, where it is the first).
    """
    same = topk_idx[:, :, None] == topk_idx[:, None, :]
    first_slot = same.to(torch.uint8).argmax(dim=2)  # the first slot with the same id
    slots = torch.arange(topk_idx.shape[1], device=topk_idx.device)
    real = topk_idx >= 0
    weights = torch.zeros_like(topk_weights).scatter_add_(1, first_slot, torch.where(real, topk_weights, 0.0))
    kept = real & (first_slot == slots)
    return torch.where(kept, topk_idx, -1), torch.where(kept, weights, 0.0), first_slot


def reference_sum_slots(rows: Tensor, slot_rows: Tensor) -> Tensor:
    """The slow, obvious form of `sum_slots`, for tests and benchmarks."""
    total = torch.zeros(slot_rows.shape[0], rows.shape[1], device=rows.device)
    for output, names in enumerate(slot_rows.tolist()):
        for name in names:
            if name >= 0:
                total[output] += rows[name].float()
    return total.to(rows.dtype)


def reference_group_rows(hidden_states: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Rows [R, H] grouped by expert and the count of each, by plain loops; for tests."""
    groups = [[row for row, ids in enumerate(expert_ids.tolist()) for expert in ids if expert == wanted] for wanted in range(num_experts)]
    order = torch.tensor([row for group in groups for row in group], dtype=torch.int64)
    return hidden_states[order], [len(group) for group in groups]
