"""DeepEP 2.5 `EPBuffer`: what the facts name as its differences from `ElasticBuffer`, and nothing else.

`do_handle_copy` is False by default and topk_idx is kept by reference under a version check; `defer_epilogue` stands where
`previous_event_before_epilogue` was; there are no CPU bytes. The facts do not say how the results of a deferred call are
fetched, nor how load-balancing plans look, so those raise `NotEmulated`. The place of the new constructor argument is a
guess: pass arguments by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .elastic_core import Call, ElasticCore, EPHandle
from .shared import EventHandle, EventOverlap, NotEmulated


class EPBuffer(ElasticCore):
    version_check = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        lb_allocation_plan_or_num_bytes: Any = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        num_bytes = lb_allocation_plan_or_num_bytes
        if num_bytes is not None and not isinstance(num_bytes, int):
            raise NotEmulated("load-balancing allocation plans")
        options = {
            "use_fp8_dispatch": use_fp8_dispatch,
            "deterministic": deterministic,
            "allow_hybrid_mode": allow_hybrid_mode,
            "allow_multiple_reduction": allow_multiple_reduction,
            "prefer_overlap_with_compute": prefer_overlap_with_compute,
            "explicitly_destroy": explicitly_destroy,
        }
        self._set_up(group, num_bytes, (num_max_tokens_per_rank, hidden, num_topk), options)

    def lb_prefetch_weights(self, *args: Any, **kwargs: Any) -> Any:
        raise NotEmulated("lb_prefetch_weights")

    def lb_reduce_grads(self, *args: Any, **kwargs: Any) -> Any:
        raise NotEmulated("lb_reduce_grads")

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        defer_epilogue: bool = False,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        if defer_epilogue:
            raise NotEmulated("defer_epilogue")
        call = Call(
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            stats=cumulative_local_expert_recv_stats,
            num_experts=num_experts,
            max_tokens=num_max_tokens_per_rank,
            alignment=expert_alignment,
            num_sms=num_sms,
            previous_events=(previous_event,),
            asynchronous=async_with_compute_stream,
            on_comm_stream=allocate_on_comm_stream,
            handle=handle,
            copy=do_handle_copy,
            cpu_sync=do_cpu_sync,
            expand=do_expand,
            zero_padding=do_zero_padding,
            column_major_scales=use_tma_aligned_col_major_sf,
        )
        return self._dispatch(call)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | Sequence[Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        defer_epilogue: bool = False,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        if defer_epilogue:
            raise NotEmulated("defer_epilogue")
        return self._combine(x, handle, topk_weights, bias, num_sms, (previous_event,), async_with_compute_stream, allocate_on_comm_stream)
