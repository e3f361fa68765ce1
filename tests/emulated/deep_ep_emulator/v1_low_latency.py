"""The low-latency calls of DeepEP's legacy `Buffer`: inference only, rows per local expert in a fixed frame.

The facts name these calls' arguments, but not all of their spellings: callers should pass the first four by position.
`round_scale`, `use_ue8m0`, `use_logfmt` and `zero_copy` are not emulated. Slot order inside an expert is shuffled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .shared import (
    BF16,
    FP8,
    EventOverlap,
    NotEmulated,
    align,
    check_topk,
    check_weights,
    exchange,
    finish,
    place,
    require,
    shuffled,
    undefined,
)

_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class LowLatency:
    group: dist.ProcessGroup
    group_size: int
    rank: int
    low_latency_mode: bool
    num_rdma_bytes: int
    topk_idx_dtype: torch.dtype

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return align(2 * 2 * num_experts * num_max_dispatch_tokens_per_rank * (2 * hidden + 16), 128)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        self._check_mode(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None] | None]:
        limit = num_max_dispatch_tokens_per_rank

        def prepare() -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
            if round_scale or use_ue8m0:
                raise NotEmulated("round_scale and use_ue8m0")
            self._check_mode(limit, x.shape[1], num_experts)
            require(x.dtype == BF16 and x.is_contiguous(), "v1.ll_rows", x.dtype)
            require(x.shape[0] <= limit, "v1.ll_tokens", f"{x.shape[0]} tokens, {limit} at most")
            check_topk(topk_idx, num_experts, self.topk_idx_dtype, "v1")
            require(topk_idx.shape[1] <= 11, "v1.ll_topk", topk_idx.shape[1])
            require(not (async_finish and return_recv_hook), "v1.ll_hook", "both")
            return {"v1.ll_same": (limit, num_experts, x.shape[1])}, (x.detach(), topk_idx)

        ranks = exchange(self.group, "Buffer.low_latency_dispatch", prepare)
        local = num_experts // self.group_size
        source = torch.full((local, limit * self.group_size), -1)  # rank * limit + token
        counts = torch.zeros(local, dtype=torch.int32)
        for expert in range(local):
            wanted = self.rank * local + expert
            found = [rank * limit + (ids == wanted).any(1).nonzero()[:, 0] for rank, (_, ids) in enumerate(ranks)]
            rows = shuffled(torch.cat(found))
            source[expert, : rows.numel()] = rows
            counts[expert] = rows.numel()
        framed = torch.zeros(self.group_size * limit, x.shape[1], dtype=BF16)
        for rank, (rows, _) in enumerate(ranks):
            framed[rank * limit : rank * limit + rows.shape[0]] = rows
        received: Any = place(framed, source.view(-1)).view(*source.shape, -1)
        outputs = [received]
        if use_fp8:
            outputs = list(_quantised(received, source < 0))
            received = (outputs[0], outputs[1])
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += counts
        handle = (source, limit, x.shape[1], num_experts, x.shape[0])
        event = finish([*outputs, counts], async_finish or return_recv_hook)
        if return_recv_hook:
            return received, counts, handle, EventOverlap(), event.current_stream_wait
        return received, counts, handle, event, None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        source, limit, hidden, num_experts, num_tokens = handle

        def prepare() -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
            if use_logfmt or zero_copy:
                raise NotEmulated("use_logfmt and zero_copy")
            self._check_mode(limit, hidden, num_experts)
            require(x.dtype == BF16 and tuple(x.shape) == (*source.shape, hidden), "v1.ll_rows", f"{x.dtype} {tuple(x.shape)}")
            require(topk_idx.dtype == self.topk_idx_dtype and topk_idx.shape[0] == num_tokens, "v1.ll_handle", tuple(topk_idx.shape))
            check_weights(topk_weights, tuple(topk_idx.shape), "v1.topk_weights")
            require(not (async_finish and return_recv_hook), "v1.ll_hook", "both")
            return {"v1.ll_same": (limit, num_experts, hidden)}, (x.detach(), source)

        ranks = exchange(self.group, "Buffer.low_latency_combine", prepare)
        local = num_experts // self.group_size
        total = torch.zeros(num_tokens, hidden)
        for peer, (rows, origin) in enumerate(ranks):
            for expert in range(local):
                mine = (origin[expert] // limit == self.rank) & (origin[expert] >= 0)
                tokens = origin[expert][mine] % limit
                chosen = topk_idx[tokens] == peer * local + expert
                weights = torch.where(chosen, topk_weights[tokens], 0.0).sum(1)
                total.index_add_(0, tokens, rows[expert][mine].float() * weights[:, None])
        combined = total.to(BF16)
        event = finish([combined], async_finish or return_recv_hook)
        if return_recv_hook:
            return combined, EventOverlap(), event.current_stream_wait
        return combined, event, None

    def _check_mode(self, limit: int, hidden: int, num_experts: int) -> None:
        require(self.low_latency_mode, "v1.ll_mode", "low_latency_mode=False")
        require(hidden in _HIDDEN, "v1.ll_hidden", hidden)
        depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        require(depth >= 2 * (limit + 1), "v1.ll_queue_depth", f"NVSHMEM_QP_DEPTH is {depth} for {limit} tokens")
        require(num_experts % self.group_size == 0, "v1.expert_division", num_experts)
        needed = self.get_low_latency_rdma_size_hint(limit, hidden, self.group_size, num_experts)
        require(self.num_rdma_bytes >= needed, "v1.buffer_size", f"{self.num_rdma_bytes} RDMA bytes, needs {needed}")


def _quantised(rows: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 rows with one fp32 scale per 128 columns; undefined where `unused`."""
    blocks = torch.where(unused[..., None], 0.0, rows.float()).unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / 448.0
    values = (blocks / scales[..., None]).flatten(-2).to(FP8)
    values[unused] = undefined((int(unused.sum()), rows.shape[-1]), FP8)
    scales[unused] = float("nan")
    return values, scales
