"""What DeepEP 2.x `ElasticBuffer` and 2.5 `EPBuffer` share: rows per (token, rank), or per (token, local expert).

Rows of one source rank (compact) or of one expert (expanded) come in a
shuffled order unless `deterministic`. Several hosts, the stream-K overlap and the JIT compiler are not emulated.
R ranks, T tokens of a rank, M max_T, H hidden size, K top-k, E experts, L = E / R, P received rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

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
)

_MIB2 = 2 << 20
_GAP, _TAIL = -1, -2  # in place of a source rank: rows that fill up an expert to the alignment, rows after the last


@dataclass
class EPHandle:
    """The route of one dispatch.

    Attributes:
        recv_src_metadata: [P, 3] int32 (source rank, token, slot), negative in rows that nobody sent; opaque to callers.
        topk_idx: [T, K] what this rank sent; a copy only with do_handle_copy.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    topk_idx_version: int | None = None


@dataclass(frozen=True)
class Call:
    """One dispatch, whatever the generation calls its arguments."""

    x: Tensor | tuple[Tensor, Tensor]
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    stats: Tensor | None
    num_experts: int | None
    max_tokens: int | None
    alignment: int | None
    num_sms: int
    previous_events: tuple[Any, ...]
    asynchronous: bool
    on_comm_stream: bool
    handle: EPHandle | None
    copy: bool
    cpu_sync: bool | None
    expand: bool
    zero_padding: bool
    column_major_scales: bool


class ElasticCore:
    topk_idx_dtype = torch.int64
    expanded_gradients = True  # cached expanded dispatch, and weights in an expanded combine
    version_check = False

    def _set_up(self, group: dist.ProcessGroup, num_bytes: int | None, shape: tuple[int, int, int], options: dict[str, Any]) -> None:
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = shape
        self.explicitly_destroy = bool(options["explicitly_destroy"])
        self.deterministic, self.prefer_overlap = bool(options["deterministic"]), bool(options["prefer_overlap_with_compute"])
        self.allow_multiple_reduction = bool(options["allow_multiple_reduction"])
        self._destroyed = False

        def prepare() -> tuple[dict[str, Any], None]:
            require(num_bytes is not None or (shape[0] > 0 and shape[1] > 0), "elastic.size_given", f"num_bytes={num_bytes}, {shape}")
            return {"elastic.same_max_tokens": shape, "elastic.same_options": options}, None

        exchange(group, f"{type(self).__name__}()", prepare)
        self.num_bytes = num_bytes or self.get_buffer_size_hint(
            group, *shape, use_fp8_dispatch=options["use_fp8_dispatch"], allow_multiple_reduction=self.allow_multiple_reduction
        )

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        return _bytes(dist.get_world_size(group), num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """The bandwidth of this machine's NVLink can not be read, so the smallest count, or all that may be used."""
        return 4 if self.prefer_overlap else 64

    def destroy(self) -> None:
        require(self.explicitly_destroy, "elastic.explicit_destroy", "explicitly_destroy=False")
        require(not self._destroyed, "elastic.destroyed", "destroyed twice")
        self._destroyed = True

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    # ---- dispatch ----

    def _dispatch(self, call: Call) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        ranks = exchange(self.group, f"{type(self).__name__}.dispatch", lambda: self._prepare_dispatch(call))
        handle = call.handle or self._make_handle(call, ranks)
        meta = handle.recv_src_metadata.long()
        firsts = torch.tensor([0, *(rank["data"].shape[0] for rank in ranks)]).cumsum(0)
        index = torch.where(meta[:, 0] >= 0, firsts[meta[:, 0].clamp(min=0)] + meta[:, 1], -1)
        gaps = meta[:, 0] == _GAP if call.zero_padding else None
        outputs: list[Tensor | None] = [place(of_all(ranks, "data"), index, gaps)]
        if ranks[0]["scales"] is not None:
            outputs.append(place(of_all(ranks, "scales"), index, gaps))
            if call.column_major_scales:
                outputs[1] = outputs[1].t().contiguous().t()  # type: ignore[union-attr]
        recv_x = outputs[0] if len(outputs) == 1 else tuple(outputs)
        recv_idx = recv_weights = None
        if not handle.do_expand:
            local = handle.num_experts // self.group_size
            ids = of_all(ranks, "topk_idx") - self.rank * local
            recv_idx = place(torch.where((ids >= 0) & (ids < local), ids, -1), index)
        if ranks[0]["weights"] is not None:
            weights = of_all(ranks, "weights")
            if handle.do_expand:
                flat = torch.where(index >= 0, index * weights.shape[1] + meta[:, 2], -1)
                recv_weights = place(weights.reshape(-1), flat)
            else:
                recv_weights = place(weights, index)
        outputs += [recv_idx, recv_weights]
        if call.handle is None:
            if call.stats is not None:
                call.stats.add_(handle.num_unaligned_recv_tokens_per_expert)
            outputs += [handle.psum_num_recv_tokens_per_scaleup_rank, handle.psum_num_recv_tokens_per_expert]
            outputs += [handle.num_unaligned_recv_tokens_per_expert]
        return recv_x, recv_idx, recv_weights, handle, finish(outputs, call.asynchronous)

    def _prepare_dispatch(self, call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
        self._check_call(call.previous_events, call.on_comm_stream)
        data, scales = split_rows(call.x, "elastic")
        size = data.shape[1] * data.element_size()
        require(size > 0 and size % 32 == 0, "elastic.row_32", f"{size} bytes")
        require(not call.column_major_scales or scales is not None, "elastic.scales", "column-major scales without scales")
        handle = call.handle
        if handle is None:
            topk_idx, num_experts, max_tokens, alignment, sms = self._check_fresh(call, data)
        else:
            self._check_cached(call, handle, data)
            topk_idx, num_experts, sms = handle.topk_idx, handle.num_experts, handle.num_sms
            max_tokens, alignment = handle.num_max_tokens_per_rank, handle.expert_alignment
        require(not call.zero_padding or call.expand, "elastic.zero_padding", "do_expand=False")
        if call.topk_weights is not None:
            check_weights(call.topk_weights, tuple(topk_idx.shape), "elastic.topk_weights")
        needed = _bytes(self.group_size, max_tokens, data.shape[1], topk_idx.shape[1], scales is not None, self.allow_multiple_reduction)
        require(self.num_bytes >= needed, "elastic.buffer_size", f"{self.num_bytes} bytes, needs {needed}")
        agreed = {
            "elastic.same_max_tokens": max_tokens,
            "elastic.same_experts": (num_experts, topk_idx.shape[1], alignment),
            "elastic.same_row": (data.shape[1], data.dtype),
            "elastic.same_mode": (handle is None, call.expand, call.topk_weights is None),
            "elastic.same_sms": sms,
        }
        weights = None if call.topk_weights is None else call.topk_weights.detach()
        return agreed, {"data": data, "scales": scales, "topk_idx": topk_idx, "weights": weights}

    def _check_fresh(self, call: Call, data: Tensor) -> tuple[Tensor, int, int, int, int]:
        require(call.topk_idx is not None and call.num_experts is not None, "elastic.fresh_needs_topk", "topk_idx or num_experts is None")
        assert call.topk_idx is not None and call.num_experts is not None
        max_tokens = call.max_tokens or self.num_max_tokens_per_rank
        require(data.shape[0] <= max_tokens, "elastic.max_tokens", f"{data.shape[0]} tokens, {max_tokens} at most")
        legal = call.num_experts % self.group_size == 0 and 0 < call.num_experts <= 2048 and call.num_experts // self.group_size <= 256
        require(legal, "elastic.experts", f"{call.num_experts} on {self.group_size} ranks")
        check_topk(call.topk_idx, call.num_experts, self.topk_idx_dtype, "elastic")
        require(call.topk_idx.shape[0] == data.shape[0], "elastic.topk_rows", f"{call.topk_idx.shape[0]} for {data.shape[0]} rows")
        named = call.topk_idx.sort(dim=1).values
        twice = ((named[:, 1:] == named[:, :-1]) & (named[:, 1:] >= 0)).any()
        require(not bool(twice), "elastic.duplicates", "a token names an expert twice")
        sms = call.num_sms or self.get_theoretical_num_sms(call.num_experts, call.topk_idx.shape[1])
        return call.topk_idx, call.num_experts, max_tokens, call.alignment or 1, sms

    def _check_cached(self, call: Call, handle: EPHandle, data: Tensor) -> None:
        require(isinstance(handle, EPHandle), "elastic.handle_type", type(handle))
        self._check_version(handle)
        require(call.topk_idx is None, "elastic.cached_no_topk", "topk_idx given beside a handle")
        require(call.cpu_sync is not True, "elastic.cached_no_sync", "do_cpu_sync=True")
        require(self.expanded_gradients or not handle.do_expand, "elastic.expanded_cached", "needs 2.1.0")
        require(call.expand == handle.do_expand, "elastic.cached_expand", f"do_expand={call.expand}, made with {handle.do_expand}")
        given = (call.num_experts, call.alignment, call.max_tokens)
        made = (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank)
        same = all(one is None or one == other for one, other in zip(given, made, strict=True))
        require(same, "elastic.cached_sizes", f"{given}, made with {made}")
        require(call.num_sms in (0, handle.num_sms), "elastic.handle_sms", f"{call.num_sms}, made with {handle.num_sms}")
        require(
            data.shape[0] == handle.topk_idx.shape[0],
            "elastic.handle_shape",
            f"{data.shape[0]} tokens, {handle.topk_idx.shape[0]} in the handle",
        )

    def _make_handle(self, call: Call, ranks: list[dict[str, Any]]) -> EPHandle:
        _, experts, max_tokens, alignment, sms = self._check_fresh(call, ranks[self.rank]["data"])
        local, top_k = experts // self.group_size, ranks[0]["topk_idx"].shape[1]
        entries: list[list[Tensor]] = [[] for _ in range(local)]  # by expert, one [n, 3] a source rank
        compact = []
        for source, rank in enumerate(ranks):
            ids = rank["topk_idx"].long() - self.rank * local
            for expert in range(local):
                entries[expert].append(F.pad((ids == expert).nonzero(), (1, 0), value=source))
            tokens = ((ids >= 0) & (ids < local)).any(1).nonzero()
            compact.append(F.pad(F.pad(tokens, (0, 1)), (1, 0), value=source))
        by_expert = [torch.cat(parts) for parts in entries]
        counts = torch.tensor([part.shape[0] for part in by_expert])
        padded = (counts + alignment - 1) // alignment * alignment
        ends = padded.cumsum(0) - padded + counts
        per_rank = torch.tensor([part.shape[0] for part in compact]).cumsum(0)
        sync = call.cpu_sync is not False
        if call.expand:
            bound = align(self.group_size * max_tokens * min(top_k, local) + (alignment - 1) * local, alignment)
            sizes = zip(by_expert, padded.tolist(), strict=True)
            pieces = [F.pad(self._ordered(part), (0, 0, 0, size - part.shape[0]), value=_GAP) for part, size in sizes]
        else:
            bound = max_tokens * self.group_size
            pieces = [self._ordered(part) for part in compact]
        meta = torch.cat(pieces)
        if not sync:
            meta = F.pad(meta, (0, 0, 0, bound - meta.shape[0]), value=_TAIL)
        assert call.topk_idx is not None
        kept = call.topk_idx.clone() if call.copy else call.topk_idx
        version = kept._version if self.version_check and not kept.is_inference() else None
        listed = padded.tolist() if sync else []
        return EPHandle(
            call.expand,
            experts,
            alignment,
            max_tokens,
            sms,
            kept,
            listed,
            per_rank.int(),
            ends.int(),
            counts.int(),
            meta.int().contiguous(),
            version,
        )

    def _ordered(self, entries: Tensor) -> Tensor:
        return entries if self.deterministic else entries[shuffled(torch.arange(entries.shape[0]))]

    # ---- combine ----

    def _combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None,
        bias: Tensor | Sequence[Tensor] | None,
        num_sms: int,
        previous_events: tuple[Any, ...],
        asynchronous: bool,
        on_comm_stream: bool,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        biases: list[Tensor] = []
        num_tokens, top_k = handle.topk_idx.shape

        def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
            self._check_call(previous_events, on_comm_stream)
            self._check_version(handle)
            require(isinstance(x, Tensor) and x.dtype == BF16, "elastic.combine_dtype", getattr(x, "dtype", type(x)))
            data, _ = split_rows(x, "elastic")
            require(data.shape[1] % 256 == 0, "elastic.combine_hidden", data.shape[1])
            rows = handle.recv_src_metadata.shape[0]
            require(data.shape[0] == rows, "elastic.combine_rows", f"{data.shape[0]} rows, {rows} received")
            require(num_sms in (0, handle.num_sms), "elastic.handle_sms", f"{num_sms}, made with {handle.num_sms}")
            if topk_weights is not None:
                several = self.allow_multiple_reduction or not handle.do_expand
                require(several, "elastic.expanded_weights", "allow_multiple_reduction=False")
                require(self.expanded_gradients or not handle.do_expand, "elastic.expanded_cached", "needs 2.1.0")
                check_weights(topk_weights, (rows,) if handle.do_expand else (rows, top_k), "elastic.combine_weights")
            biases.extend(check_bias(bias, (num_tokens, data.shape[1]), "elastic.bias"))
            agreed = {"elastic.same_row": data.shape[1], "elastic.same_mode": (handle.do_expand, topk_weights is None)}
            weights = None if topk_weights is None else topk_weights.detach()
            return agreed, {"data": data, "meta": handle.recv_src_metadata, "weights": weights}

        ranks = exchange(self.group, f"{type(self).__name__}.combine", prepare)
        total = torch.zeros(num_tokens, x.shape[1])
        weights = None if topk_weights is None else torch.zeros(num_tokens, top_k)
        for brought in ranks:
            mine = brought["meta"][:, 0] == self.rank
            tokens, slots = brought["meta"][mine, 1].long(), brought["meta"][mine, 2].long()
            part = torch.zeros_like(total).index_add_(0, tokens, brought["data"][mine].float())
            # With several reductions the sender adds up a token's rows first, and sends the sum in bf16.
            total += part.to(BF16).float() if self.allow_multiple_reduction else part
            if weights is not None and handle.do_expand:
                weights[tokens, slots] += brought["weights"][mine]
            elif weights is not None:
                weights.index_add_(0, tokens, brought["weights"][mine])
        for one in biases:
            total += one.float()
        combined = total.to(BF16)
        return combined, weights, finish([combined, weights], asynchronous)

    # ---- checks ----

    def _check_call(self, previous_events: tuple[Any, ...], on_comm_stream: bool) -> None:
        require(not self._destroyed, "elastic.destroyed", "used after destroy()")
        check_deterministic_fill()
        for event in previous_events:
            require(event is None or isinstance(event, EventHandle), "elastic.previous_event", f"found {event!r}")
        require(previous_events[0] is None or on_comm_stream, "elastic.comm_stream", "allocate_on_comm_stream=False")

    def _check_version(self, handle: EPHandle) -> None:
        if handle.topk_idx_version is not None:
            now = handle.topk_idx._version
            require(now == handle.topk_idx_version, "ep25.topk_version", f"changed {now - handle.topk_idx_version} times")


def _bytes(ranks: int, max_tokens: int, hidden: int, top_k: int, fp8: bool, several: bool) -> int:
    top_k = top_k or 32
    extra = top_k * 12 + 16
    dispatch = align((hidden + hidden // 32 if fp8 else 2 * hidden) + extra, 32)
    combine = align(2 * hidden + extra, 32)
    return align(max(ranks * max_tokens * dispatch, (min(ranks, top_k) if several else top_k) * max_tokens * combine), _MIB2)
