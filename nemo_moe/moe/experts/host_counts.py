"""What experts have in common whose library reads the row counts on the host.

One host synchronisation a layer, exact counts for the library, and no call of it where a rank has no row at all (some
libraries assert that there is one). Such a backend cannot know how many rows a CUDA graph will find when it is replayed,
so it refuses to be captured or compiled, before anything is launched.

R received rows, L local experts, H hidden size, I expert width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nemo_moe.moe.experts.base import Experts, weighted_swiglu
from nemo_moe.registry import EXPERTS


class HostCountExperts(Experts):
    """Experts of a grouped matmul with counts on the host; subclasses supply `grouped_linear`, and NAME, their registry name."""

    NAME: str

    def compute(self, hidden_states: Tensor, topk_weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
        _refuse_capture(self.NAME)
        counts: list[int] = tokens_per_expert.tolist()
        total = sum(counts)
        rows, weights = hidden_states[:total], topk_weights[:total]
        if total == 0:
            output = _of_no_rows(rows, weights, self.gate_up_proj, self.down_proj)
        else:
            gate_up = self.grouped_linear(rows, self._weights(self.gate_up_proj, counts), counts)
            output = self.grouped_linear(weighted_swiglu(gate_up, weights), self._weights(self.down_proj, counts), counts)
        surplus = hidden_states.shape[0] - total
        return torch.cat([output, output.new_zeros(surplus, output.shape[1])]) if surplus else output

    @abstractmethod
    def grouped_linear(self, rows: Tensor, weights: Any, counts: list[int]) -> Tensor:
        """rows [sum(counts), in] times the transpose of each expert's [out, in]: [sum(counts), out]; there is at least one row.

        Args:
            rows: contiguous, grouped by expert.
            weights: what `_weights` made of a stored parameter.
            counts: of the L experts; some may be 0.
        """

    def _weights(self, stored: Tensor, counts: list[int]) -> Any:
        """A stored parameter [L, out, in] as `grouped_linear` wants it; its gradient is exact zeros for experts without rows."""
        return zero_gradient_of_idle(stored, counts)


def zero_gradient_of_idle(weights: Tensor, counts: list[int]) -> Tensor:
    """`weights` [L, ...] itself; experts whose count is 0 get a gradient of exact zeros, whatever the library leaves there.

    Costs nothing where every expert has rows.
    """
    idle = [expert for expert, count in enumerate(counts) if count == 0]
    if not idle:
        return weights
    same: Tensor = _ZeroGradientOf.apply(weights, idle)
    return same


class _ZeroGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, idle: list[int]) -> Tensor:
        ctx.idle = idle
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # In place: the gradient was just made by the library's backward, and nobody else holds it.
        for expert in ctx.idle:
            gradient[expert].zero_()
        return gradient, None


def _of_no_rows(rows: Tensor, weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """[0, H] that hangs on all inputs, so that every parameter gets a gradient of zeros: a matmul of empty matrices by torch."""
    return F.linear(weighted_swiglu(F.linear(rows, gate_up_proj[0]), weights), down_proj[0])


def _refuse_capture(name: str) -> None:
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        able = ", ".join(other for other in EXPERTS if EXPERTS.get(other).device_counts)
        raise ValueError(
            f"backend.experts {name!r} reads row counts on the host, so it can run neither under CUDA-graph capture nor under"
            f" torch.compile; run it eagerly, or choose one that takes counts on the device: {able}"
        )
