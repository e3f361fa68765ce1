"""DeepEP's legacy `Buffer` inside one host: rows per (token, rank), ordered by source rank and channel.

The handle is six plain tensors and everything is read back from them, so a caller may take it apart and rebuild it. The
order inside one (source rank, channel) is shuffled. Several hosts (RDMA) are not emulated.
R ranks, T tokens of a rank, H hidden size, K top-k, E experts, L = E / R, C = SMs / 2 channels, P received rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .shared import (
    BF16,
    EventHandle,
    EventOverlap,
    align,
    check_bias,
    check_deterministic_fill,
    check_topk,
    check_weights,
    exchange,
    finish,
    of_all,
    place,
    require,
    shuffled,
    split_rows,
    undefined,
)
from .v1_low_latency import LowLatency

_TABLE = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # rank counts that have a Config
_MAX_HALF_ROW = 8192  # bytes of shared memory for half a row and its barrier


class Config:
    def __init__(self, num_sms: int, nvl_send: int, nvl_recv: int, rdma_send: int, rdma_recv: int) -> None:
        require(num_sms > 0 and num_sms % 2 == 0, "v1.even_sms", num_sms)
        self.num_sms, self.nvl_send, self.nvl_recv, self.rdma_send, self.rdma_recv = num_sms, nvl_send, nvl_recv, rdma_send, rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return align(self.num_sms // 2 * num_ranks * self.nvl_recv * (hidden_bytes + 512), 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else align(self.num_sms // 2 * (num_ranks // 8) * self.rdma_recv * (hidden_bytes + 512), 128)


class Buffer(LowLatency):
    num_sms = 20
    topk_idx_dtype = torch.int64

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert group is not None and comm is None, "the emulator knows process groups only"
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes, self.low_latency_mode = num_nvl_bytes, num_rdma_bytes, low_latency_mode
        self.num_qps_per_rank, self.explicitly_destroy = num_qps_per_rank, explicitly_destroy
        self._destroyed = False

        def prepare() -> tuple[dict[str, Any], None]:
            for size in (num_nvl_bytes, num_rdma_bytes):
                require(size % 128 == 0 and size // 16 < 2**31, "v1.buffer_bytes", size)
            legal = self.group_size in (2, 4, 8) or (low_latency_mode and self.group_size == 1)
            require(legal, "v1.ranks", self.group_size)
            return {"v1.same_bytes": (num_nvl_bytes, num_rdma_bytes, low_latency_mode)}, None

        exchange(group, "Buffer()", prepare)

    def destroy(self) -> None:
        require(self.explicitly_destroy, "v1.explicit_destroy", "explicitly_destroy=False")
        require(not self._destroyed, "v1.destroyed", "destroyed twice")
        self._destroyed = True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        require(new_num_sms > 0 and new_num_sms % 2 == 0, "v1.even_sms", new_num_sms)
        cls.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        require(num_ranks in _TABLE, "v1.config_table", num_ranks)
        return Config(cls.num_sms, 24 if num_ranks == 2 else 6, 256, 6, 128)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        require(num_ranks in _TABLE, "v1.config_table", num_ranks)
        return Config(cls.num_sms, 10 if num_ranks == 2 else 6, 256, 6, 128)

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    # ---- layout ----

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        self._check_call(previous_event, async_finish, allocate_on_comm_stream)
        self._check_experts(num_experts)
        check_topk(topk_idx, num_experts, self.topk_idx_dtype, "v1")
        ids = topk_idx[topk_idx >= 0].long()
        per_expert = torch.bincount(ids, minlength=num_experts).int()
        owners = torch.where(topk_idx >= 0, topk_idx.long() // (num_experts // self.group_size), -1)
        in_rank = torch.stack([(owners == rank).any(1) for rank in range(self.group_size)], 1).contiguous()
        per_rank = in_rank.sum(0).int()
        return per_rank, None, per_expert, in_rank, finish([per_rank, per_expert, in_rank], async_finish)

    # ---- dispatch ----

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
            self._check_call(previous_event, async_finish, allocate_on_comm_stream)
            used = config or self.get_dispatch_config(self.group_size)
            data, scales = split_rows(x, "v1")
            self._check_rows(data, used)
            brought = {"data": data, "scales": scales, "channels": used.num_sms // 2, "topk_idx": topk_idx, "topk_weights": None}
            if handle is None:
                layout = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
                self._check_layout(data, layout, topk_idx, topk_weights)
                brought |= {"in_rank": is_token_in_rank, "per_expert": num_tokens_per_expert}
                brought["topk_weights"] = None if topk_weights is None else topk_weights.detach()
                require(num_worst_tokens == 0 or topk_idx is not None, "v1.worst_needs_topk", "topk_idx is None")
            else:
                require(topk_idx is None and topk_weights is None, "v1.cached_no_topk", "top-k given beside a handle")
                require(num_worst_tokens == 0, "v1.worst_needs_topk", "num_worst_tokens beside a handle")
                self._check_handle(handle, used)
                require(
                    handle[4].shape[0] == data.shape[0], "v1.handle_shape", f"{data.shape[0]} tokens, {handle[4].shape[0]} in the handle"
                )
            agreed = {
                "v1.same_sms": used.num_sms,
                "v1.same_row": (data.shape[1], data.dtype),
                "v1.same_mode": (handle is None, topk_idx is None),
            }
            agreed["v1.same_experts"] = None if num_tokens_per_expert is None else num_tokens_per_expert.numel()
            return agreed, brought

        ranks = exchange(self.group, "Buffer.dispatch", prepare)
        if handle is not None:
            received = self._receive(ranks, handle, True)
            event = finish([*received], async_finish)
            return _joined(received), None, None, None, None, event
        worst = num_worst_tokens
        require(worst == 0 or worst >= self.group_size * max(rank["data"].shape[0] for rank in ranks), "v1.worst_rows", worst)
        handle = self._make_handle(ranks, worst)
        received = self._receive(ranks, handle, False)
        recv_idx, recv_weights = self._receive_topk(ranks, handle)
        local = ranks[0]["per_expert"].numel() // self.group_size
        counts = sum(rank["per_expert"] for rank in ranks)[self.rank * local : (self.rank + 1) * local]
        aligned = [] if worst else [align(count, expert_alignment) for count in counts.tolist()]
        event = finish([*received, recv_idx, recv_weights], async_finish)
        return _joined(received), recv_idx, recv_weights, aligned, handle, event

    def _make_handle(self, ranks: list[dict[str, Any]], worst: int) -> tuple[Tensor, ...]:
        channels = ranks[0]["channels"]
        sent = torch.stack([rank["in_rank"].sum(0) for rank in ranks])  # [R, R] source, destination
        rank_prefix = sent.cumsum(0).int().contiguous()
        mine = ranks[self.rank]["in_rank"]
        sources, recv_channel = [], torch.zeros(self.group_size, channels, dtype=torch.int32)
        for source, rank in enumerate(ranks):
            tokens = rank["in_rank"][:, self.rank].nonzero()[:, 0]
            per_channel = max(1, align(rank["in_rank"].shape[0], channels) // channels)
            for channel in range(channels):
                part = tokens[tokens // per_channel == channel]
                sources.append(shuffled(part))
                recv_channel[source, channel] = part.numel()
        index = torch.cat(sources).int()
        recv_src_idx = undefined((max(worst, index.numel()),), torch.int32)
        recv_src_idx[: index.numel()] = index
        order = mine.int().cumsum(0) - 1
        send_head = torch.where(mine, order, -1).int().contiguous()
        per_channel = max(1, align(mine.shape[0], channels) // channels)
        ends = [min((channel + 1) * per_channel, mine.shape[0]) for channel in range(channels)]
        prefix = torch.cat([torch.zeros(1, self.group_size, dtype=torch.int64), mine.long().cumsum(0)])
        channel_prefix = prefix[ends].T.int().contiguous()
        return rank_prefix, channel_prefix, recv_channel.cumsum(1).int(), recv_src_idx, mine.clone(), send_head

    def _rows(self, handle: tuple[Tensor, ...], tokens: list[int]) -> Tensor:
        """[P] positions in the tokens of all ranks one after another; -1 for rows that nobody sent."""
        rank_prefix, _, _, recv_src_idx, _, _ = handle
        index = torch.full((recv_src_idx.numel(),), -1)
        start, first = 0, 0
        for end, count in zip(rank_prefix[:, self.rank].tolist(), tokens, strict=True):
            index[start:end] = first + recv_src_idx[start:end].long()
            start, first = end, first + count
        return index

    def _receive(self, ranks: list[dict[str, Any]], handle: tuple[Tensor, ...], cached: bool) -> list[Tensor]:
        index = self._rows(handle, [rank["data"].shape[0] for rank in ranks])
        parts = ("data",) if ranks[0]["scales"] is None else ("data", "scales")
        return [place(of_all(ranks, part), index) for part in parts]

    def _receive_topk(self, ranks: list[dict[str, Any]], handle: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        if ranks[0]["topk_idx"] is None:
            return None, None
        index = self._rows(handle, [rank["data"].shape[0] for rank in ranks])
        local = ranks[0]["per_expert"].numel() // self.group_size
        ids, weights = of_all(ranks, "topk_idx") - self.rank * local, of_all(ranks, "topk_weights")
        here = (ids >= 0) & (ids < local)
        recv_idx = place(torch.where(here, ids, -1), index)
        recv_idx[index < 0] = -1
        return recv_idx, place(torch.where(here, weights, 0.0), index)

    # ---- combine ----

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        biases: list[Tensor] = []

        def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
            self._check_call(previous_event, async_finish, allocate_on_comm_stream)
            used = config or self.get_combine_config(self.group_size)
            require(isinstance(x, Tensor) and x.dtype == BF16, "v1.combine_dtype", getattr(x, "dtype", type(x)))
            data, _ = split_rows(x, "v1")
            self._check_rows(data, used, combine=True)
            self._check_handle(handle, used)
            require(data.shape[0] == handle[3].numel(), "v1.combine_rows", f"{data.shape[0]} rows, {handle[3].numel()} received")
            if topk_weights is not None:
                check_weights(topk_weights, (data.shape[0], *topk_weights.shape[1:]), "v1.combine_weights")
            biases.extend(check_bias(bias, (handle[4].shape[0], data.shape[1]), "v1.bias"))
            weights = None if topk_weights is None else topk_weights.detach()
            agreed = {
                "v1.same_sms": used.num_sms,
                "v1.same_row": data.shape[1],
                "v1.same_mode": None if weights is None else weights.shape[1],
            }
            return agreed, {"data": data, "weights": weights, "prefix": handle[0], "source": handle[3]}

        ranks = exchange(self.group, "Buffer.combine", prepare)
        num_tokens = handle[4].shape[0]
        total = torch.zeros(num_tokens, x.shape[1])
        weights = None if topk_weights is None else torch.zeros(num_tokens, topk_weights.shape[1])
        for peer, brought in enumerate(ranks):
            ends = [0, *brought["prefix"][:, peer].tolist()]
            rows = slice(ends[self.rank], ends[self.rank + 1])
            tokens = brought["source"][rows].long()
            total.index_add_(0, tokens, brought["data"][rows].float())
            if weights is not None:
                weights.index_add_(0, tokens, brought["weights"][rows])
        for one in biases:
            total += one.float()
        combined = total.to(BF16)
        return combined, weights, finish([combined, weights], async_finish)

    # ---- checks ----

    def _check_call(self, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        require(not self._destroyed, "v1.destroyed", "used after destroy()")
        check_deterministic_fill()
        right = previous_event is None or (isinstance(previous_event, EventOverlap) and previous_event.event is not None)
        require(right, "v1.previous_event", f"found {previous_event!r}")
        complete = not allocate_on_comm_stream or (previous_event is not None and async_finish)
        require(complete, "v1.comm_stream", f"previous_event={previous_event!r}, async_finish={async_finish}")

    def _check_experts(self, num_experts: int) -> None:
        require(num_experts > 0 and num_experts % self.group_size == 0, "v1.expert_division", f"{num_experts} on {self.group_size} ranks")
        require(num_experts // self.group_size <= 128, "v1.local_experts", num_experts // self.group_size)

    def _check_rows(self, data: Tensor, config: Config, combine: bool = False) -> None:
        size = data.shape[1] * data.element_size()
        require(size > 0 and size % 16 == 0, "v1.row_16", f"{size} bytes")
        require(size % 32 == 0, "v1.row_32", f"{size} bytes")
        require(combine or size // 2 + 8 <= _MAX_HALF_ROW, "v1.row_limit", f"H = {data.shape[1]} of {data.dtype}")
        needed = config.get_nvl_buffer_size_hint(size, self.group_size)
        require(self.num_nvl_bytes >= needed, "v1.buffer_size", f"{self.num_nvl_bytes} bytes, needs {needed}")

    def _check_layout(self, data: Tensor, layout: Sequence[Tensor | None], topk_idx: Tensor | None, topk_weights: Tensor | None) -> None:
        per_rank, in_rank, per_expert = layout
        assert per_rank is not None and in_rank is not None and per_expert is not None, "without a handle the layout is needed"
        types = per_rank.dtype == torch.int32 and per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool
        shapes = tuple(per_rank.shape) == (self.group_size,) and tuple(in_rank.shape) == (data.shape[0], self.group_size)
        require(
            types and shapes and in_rank.is_contiguous(),
            "v1.layout",
            [(one.dtype, tuple(one.shape)) for one in (per_rank, in_rank, per_expert)],
        )
        require(bool((in_rank.sum(0) == per_rank).all()), "v1.layout", "the counts are not those of is_token_in_rank")
        self._check_experts(per_expert.numel())
        require((topk_idx is None) == (topk_weights is None), "v1.topk_both", "one of topk_idx and topk_weights")
        if topk_idx is not None and topk_weights is not None:
            check_topk(topk_idx, per_expert.numel(), self.topk_idx_dtype, "v1")
            require(topk_idx.shape[0] == data.shape[0], "v1.layout", f"topk_idx of {topk_idx.shape[0]} tokens for {data.shape[0]} rows")
            check_weights(topk_weights, tuple(topk_idx.shape), "v1.topk_weights")

    def _check_handle(self, handle: tuple[Tensor, ...], config: Config) -> None:
        require(len(handle) == 6, "v1.handle_tuple", f"{len(handle)} entries")
        require(
            handle[1].shape[1] == config.num_sms // 2,
            "v1.handle_sms",
            f"made with {handle[1].shape[1] * 2} SMs, used with {config.num_sms}",
        )


def _joined(received: list[Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    return received[0] if len(received) == 1 else (received[0], received[1])
