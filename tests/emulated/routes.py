"""Inputs and plain answers for the emulator's tests. All ranks draw all ranks' inputs, so each knows what must come.

Everything is a small multiple of 1/2, so that sums in bf16 are exact and results are compared bit for bit.
T tokens of a rank, H hidden size, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from emulated.deep_ep_emulator import RuleBroken, as_deep_ep

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """[T, H] bf16 with (rank, token // 8, token % 8) in the first three columns; [T, K] int64, -1 for none; [T, K] fp32."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def draw(rank: int, tokens: int, num_experts: int, top_k: int, hidden: int, dropped: float = 0.3) -> Inputs:
    generator = torch.Generator().manual_seed(31 + rank)
    x = torch.randint(-4, 5, (tokens, hidden), generator=generator).to(BF16)
    x[:, 0], x[:, 1], x[:, 2] = rank, torch.arange(tokens) // 8, torch.arange(tokens) % 8
    idx = torch.rand(tokens, num_experts, generator=generator).topk(top_k, dim=1).indices
    idx[torch.rand(idx.shape, generator=generator) < dropped] = -1
    weights = torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, idx.shape, generator=generator)]
    return Inputs(x, idx, weights)


def factor(experts: Tensor) -> Tensor:
    """What expert e multiplies by; 0 for -1."""
    return torch.where(experts < 0, 0, 1 + experts % 3).float()


def expected_output(own: Inputs, weighted: bool = True) -> Tensor:
    """[T, H]: the sum over slots of weight * factor * x, or without weights. The plain reference of a layer."""
    scale = (factor(own.topk_idx) * (own.topk_weights if weighted else 1.0)).sum(1)
    return (own.x.float() * scale[:, None]).to(BF16)


@dataclass
class Lab:
    """What a test or a refusal works with on one rank."""

    module: ModuleType
    group: dist.ProcessGroup
    num_experts: int = 8
    hidden: int = 256
    top_k: int = 3
    tokens: tuple[int, ...] = (24, 24, 24, 24)
    dropped: float = 0.3
    all_inputs: list[Inputs] = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.local = self.num_experts // self.world
        self.first = self.rank * self.local
        args = (self.num_experts, self.top_k, self.hidden, self.dropped)
        self.all_inputs = [draw(rank, self.tokens[rank], *args) for rank in range(self.world)]
        self.own = self.all_inputs[self.rank]

    def local_rows(self) -> list[list[tuple[int, int, int]]]:
        """By local expert: the (rank, token, slot) that must arrive here."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(self.local)]
        for rank, inputs in enumerate(self.all_inputs):
            for token, ids in enumerate(inputs.topk_idx.tolist()):
                for slot, expert in enumerate(ids):
                    if self.first <= expert < self.first + self.local:
                        found[expert - self.first].append((rank, token, slot))
        return found

    def compact_rows(self) -> list[tuple[int, int]]:
        """The (rank, token) that must arrive here, in order."""
        return sorted({(rank, token) for rows in self.local_rows() for rank, token, _ in rows})


def origins(rows: Tensor) -> list[tuple[int, int]]:
    """The (rank, token) that rows say they come from."""
    return [(int(rank), 8 * int(high) + int(low)) for rank, high, low in rows[:, :3].tolist()]


def broken_rule(generation: str, variant: str | None, case: Callable[[Lab], object], **options: object) -> str:
    """The rule that the case breaks on this rank; an empty text where nothing was refused."""
    with as_deep_ep(generation, variant) as module:
        try:
            case(Lab(module, dist.group.WORLD, **options))  # type: ignore[arg-type]
        except RuleBroken as error:
            return error.rule
    return ""


def check_refusal(rule: str, found: list[str]) -> None:
    """One rank at least says which rule, the others that or that a peer was refused; nobody goes on alone."""
    assert rule in found, f"expected {rule}, the ranks found {found}"
    assert "" not in found and (rule == "any.peer_refused" or set(found) <= {rule, "any.peer_refused"}), found


@cache
def single_rank_group() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
