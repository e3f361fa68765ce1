"""The frozen values that pass between the parts of an MoE layer, and the log that lets recomputation reuse a route.

T this rank's tokens, H hidden size, K experts per token, E experts, L local experts, R received rows.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """What a dispatch leaves behind, so that the same route can be walked again in either direction.

    Managers subclass it with what they need. It must outlive backward. It holds no rows of hidden size.

    Attributes:
        num_tokens: T, the rows that combine returns.
        tokens_per_expert: [L] int32 on the device; real rows of each local expert, no padding.
        topk_weights: [R] fp32, detached; the routing weight of each received row.
    """

    num_tokens: int
    tokens_per_expert: Tensor
    topk_weights: Tensor


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows received by this rank, grouped by local expert.

    Attributes:
        hidden_states: [R, H]; rows past tokens_per_expert.sum() are uninitialised memory that nothing may read.
        topk_weights: [R] fp32; not applied yet.
        tokens_per_expert: [L] int32 on the device.
        handle: for combine.
    """

    hidden_states: Tensor
    topk_weights: Tensor
    tokens_per_expert: Tensor
    handle: DispatchHandle


class RouterStats(NamedTuple):
    """What one MoE layer's gate reports about this rank's real tokens of one micro-batch; sums, so that ranks add up.

    Attributes:
        probs_sum: [E] fp32, differentiable; sum over tokens of the scores normalised over all experts.
        tokens_per_expert: [E] fp32; how many of this rank's slots chose each of all experts.
        num_tokens: [] fp32; real tokens.
        z_sum: [] fp32, differentiable; sum over tokens of logsumexp(router_logits)^2.
    """

    probs_sum: Tensor
    tokens_per_expert: Tensor
    num_tokens: Tensor
    z_sum: Tensor


def experts_per_rank(num_experts: int, ep_size: int) -> int:
    """L = E / ep_size. Raises ValueError where the ranks do not divide the experts."""
    if num_experts % ep_size:
        raise ValueError(f"ep_size {ep_size} does not divide the {num_experts} experts; choose a divisor of {num_experts}")
    return num_experts // ep_size


class Dispatcher(Protocol):
    """The face of a dispatcher that an experts module is handed (`dispatch.token_dispatcher` implements it)."""

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched: ...

    def combine(self, rows: Tensor, handle: DispatchHandle) -> Tensor: ...


class ExpertParallelLayer(Protocol):
    """What `distributed.parallelize` needs of an MoE layer, whatever model it is in."""

    experts: nn.Module

    def shard_experts(self, ep_group: dist.ProcessGroup | None) -> None:
        """Keep this rank's contiguous experts and send tokens to the others' over `ep_group`."""
        ...


class ParallelizableModel(Protocol):
    """What `distributed.parallelize` needs of a model."""

    def decoder_layers(self) -> list[nn.Module]: ...

    def moe_layers(self) -> list[ExpertParallelLayer]: ...


T = TypeVar("T")
_active_log: contextvars.ContextVar[_Cursor | None] = contextvars.ContextVar("nemo_moe_route_log", default=None)


class _Cursor:
    """One pass over a route log: the first pass appends to it, a recomputation reads it back in order."""

    def __init__(self, entries: list[Any], replaying: bool) -> None:
        self.entries, self.replaying, self.position = entries, replaying, 0

    def remembered(self, make: Callable[[], T]) -> T:
        if self.replaying:
            assert self.position < len(self.entries), "recomputation asked for more routing decisions than the forward made"
            value = self.entries[self.position]
        else:
            value = make()
            self.entries.append(value)
        self.position += 1
        return value


def remembered(make: Callable[[], T]) -> T:
    """make()'s value, once a step: what the forward decided is handed out again while a checkpoint recomputes.

    The gate passes its selection and the dispatcher its handle through here, so a recomputed layer neither selects
    experts again (ties and order could change) nor routes again. Without activation checkpointing it is just make().
    The value must not require gradients.
    """
    cursor = _active_log.get()
    return make() if cursor is None else cursor.remembered(make)


def route_log_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The two contexts for `torch.utils.checkpoint.checkpoint(context_fn=...)`: forward records, recomputation replays.

    Each call of the checkpointed function gets a log of its own, freed with the autograd graph. The second context may
    be entered again (a second backward through a retained graph recomputes again).
    """
    entries: list[Any] = []
    return _RouteLogPass(entries, replaying=False), _RouteLogPass(entries, replaying=True)


class _RouteLogPass(AbstractContextManager[None]):
    def __init__(self, entries: list[Any], replaying: bool) -> None:
        self._entries, self._replaying = entries, replaying

    def __enter__(self) -> None:
        self._token = _active_log.set(_Cursor(self._entries, self._replaying))

    def __exit__(self, *exc_info: object) -> None:
        _active_log.reset(self._token)
