"""The one face of dispatch that the rest of the package sees: checks, the choice of a manager, the autograd wrappers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.dispatch.buffers import is_capturing
from nemo_moe.moe.dispatch.compiled import CompiledHandle, compiled_combine, compiled_dispatch, manager_key
from nemo_moe.moe.dispatch.fused_a2a import fused_combine, fused_dispatch
from nemo_moe.moe.dispatch.local import _LocalManager
from nemo_moe.moe.types import Dispatched, DispatchHandle, experts_per_rank
from nemo_moe.registry import DISPATCHERS

if TYPE_CHECKING:
    from nemo_moe.config import BackendConfig


CHECK_ON_DEVICE = os.environ.get("NEMO_MOE_DEBUG") == "1"


class MoEFlexTokenDispatcher:
    """Sends tokens to their experts and brings the results home, by the manager that `backend.dispatcher` names.

    With a group of one rank no token leaves it: any dispatcher is legal, its library need not be there, and a local
    permutation runs.

    Args:
        backend: the recipe's `backend` section.
        num_experts: E over all ranks.
        ep_group: the expert-parallel ranks; None is this rank alone.

    Raises:
        ValueError: unknown dispatcher, or the group's size does not divide the experts.
        ImportError: the dispatcher's library is missing; names the extra to install.
    """

    def __init__(self, backend: BackendConfig, num_experts: int, ep_group: dist.ProcessGroup | None) -> None:
        ep_size = 1 if ep_group is None else dist.get_world_size(ep_group)
        experts_per_rank(num_experts, ep_size)  # raises where it is no whole number
        self.num_experts = num_experts
        if ep_size == 1:
            self.manager: DispatchManager = _LocalManager(None, num_experts)
        else:
            manager_class: type[DispatchManager] = DISPATCHERS.load(backend.dispatcher)
            manager_class.check_available()
            self.manager = manager_class(
                ep_group, num_experts, num_sms=backend.dispatcher_num_sms, async_dispatch=backend.dispatcher_async_dispatch
            )
        self._key = manager_key(self.manager)

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """Send every token to the ranks that own its experts; rows arrive grouped by local expert.

        Differentiable in hidden_states and topk_weights. Backward is one combine along the same route.

        Args:
            hidden_states: [T, H] floating point; this rank's tokens. Not modified. T may be 0.
            topk_idx: [T, K] int64 global expert ids; -1 drops that slot. An id named twice by one token counts as the
                sum of its weights.
            topk_weights: [T, K] fp32. Carried along, not applied: the experts do that.

        Returns:
            Dispatched: rows [R, H], their weights [R], tokens_per_expert [L] and the handle, which must outlive backward.

        Raises:
            ValueError: a wrong shape or dtype; on the CPU also an id outside [-1, E). On a GPU, where that would be a
                host synchronisation, such an id trips a device-side assertion if NEMO_MOE_DEBUG=1 is set. Also where a
                CUDA graph is captured, or torch.compile is at work, and the dispatcher cannot.
        """
        self._check(hidden_states, topk_idx, topk_weights)
        if torch.compiler.is_compiling():
            return compiled_dispatch(self._key, self.manager.num_local_experts, hidden_states, topk_idx, topk_weights)
        if is_capturing():
            self.manager.worst_case_rows(hidden_states.shape[1], topk_idx.shape[1])  # raises where it cannot be captured
        return fused_dispatch(self.manager, hidden_states, topk_idx, topk_weights)

    def combine(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """Bring rows [R, H] home: [T, H], the sum over each token's slots. Differentiable in rows."""
        if isinstance(handle, CompiledHandle):
            return compiled_combine(rows, handle)
        return fused_combine(self.manager, rows, handle)

    def _check(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        if not hidden_states.is_floating_point():
            raise ValueError(f"hidden_states must be floating point, found {hidden_states.dtype}")
        if topk_weights.dtype is not torch.float32:
            raise ValueError(f"topk_weights must be torch.float32, found {topk_weights.dtype}; cast them with .float()")
        if topk_idx.dtype is not torch.int64:
            raise ValueError(f"topk_idx must be torch.int64, found {topk_idx.dtype}; cast it with .long()")
        two_dimensional = hidden_states.dim() == topk_idx.dim() == 2
        if not two_dimensional or topk_idx.shape != topk_weights.shape or topk_idx.shape[0] != hidden_states.shape[0]:
            raise ValueError(
                f"hidden_states {tuple(hidden_states.shape)}, topk_idx {tuple(topk_idx.shape)} and topk_weights"
                f" {tuple(topk_weights.shape)} must be [T, H], [T, K] and [T, K]"
            )
        if topk_idx.device.type != "cpu":
            if CHECK_ON_DEVICE:
                in_range = ((topk_idx >= -1) & (topk_idx < self.num_experts)).all()
                torch._assert_async(in_range, f"topk_idx holds an expert id outside -1 to {self.num_experts - 1}")
        elif topk_idx.numel() and not torch.compiler.is_compiling():
            low, high = int(topk_idx.min()), int(topk_idx.max())
            if low < -1 or high >= self.num_experts:
                found = low if low < -1 else high
                raise ValueError(f"topk_idx holds expert id {found}; allowed are 0 to {self.num_experts - 1}, and -1 for a dropped slot")
