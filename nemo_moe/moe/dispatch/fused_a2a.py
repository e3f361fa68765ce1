"""The fused all-to-all autograd wrappers: written once, above all dispatch managers.

Dispatch's backward is one combine along the same route, which also carries the gradients of the routing weights home;
combine's backward is one redispatch. Nothing is routed twice, and a checkpointed layer that is recomputed reuses the
handle that its forward made (`types.remembered`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.types import Dispatched, DispatchHandle, remembered


class FusedDispatch(Function):
    """(hidden_states [T, H], topk_weights [T, K], topk_idx, manager) -> (rows [R, H], row weights [R], handle)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, topk_weights: Tensor, topk_idx: Tensor, manager: DispatchManager
    ) -> tuple[Tensor, Tensor, DispatchHandle]:
        received: list[Tensor] = []

        def route() -> DispatchHandle:
            dispatched = manager.dispatch(hidden_states, topk_idx, topk_weights)
            received.append(dispatched.hidden_states)
            return dispatched.handle

        with record_function("moe/dispatch"):
            handle = remembered(route)
            rows = received[0] if received else manager.redispatch(hidden_states, handle)
        ctx.manager, ctx.handle = manager, handle
        # detach(): the output must be a tensor of its own, or the handle would own the graph that owns the handle.
        return rows, handle.topk_weights.detach(), handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor, _grad_handle: None) -> tuple[Tensor | None, ...]:
        with record_function("moe/dispatch_backward"):
            grad_hidden_states, grad_topk_weights = ctx.manager.combine(grad_rows.contiguous(), ctx.handle, grad_row_weights.contiguous())
        return grad_hidden_states, grad_topk_weights, None, None


class FusedCombine(Function):
    """(rows [R, H], manager, handle) -> [T, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, manager: DispatchManager, handle: DispatchHandle) -> Tensor:
        ctx.manager, ctx.handle = manager, handle
        with record_function("moe/combine"):
            return manager.combine(rows.contiguous(), handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        with record_function("moe/combine_backward"):
            return ctx.manager.redispatch(grad_output.contiguous(), ctx.handle), None, None


def fused_dispatch(manager: DispatchManager, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
    """`DispatchManager.dispatch`, differentiable in hidden_states and topk_weights."""
    rows, row_weights, handle = FusedDispatch.apply(hidden_states.contiguous(), topk_weights.contiguous(), topk_idx, manager)
    return Dispatched(hidden_states=rows, topk_weights=row_weights, tokens_per_expert=handle.tokens_per_expert, handle=handle)


def fused_combine(manager: DispatchManager, rows: Tensor, handle: DispatchHandle) -> Tensor:
    """`DispatchManager.combine`, differentiable in rows."""
    return FusedCombine.apply(rows, manager, handle)
