"""The generations of DeepEP behind one face: one thin adapter each.

`_DeepepManager` speaks to an `Adapter`, which speaks one library's dialect and hides what differs between them:

- V1 `Buffer`: a call of its own lays the route out; rows arrive once per rank that needs the token, ordered by source
  rank, so they are grouped by expert here; the number of SMs is part of an explicit config, because it is part of the
  handle's layout and the library's own setting is one for the whole class.
- 2.x `ElasticBuffer` and 2.5 `EPBuffer`: the expanded layout gives one row per (token, local expert), grouped by expert,
  and the library adds a token's rows up. Buffers are for a number of tokens that all ranks agree on.

Limits: bf16 rows. V1 up to 8 ranks needs no NVSHMEM, above 8 it does. Low-latency mode and fp8 transport are left out.

T tokens of this rank, K experts per token, E experts, L local experts, M received rows of V1, R grouped rows, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from nemo_moe.moe.dispatch.buffers import (
    CommBuffer,
    agree_on_most,
    find_buffer,
    get_buffer,
    is_capturing,
    refuse_while_capturing,
    rounded_capacity,
)
from nemo_moe.moe.permute import count_per_expert, rows_of_slots, slots_by_expert, sum_slots

_KIND = "deepep"


class Received(NamedTuple):
    """What a dispatch brought: rows [R, H] grouped by local expert, their weights [R] fp32, counts [L] int32, and the route."""

    rows: Tensor
    row_weights: Tensor
    tokens_per_expert: Tensor
    route: Route


@dataclass(frozen=True, eq=False)
class Route:
    """The way that rows went, to walk it again. `library_handle` is opaque; it is kept alive until backward is done."""

    buffer: CommBuffer
    library_handle: Any


class Adapter(ABC):
    """One generation of the library, for one group of ranks.

    Args:
        library: DeepEP's module.
        group: the expert-parallel ranks.
        num_experts: E, a multiple of the group's size.
        num_sms: streaming multiprocessors that its kernels may use; even.
        async_dispatch: its kernels run on the library's own stream, which this stream waits for where results are used.
    """

    max_top_k: ClassVar[int] = 32

    def __init__(self, library: ModuleType, group: dist.ProcessGroup, num_experts: int, num_sms: int, async_dispatch: bool) -> None:
        self.library, self.group, self.num_experts, self.num_sms, self.async_dispatch = library, group, num_experts, num_sms, async_dispatch
        self.ep_size = dist.get_world_size(group)
        self.num_local_experts = num_experts // self.ep_size

    @classmethod
    @abstractmethod
    def check_sizes(cls, hidden_size: int, num_experts: int, top_k: int, ep_size: int) -> None:
        """Raise ValueError naming the size that this generation cannot serve and what it can."""

    @abstractmethod
    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, sync_free: bool) -> Received:
        """Send tokens [T, H] bf16 by [T, K] int64 ids without duplicates, T at least 1.

        With `sync_free` nothing waits for the device: R is the most that could arrive, and an eager call before must have
        seen as many tokens.
        """

    @abstractmethod
    def redispatch(self, tokens: Tensor, route: Route) -> Tensor:
        """The rows [R, H] of other tokens along the same route."""

    @abstractmethod
    def combine(self, rows: Tensor, route: Route, row_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[T, H], the sum of each token's rows, and [T, K] fp32 where row weights [R] fp32 go along."""

    @abstractmethod
    def capacity(self, hidden_size: int, top_k: int) -> int:
        """Tokens a rank that a sync-free dispatch can take. Raises ValueError before the eager call that decides it."""

    def worst_case_rows(self, hidden_size: int, top_k: int) -> int:
        """R of a sync-free dispatch: every rank sends all it may, and as many of its slots land here as can."""
        return self.ep_size * self.capacity(hidden_size, top_k) * min(top_k, self.num_local_experts)

    def _fits(self, num_tokens: int, capacity: int) -> int:
        if num_tokens > capacity:
            refuse_while_capturing(_KIND, f"was warmed up for {capacity} tokens a rank and gets {num_tokens}", always=True)
        return capacity


def _check_common(hidden_size: int, num_experts: int, top_k: int, ep_size: int, limits: dict[str, int]) -> None:
    """Raise ValueError where a size is above its limit, or hidden_size is no multiple of its step."""
    found = {
        "num_experts_per_tok": top_k,
        "num_experts": num_experts,
        "local experts (num_experts / ep_size)": num_experts // ep_size,
        "hidden_size": hidden_size,
    }
    for name, value in found.items():
        if name in limits and value > limits[name]:
            raise ValueError(f"backend.dispatcher 'deepep' takes {name} up to {limits[name]} in this generation, found {value}")
    step = limits["hidden_size_multiple_of"]
    if hidden_size % step:
        raise ValueError(
            f"backend.dispatcher 'deepep' needs a hidden_size that is a multiple of {step} in this generation, found {hidden_size}"
        )


@dataclass(frozen=True, eq=False)
class _V1Route(Route):
    """slot_order [R] flat slots of the received [M, K] table by expert; slot_rows [M, K] the grouped row of each, -1 for none."""

    slot_order: Tensor
    slot_rows: Tensor


class V1Adapter(Adapter):
    """`deep_ep.Buffer`."""

    _RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # those with tuned configs in the library

    def __init__(self, library: ModuleType, group: dist.ProcessGroup, num_experts: int, num_sms: int, async_dispatch: bool) -> None:
        super().__init__(library, group, num_experts, num_sms, async_dispatch)
        self.dispatch_config, self.combine_config = self._configs()
        self.topk_dtype: torch.dtype = getattr(library, "topk_idx_t", torch.int64)

    @classmethod
    def check_sizes(cls, hidden_size: int, num_experts: int, top_k: int, ep_size: int) -> None:
        limits = {
            "num_experts_per_tok": cls.max_top_k,
            "local experts (num_experts / ep_size)": 128,
            "hidden_size": 8176,  # half a row and 8 bytes must fit the kernel's 8 KiB of shared memory
            "hidden_size_multiple_of": 16,
        }
        _check_common(hidden_size, num_experts, top_k, ep_size, limits)
        if ep_size not in cls._RANKS:
            raise ValueError(f"DeepEP's Buffer has no settings for ep_size {ep_size}; those that it has: {', '.join(map(str, cls._RANKS))}")

    def _configs(self) -> tuple[Any, Any]:
        """The tuned configs for this many ranks with our number of SMs; the library's class-wide setting stays as it was."""
        buffer_class = self.library.Buffer
        before = getattr(buffer_class, "num_sms", None)
        buffer_class.set_num_sms(self.num_sms)
        try:
            return buffer_class.get_dispatch_config(self.ep_size), buffer_class.get_combine_config(self.ep_size)
        finally:
            if before is not None:
                buffer_class.set_num_sms(before)

    def _shape(self, hidden_size: int) -> tuple[Any, ...]:
        return ("Buffer", hidden_size, self.num_sms)

    def _buffer(self, hidden_size: int, device: torch.device) -> CommBuffer:
        """A ring whose size follows from the row's bytes and the SMs, not from the number of tokens."""
        row_bytes = hidden_size * 2
        configs = (self.dispatch_config, self.combine_config)

        def build(size: int) -> Any:
            return self.library.Buffer(
                self.group,
                num_nvl_bytes=max(config.get_nvl_buffer_size_hint(size, self.ep_size) for config in configs),
                num_rdma_bytes=max(config.get_rdma_buffer_size_hint(size, self.ep_size) for config in configs),
                num_qps_per_rank=max(24, self.num_sms // 2),  # internode, each channel (half an SM count) has a queue pair
                explicitly_destroy=True,
            )

        return get_buffer(_KIND, self.group, self._shape(hidden_size), row_bytes, build, device)

    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, sync_free: bool) -> Received:
        top_k = topk_idx.shape[1]
        if sync_free:
            buffer = find_buffer(_KIND, self.group, self._shape(tokens.shape[1]))
            worst = self._fits(tokens.shape[0], self.capacity(tokens.shape[1], top_k)) * self.ep_size
        else:
            buffer = self._buffer(tokens.shape[1], tokens.device)
            worst = 0
            _remember_most(buffer, tokens.shape[0])
        ids = topk_idx.to(self.topk_dtype)
        per_rank, per_node, per_expert, in_rank, _ = buffer.library.get_dispatch_layout(ids, self.num_experts)
        received, recv_idx, recv_weights, counts, handle, event = buffer.library.dispatch(
            tokens,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=topk_weights,
            num_worst_tokens=worst,
            config=self.dispatch_config,
            **self._stream_arguments(),
        )
        self._wait(event)
        with record_function("moe/permute"):
            local_idx = recv_idx.long()
            num_rows = worst * min(top_k, self.num_local_experts) if sync_free else sum(counts)
            slot_order = slots_by_expert(local_idx, self.num_local_experts)[:num_rows]
            route = _V1Route(buffer, handle, slot_order, rows_of_slots(slot_order, local_idx))
            tokens_per_expert = count_per_expert(local_idx, self.num_local_experts).int()
            return Received(received.index_select(0, slot_order // top_k), recv_weights.reshape(-1)[slot_order], tokens_per_expert, route)

    def redispatch(self, tokens: Tensor, route: Route) -> Tensor:
        assert isinstance(route, _V1Route)
        received, _, _, _, _, event = route.buffer.library.dispatch(
            tokens, handle=route.library_handle, config=self.dispatch_config, **self._stream_arguments()
        )
        self._wait(event)
        with record_function("moe/permute"):
            rows: Tensor = received.index_select(0, route.slot_order // route.slot_rows.shape[1])
        return rows

    def combine(self, rows: Tensor, route: Route, row_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(route, _V1Route)
        weights = None
        with record_function("moe/permute"):
            partial_sums = sum_slots(rows, route.slot_rows)
            if row_weights is not None:
                by_slot = row_weights.new_zeros(route.slot_rows.numel()).index_copy_(0, route.slot_order, row_weights)
                weights = torch.where(route.slot_rows < 0, 0.0, by_slot.view(route.slot_rows.shape))
        total, total_weights, event = route.buffer.library.combine(
            partial_sums, route.library_handle, topk_weights=weights, config=self.combine_config, **self._stream_arguments()
        )
        self._wait(event)
        return total, total_weights

    def capacity(self, hidden_size: int, top_k: int) -> int:
        most = find_buffer(_KIND, self.group, self._shape(hidden_size)).most_tokens
        if torch.cuda.is_available() and not is_capturing():
            torch.cuda.synchronize()  # its copy to the host; before a capture torch.cuda.graph does it
        return 0 if most is None else int(most)

    def _stream_arguments(self) -> dict[str, Any]:
        """All three or none: results are allocated on the library's stream only where it works behind a marked point."""
        if not self.async_dispatch:
            return {}
        return {"previous_event": self.library.Buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}

    def _wait(self, event: Any) -> None:
        if self.async_dispatch:
            event.current_stream_wait()


def _remember_most(buffer: CommBuffer, num_tokens: int) -> None:
    """Note the most tokens that a rank has sent, for a later capture; collective, and nothing waits for it.

    V1's buffers do not depend on it, but a sync-free dispatch must reserve rows for what any rank may send.
    """
    if is_capturing():
        return
    most = torch.full((1,), num_tokens, dtype=torch.int64, device=buffer.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=buffer.group)
    if buffer.most_on_device is None:
        buffer.most_on_device = most
        buffer.most_tokens = torch.zeros(1, dtype=torch.int64, pin_memory=buffer.device.type == "cuda")
    torch.maximum(buffer.most_on_device, most, out=buffer.most_on_device)
    assert buffer.most_tokens is not None
    buffer.most_tokens.copy_(buffer.most_on_device, non_blocking=True)


class ElasticAdapter(Adapter):
    """`deep_ep.ElasticBuffer` in its expanded layout."""

    buffer_name: ClassVar[str] = "ElasticBuffer"

    @classmethod
    def check_sizes(cls, hidden_size: int, num_experts: int, top_k: int, ep_size: int) -> None:
        limits = {
            "num_experts_per_tok": cls.max_top_k,
            "num_experts": 2048,
            "local experts (num_experts / ep_size)": 256,
            "hidden_size_multiple_of": 256,  # combine's
        }
        _check_common(hidden_size, num_experts, top_k, ep_size, limits)

    def _buffer_class(self) -> Any:
        return getattr(self.library, self.buffer_name)

    def _shape(self, hidden_size: int, top_k: int) -> tuple[Any, ...]:
        return (self.buffer_name, hidden_size, top_k)

    def _buffer(self, tokens: Tensor, top_k: int) -> CommBuffer:
        hidden_size = tokens.shape[1]

        def build(capacity: int) -> Any:
            return self._buffer_class()(
                self.group, num_max_tokens_per_rank=capacity, hidden=hidden_size, num_topk=top_k, explicitly_destroy=True
            )

        capacity = rounded_capacity(agree_on_most(tokens.shape[0], self.group, tokens.device))
        return get_buffer(_KIND, self.group, self._shape(hidden_size, top_k), capacity, build, tokens.device)

    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, sync_free: bool) -> Received:
        top_k = topk_idx.shape[1]
        if sync_free:
            buffer = find_buffer(_KIND, self.group, self._shape(tokens.shape[1], top_k))
            self._fits(tokens.shape[0], buffer.size)
        else:
            buffer = self._buffer(tokens, top_k)
        rows, _, row_weights, handle, event = buffer.library.dispatch(
            tokens,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            do_cpu_sync=not sync_free,
            **self._call_arguments(buffer),
            **self._stream_arguments(),
        )
        self._wait(event)
        return Received(rows, row_weights, handle.num_unaligned_recv_tokens_per_expert.int(), Route(buffer, handle))

    def redispatch(self, tokens: Tensor, route: Route) -> Tensor:
        rows, _, _, _, event = route.buffer.library.dispatch(
            tokens, handle=route.library_handle, **self._call_arguments(route.buffer), **self._stream_arguments()
        )
        self._wait(event)
        received: Tensor = rows
        return received

    def combine(self, rows: Tensor, route: Route, row_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        total, total_weights, event = route.buffer.library.combine(
            rows, route.library_handle, topk_weights=row_weights, num_sms=self.num_sms, **self._stream_arguments()
        )
        self._wait(event)
        return total, total_weights

    def capacity(self, hidden_size: int, top_k: int) -> int:
        return find_buffer(_KIND, self.group, self._shape(hidden_size, top_k)).size

    def _call_arguments(self, buffer: CommBuffer) -> dict[str, Any]:
        """Alike for the first and all later dispatches of a handle: they are part of the compiled kernel."""
        return {
            "num_experts": self.num_experts,
            "num_max_tokens_per_rank": buffer.size,
            "expert_alignment": 1,
            "num_sms": self.num_sms,
            "do_expand": True,
        }

    def _stream_arguments(self) -> dict[str, Any]:
        if not self.async_dispatch:
            return {}
        event = self._buffer_class().capture()
        return {"previous_event": event, "async_with_compute_stream": True, "allocate_on_comm_stream": True}

    def _wait(self, event: Any) -> None:
        if self.async_dispatch:
            event.current_stream_wait()


class EPAdapter(ElasticAdapter):
    """`EPBuffer` of DeepEP 2.5, as `ElasticAdapter`. It keeps the ids by reference: the manager's are a copy that nobody changes."""

    buffer_name: ClassVar[str] = "EPBuffer"


ADAPTERS: dict[str, type[Adapter]] = {"v1": V1Adapter, "elastic": ElasticAdapter, "ep25": EPAdapter}
