"""Ranks that share one batch: each computes its own experts' rows, and the partial sums are added up over the group.

No token is sent; T * H fp32 elements are reduced a layer each way. The ranks of the EP group must hold the same tokens
(ep_size equal to tp_size). The gradients of hidden states and routing weights come back complete on every rank.
Rows are worst-case (T * K on every rank), so nothing synchronises with the host.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from nemo_moe.moe.dispatch.local import _LocalManager
from nemo_moe.moe.types import DispatchHandle


class _AllReduceManager(_LocalManager):
    """`_LocalManager` whose combine adds the ranks' partial results up."""

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        total, weights = super().combine(rows, handle, row_weights)
        with record_function("moe/all_reduce"):
            dist.all_reduce(total, group=self.ep_group)
            if weights is not None:
                dist.all_reduce(weights, group=self.ep_group)
        return total.to(rows.dtype), weights

    def _sum_dtype(self, rows: Tensor) -> torch.dtype:
        # Partial sums of 16-bit rows must not be rounded before they are added.
        return torch.float32
