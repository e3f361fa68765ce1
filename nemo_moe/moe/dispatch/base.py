"""The contract of a dispatch manager: three raw calls, without autograd, that `fused_a2a` makes differentiable.

Dispatch and combine are transposes of each other, so a manager needs no backward of its own: combine's backward is
`redispatch`, dispatch's backward is `combine` with the row weights' gradients along. State between calls is in the
returned handle, never on the manager: layers may share a manager's buffers, never its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.moe.types import Dispatched, DispatchHandle
from nemo_moe.registry import DISPATCHERS


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

    @classmethod  # noqa: B027
    def check_sizes(cls, hidden_size: int, num_experts: int, top_k: int, ep_size: int) -> None:
        """Raise ValueError naming a size that this machine's version of the library cannot serve, and what it can.

        Asked where `check_available` has nothing against it. Limits that hold everywhere stand in the registry entry.
        """

    @classmethod
    def check_num_sms(cls, num_sms: int | None) -> None:
        """Raise ValueError where this device has fewer streaming multiprocessors than `dispatcher_num_sms` asks for."""
        if num_sms is not None and torch.cuda.is_available():
            most = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
            if num_sms > most:
                raise ValueError(
                    f"backend.dispatcher_num_sms is {num_sms}, and this device ({torch.cuda.get_device_name()}) has {most} streaming"
                    " multiprocessors; choose fewer"
                )

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

    def dispatch_worst_case(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """`dispatch` without a host synchronisation: R is `worst_case_rows`, whatever arrives. For CUDA graphs and torch.compile.

        `dispatch` does this by itself while a CUDA graph is captured.

        Raises:
            ValueError: the dispatcher reads counts on the host, or more tokens come than an eager call has prepared it for.
        """
        raise ValueError(_reads_counts(self))

    def worst_case_rows(self, hidden_size: int, top_k: int) -> int | None:
        """R of `dispatch_worst_case`, None where it is T * K; overflow is impossible. Raises ValueError as that does."""
        raise ValueError(_reads_counts(self))


def _reads_counts(manager: DispatchManager) -> str:
    able = [name for name in DISPATCHERS if DISPATCHERS.get(name).capturable]
    return (
        f"{type(manager).__name__} reads row counts on the host, so it can run neither under CUDA-graph capture nor under torch.compile;"
        f" run it eagerly, or choose a dispatcher that can: {', '.join(able)}"
    )
