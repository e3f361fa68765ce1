"""The contract of a dispatch manager: three raw calls, without autograd, that `fused_a2a` makes differentiable.

Dispatch and combine are transposes of each other, so a manager needs no backward of its own: combine's backward is
`redispatch`, dispatch's backward is `combine` with the row weights' gradients along. State between calls is in the
returned handle, never on the manager: layers may share a manager's buffers, never its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import Tensor

from nemo_moe.moe.types import Dispatched, DispatchHandle


class DispatchManager(ABC):
    """Moves tokens between the ranks of one expert-parallel group.

    Args:
        ep_group: the ranks, of which rank r owns the experts [r * L, (r + 1) * L); None is this rank alone.
        num_experts: E over all ranks, a multiple of the group's size.
        num_sms: the recipe's `dispatcher_num_sms`.
        async_dispatch: the recipe's `dispatcher_async_dispatch`.
    """

    def __init__(
        self, ep_group: dist.ProcessGroup | None, num_experts: int, *, num_sms: int | None = None, async_dispatch: bool = False
    ) -> None:
        self.ep_group = ep_group
        self.ep_size = 1 if ep_group is None else dist.get_world_size(ep_group)
        self.ep_rank = 0 if ep_group is None else dist.get_rank(ep_group)
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.ep_size
        self.num_sms = num_sms
        self.async_dispatch = async_dispatch

    @classmethod  # noqa: B027  (most dispatchers need nothing of the machine)
    def check_available(cls) -> None:
        """Raise ImportError or ValueError naming what this machine lacks and the fix; return where nothing is missing.

        Asked before a manager is built, so it may not need one.
        """

    @abstractmethod
    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """Send every token to the ranks that own its experts.

        Args:
            hidden_states: [T, H] contiguous; not modified; T may be 0.
            topk_idx: [T, K] int64 global expert ids; -1 drops that slot.
            topk_weights: [T, K] fp32; carried along, not applied.

        Returns:
            Rows grouped by local expert; see `Dispatched`.
        """

    @abstractmethod
    def redispatch(self, hidden_states: Tensor, handle: DispatchHandle) -> Tensor:
        """The rows [R, H] of other [T, H] hidden states along the route of `handle`: combine's backward, recomputation."""

    @abstractmethod
    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send rows back and add each token's up, accumulating in fp32 within a rank.

        Args:
            rows: [R, H]; rows past the counts are not read.
            row_weights: [R] fp32, one number a row to carry home (the gradients of the routing weights), or None.

        Returns:
            [T, H] in the dtype of `rows`, and [T, K] fp32 with zeros for dropped slots, or None.
        """
