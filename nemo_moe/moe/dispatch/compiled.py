"""Dispatch and combine as `torch.library` custom ops, for torch.compile: fullgraph, with registered autograd.

They call the managers' raw methods, in the mode that never waits for the device: rows are worst-case, and the experts skip
those past the counts by the counts on the device. CUDA-graph capture needs none of this (there the wrappers of `fused_a2a`
run as they are, and the managers notice the capture).

An op may take and return tensors and numbers only, and a handle is an object that the library gave us. So it travels as a
ticket: an int64 CPU tensor of one element, whose storage owns the Python object that holds the handle. The handle lives
exactly as long as some tensor shares that storage, however autograd and the compiler wrap it; nothing else holds it.

Inputs belong to the compiled program, which may reuse their memory after the op: what a handle keeps of them is copied.

T tokens of this rank, K experts per token, L local experts, R worst-case rows, H hidden size.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_moe.moe.dispatch import buffers
from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.types import Dispatched, DispatchHandle


@dataclass(frozen=True, eq=False)
class CompiledHandle(DispatchHandle):
    """A handle inside a compiled program.

    Attributes:
        ticket: [1] int64 on the CPU; see the module's text.
        manager: the key of the manager that made it.
        num_rows: R.
    """

    ticket: Tensor
    manager: str
    num_rows: int


_managers: dict[str, DispatchManager] = {}


def manager_key(manager: DispatchManager) -> str:
    """A name for managers that do the same, and so are one to a compiled program: layers of a model share it."""
    group = "" if manager.ep_group is None else manager.ep_group.group_name
    settings = f"{manager.num_experts}/{manager.num_sms}/{manager.async_dispatch}"
    key = f"{type(manager).__module__}:{type(manager).__qualname__}/{group}/{settings}"
    _managers[key] = manager
    return key


def compiled_dispatch(key: str, num_local_experts: int, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
    """`fused_a2a.fused_dispatch` as the compiler sees it."""
    num_tokens, top_k = topk_idx.shape
    fixed_rows = _fixed_rows(key, hidden_states.shape[1], top_k, buffers.built)
    num_rows = num_tokens * top_k if fixed_rows is None else fixed_rows
    rows, row_weights, tokens_per_expert, ticket = _dispatch(hidden_states, topk_idx, topk_weights, key, num_rows, num_local_experts)
    handle = CompiledHandle(
        num_tokens=num_tokens,
        tokens_per_expert=tokens_per_expert,
        topk_weights=row_weights.detach(),
        ticket=ticket,
        manager=key,
        num_rows=num_rows,
    )
    return Dispatched(hidden_states=rows, topk_weights=row_weights, tokens_per_expert=tokens_per_expert, handle=handle)


def compiled_combine(rows: Tensor, handle: CompiledHandle) -> Tensor:
    """`fused_a2a.fused_combine` as the compiler sees it."""
    total: Tensor = _combine(rows, handle.ticket, handle.manager, handle.num_tokens)
    return total


@torch.compiler.assume_constant_result
def _fixed_rows(key: str, hidden_size: int, top_k: int, built: str) -> int | None:
    """The manager's answer at the time of tracing; `built` changes when a buffer is built, and with it this."""
    return _managers[key].worst_case_rows(hidden_size, top_k)


class _Ticket(bytearray):
    """Eight bytes, the number of the ticket, and the handle that it stands for."""

    handle: DispatchHandle


_tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _issue(handle: DispatchHandle) -> Tensor:
    ticket = _Ticket(8)
    ticket.handle = handle
    tensor = torch.frombuffer(ticket, dtype=torch.int64)  # its storage holds a reference to `ticket`
    number = next(_numbers)
    tensor.fill_(number)
    _tickets[number] = ticket
    return tensor


def _redeem(ticket: Tensor) -> DispatchHandle:
    found = _tickets.get(int(ticket))
    assert found is not None, "a dispatch handle's ticket was copied, or outlived by its use"
    return found.handle


def open_tickets() -> int:
    """How many handles of compiled programs are alive."""
    return len(_tickets)


@torch.library.custom_op("nemo_moe::dispatch", mutates_args=())
def _dispatch(
    hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor, manager: str, num_rows: int, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    received = _managers[manager].dispatch_worst_case(hidden_states.contiguous(), topk_idx.clone(), topk_weights.contiguous())
    found = received.hidden_states.shape[0]
    assert found == num_rows, f"{found} rows arrived, and the program was compiled for {num_rows}"
    # The handle keeps its own copies of what the program may overwrite.
    return received.hidden_states, received.topk_weights.clone(), received.tokens_per_expert.clone(), _issue(received.handle)


@_dispatch.register_fake
def _(
    hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor, manager: str, num_rows: int, num_local_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        hidden_states.new_empty(num_rows, hidden_states.shape[1]),
        topk_weights.new_empty(num_rows),
        topk_idx.new_empty(num_local_experts, dtype=torch.int32),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("nemo_moe::combine", mutates_args=())
def _combine(rows: Tensor, ticket: Tensor, manager: str, num_tokens: int) -> Tensor:
    return _owned(_managers[manager].combine(rows.contiguous(), _redeem(ticket))[0])


@_combine.register_fake
def _(rows: Tensor, ticket: Tensor, manager: str, num_tokens: int) -> Tensor:
    return rows.new_empty(num_tokens, rows.shape[1])


@torch.library.custom_op("nemo_moe::dispatch_backward", mutates_args=())
def _dispatch_backward(
    grad_rows: Tensor, grad_row_weights: Tensor, ticket: Tensor, manager: str, num_tokens: int, top_k: int
) -> tuple[Tensor, Tensor]:
    grad, grad_weights = _managers[manager].combine(grad_rows.contiguous(), _redeem(ticket), grad_row_weights.contiguous())
    assert grad_weights is not None
    return _owned(grad), _owned(grad_weights)


@_dispatch_backward.register_fake
def _(grad_rows: Tensor, grad_row_weights: Tensor, ticket: Tensor, manager: str, num_tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    return grad_rows.new_empty(num_tokens, grad_rows.shape[1]), grad_row_weights.new_empty(num_tokens, top_k)


@torch.library.custom_op("nemo_moe::redispatch", mutates_args=())
def _redispatch(hidden_states: Tensor, ticket: Tensor, manager: str, num_rows: int) -> Tensor:
    return _managers[manager].redispatch(hidden_states.contiguous(), _redeem(ticket))


@_redispatch.register_fake
def _(hidden_states: Tensor, ticket: Tensor, manager: str, num_rows: int) -> Tensor:
    return hidden_states.new_empty(num_rows, hidden_states.shape[1])


def _owned(tensor: Tensor) -> Tensor:
    """A tensor with the strides that the fakes promise, and no view of a longer one."""
    return tensor if tensor.is_contiguous() and tensor._base is None else tensor.contiguous().clone()


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, topk_idx, _, ctx.manager, _, _ = inputs
    ctx.num_tokens, ctx.top_k = topk_idx.shape
    ctx.save_for_backward(output[3])


def _dispatch_gradients(
    ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor, _grad_counts: Tensor, _grad_ticket: Tensor
) -> tuple[Tensor | None, ...]:
    (ticket,) = ctx.saved_tensors
    grad, grad_weights = _dispatch_backward(grad_rows, grad_row_weights, ticket, ctx.manager, ctx.num_tokens, ctx.top_k)
    return grad, None, grad_weights, None, None, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ticket, ctx.manager, _ = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(ticket)


def _combine_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    (ticket,) = ctx.saved_tensors
    return _redispatch(grad_output, ticket, ctx.manager, ctx.num_rows), None, None, None


_dispatch.register_autograd(_dispatch_gradients, setup_context=_dispatch_context)
_combine.register_autograd(_combine_gradients, setup_context=_combine_context)
