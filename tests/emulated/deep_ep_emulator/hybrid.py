"""`HybridEPBuffer` in the versions that a wrapper must tell apart by signature.

| class | upstream state | handle |
|---|---|---|
| HybridEPBuffer2602 | 7febc6e, 2026-02 | 9 entries, no fuse arguments |
| HybridEPBuffer2603 | a0d27f1, 2026-03 | 9 entries, 11 when fused |
| HybridEPBuffer2607 | branch of 2026-07-10 | 11 entries |
| HybridEPBuffer2609 | PR 744 / 746, 2026-09 | 12 entries; `num_of_tokens_per_rank` allows unequal T |

Older states and the two deprecated constructor arguments, whose names the facts do not give, are left out. What
`num_of_tokens_per_rank` means is read from its name: the number that the ranks agree on, at least each rank's own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .hybrid_core import Call, HybridCore


class HybridEPBuffer2607(HybridCore):
    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
    ) -> None:
        sms = {
            "num_sms_dispatch_api": num_sms_dispatch_api,
            "num_sms_combine_api": num_sms_combine_api,
            "num_sms_preprocessing_api": num_sms_preprocessing_api,
            "num_blocks_permute": num_blocks_permute,
            "num_blocks_unpermute": num_blocks_unpermute,
        }
        self._set_up(group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8, sms)

    def handle_size(self, fused: bool) -> int:
        return 11

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Any = None,
        use_host_meta: Any = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Any, ...]]:
        call = Call(
            hidden=hidden,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_of_experts=num_of_experts,
            num_of_experts_per_rank=num_of_experts_per_rank,
            use_fp8=use_fp8,
            routing_map=routing_map,
            probs=probs,
            scaling_factor=scaling_factor,
            num_permuted_tokens=num_permuted_tokens,
            pad_multiple=pad_multiple,
            handle=handle,
            non_blocking=non_blocking,
            fuse=fuse_permute_dispatch,
        )
        return self._dispatch(call)

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...],
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        return self._combine(hidden, probs, handle, pad_multiple, fuse_unpermute_combine)


class HybridEPBuffer2603(HybridEPBuffer2607):
    def handle_size(self, fused: bool) -> int:
        return 11 if fused else 9


class HybridEPBuffer2602(HybridEPBuffer2603):
    def dispatch_with_permute(  # type: ignore[override]
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        num_dispatched_tokens: Any = None,
        use_host_meta: Any = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Any, ...]]:
        return super().dispatch_with_permute(
            hidden=hidden,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_of_experts_per_rank=num_of_experts_per_rank,
            num_of_experts=num_of_experts,
            use_fp8=use_fp8,
            routing_map=routing_map,
            probs=probs,
            scaling_factor=scaling_factor,
            num_permuted_tokens=num_permuted_tokens,
            pad_multiple=pad_multiple,
            handle=handle,
            non_blocking=non_blocking,
        )

    def combine_with_unpermute(  # type: ignore[override]
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...], pad_multiple: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self._combine(hidden, probs, handle, pad_multiple, False)


class HybridEPBuffer2609(HybridEPBuffer2607):
    def handle_size(self, fused: bool) -> int:
        return 12

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Any = None,
        use_host_meta: Any = None,
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Any, ...]]:
        call = Call(
            hidden=hidden,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_of_experts=num_of_experts,
            num_of_experts_per_rank=num_of_experts_per_rank,
            use_fp8=use_fp8,
            routing_map=routing_map,
            probs=probs,
            scaling_factor=scaling_factor,
            num_permuted_tokens=num_permuted_tokens,
            pad_multiple=pad_multiple,
            handle=handle,
            non_blocking=non_blocking,
            fuse=fuse_permute_dispatch,
            num_of_tokens_per_rank=num_of_tokens_per_rank,
        )
        return self._dispatch(call)
