"""Grouping by expert within one rank: what runs where no token leaves its rank, and the inside of `all_reduce`.

No host synchronisation: R is always T * K, and the rows of dropped slots come last, past the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.permute import count_per_expert, rows_of_slots, slots_by_expert, sum_slots
from nemo_moe.moe.types import Dispatched, DispatchHandle


@dataclass(frozen=True, eq=False)
class _LocalHandle(DispatchHandle):
    """slot_order [R] flat slots by expert, dropped ones last; slot_rows [T, K] the row of each slot, -1 for dropped ones."""

    slot_order: Tensor
    slot_rows: Tensor


class _LocalManager(DispatchManager):
    """Serves the experts of this rank from the tokens of this rank."""

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        local_idx = self._local_ids(topk_idx)
        slot_order = slots_by_expert(local_idx, self.num_local_experts)
        handle = _LocalHandle(
            num_tokens=hidden_states.shape[0],
            tokens_per_expert=count_per_expert(local_idx, self.num_local_experts).int(),
            topk_weights=topk_weights.detach().reshape(-1)[slot_order],
            slot_order=slot_order,
            slot_rows=rows_of_slots(slot_order, local_idx),
        )
        return Dispatched(
            hidden_states=self.redispatch(hidden_states, handle),
            topk_weights=handle.topk_weights,
            tokens_per_expert=handle.tokens_per_expert,
            handle=handle,
        )

    def dispatch_worst_case(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return self.dispatch(hidden_states, topk_idx, topk_weights)

    def worst_case_rows(self, hidden_size: int, top_k: int) -> int | None:
        return None

    def redispatch(self, hidden_states: Tensor, handle: DispatchHandle) -> Tensor:
        assert isinstance(handle, _LocalHandle)
        with record_function("moe/permute"):
            return hidden_states.index_select(0, handle.slot_order // handle.slot_rows.shape[1])

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(handle, _LocalHandle)
        weights = None
        if row_weights is not None:
            by_slot = torch.empty_like(row_weights).index_copy_(0, handle.slot_order, row_weights)
            weights = by_slot.view(handle.slot_rows.shape).masked_fill(handle.slot_rows < 0, 0.0)
        with record_function("moe/permute"):
            return sum_slots(rows, handle.slot_rows, self._sum_dtype(rows)), weights

    def _sum_dtype(self, rows: Tensor) -> torch.dtype:
        return rows.dtype

    def _local_ids(self, topk_idx: Tensor) -> Tensor:
        """Global expert ids -> ids among this rank's experts, -1 for the experts of other ranks."""
        local_idx = topk_idx - self.ep_rank * self.num_local_experts
        return torch.where((local_idx >= 0) & (local_idx < self.num_local_experts), local_idx, -1)
