"""DeepEP: its kernels write tokens straight into the memory of the ranks that own their experts, over NVLink and RDMA.

One manager over three generations of the library (`deepep_adapters`). It keeps what they have in common: the checks before
a kernel could only assert, a token's duplicate experts (merged; the libraries send a token to an expert once), a rank
without tokens (which sends one that reaches nobody), and the routing-weight gradients' way back to their slots.

Rows are bf16, so `precision: fp32` is refused for it. Order inside an expert varies from run to run, so sums do in their
last bits. Eager calls wait once for the counts; under CUDA-graph capture and torch.compile nothing waits and rows are
worst-case (`DispatchManager.dispatch_worst_case`).

T tokens of this rank, K experts per token, E experts, L local experts, R received rows, H hidden size.
Cost: 2 * H bytes a row and rank on the wire, one host synchronisation an eager dispatch; ElasticBuffer and EPBuffer agree on
the number of tokens first (one small all-reduce, and a second host synchronisation).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nemo_moe.availability import Generation, deepep_generation, load_deepep_kernel
from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.dispatch.buffers import is_capturing, require_same_on_all_ranks
from nemo_moe.moe.dispatch.deepep_adapters import ADAPTERS, Adapter, Route
from nemo_moe.moe.permute import merge_duplicates
from nemo_moe.moe.types import Dispatched, DispatchHandle

DEFAULT_NUM_SMS = 24  # HybridEP's own default on one NVLink domain; not measured for DeepEP yet
_num_sms: int | None = None


def set_deepep_num_sms(num_sms: int | None) -> None:
    """What `backend.dispatcher_num_sms: null` means for dispatchers built from now on; None is `DEFAULT_NUM_SMS` again.

    Read once when a dispatcher is built, and the same on all ranks. Raises ValueError unless it is even and above 0.
    """
    if num_sms is not None and (num_sms <= 0 or num_sms % 2):
        raise ValueError(f"DeepEP takes an even number of SMs above 0, found {num_sms}")
    global _num_sms
    _num_sms = num_sms


@dataclass(frozen=True, eq=False)
class _DeepepHandle(DispatchHandle):
    """route: the library's. kept [T, K] bool, the slots that were sent; first_slot [T, K] int64 as `merge_duplicates` has it."""

    route: Route
    topk_idx: Tensor
    first_slot: Tensor


class _DeepepManager(DispatchManager):
    """Dispatch through DeepEP; see the module's text.

    Attributes:
        generation: the one to use, by name; None takes the newest that the library has and this machine can run.
    """

    generation: ClassVar[str | None] = None

    def __init__(self, ep_group: dist.ProcessGroup, num_experts: int, *, num_sms: int | None = None, async_dispatch: bool = False) -> None:
        super().__init__(ep_group, num_experts, num_sms=num_sms or _num_sms or DEFAULT_NUM_SMS, async_dispatch=async_dispatch)
        assert self.num_sms is not None
        self.check_num_sms(self.num_sms)
        library = self.library()
        found = self.found_generation(library)
        require_same_on_all_ranks(ep_group, f"{found.buffer} with {self.num_sms} SMs, async_dispatch {async_dispatch}")
        self.adapter: Adapter = ADAPTERS[found.name](library, ep_group, num_experts, self.num_sms, async_dispatch)

    @classmethod
    def library(cls) -> ModuleType:
        """DeepEP's module. Raises ImportError naming what this machine lacks."""
        return load_deepep_kernel()

    @classmethod
    def found_generation(cls, library: ModuleType) -> Generation:
        """The generation of `library` that runs here. Raises ImportError."""
        return deepep_generation(library, cls.generation)

    @classmethod
    def check_available(cls) -> None:
        cls.found_generation(cls.library())

    @classmethod
    def check_sizes(cls, hidden_size: int, num_experts: int, top_k: int, ep_size: int) -> None:
        ADAPTERS[cls.found_generation(cls.library()).name].check_sizes(hidden_size, num_experts, top_k, ep_size)

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return self._dispatch(hidden_states, topk_idx, topk_weights, sync_free=is_capturing())

    def dispatch_worst_case(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return self._dispatch(hidden_states, topk_idx, topk_weights, sync_free=True)

    def worst_case_rows(self, hidden_size: int, top_k: int) -> int | None:
        return self.adapter.worst_case_rows(hidden_size, top_k)

    def _dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, sync_free: bool) -> Dispatched:
        self._check(hidden_states, topk_idx.shape[1])
        ids, weights, first_slot = merge_duplicates(topk_idx, topk_weights.detach())
        sent_ids = ids if ids.shape[0] else ids.new_full((1, ids.shape[1]), -1)
        sent_weights = weights if ids.shape[0] else weights.new_zeros(sent_ids.shape)
        received = self.adapter.dispatch(_at_least_one(hidden_states), sent_ids, sent_weights, sync_free=sync_free)
        handle = _DeepepHandle(
            num_tokens=hidden_states.shape[0],
            tokens_per_expert=received.tokens_per_expert,
            topk_weights=received.row_weights,
            route=received.route,
            topk_idx=topk_idx,
            first_slot=first_slot,
        )
        received.route.buffer.keep_for(handle)
        return Dispatched(
            hidden_states=received.rows,
            topk_weights=received.row_weights,
            tokens_per_expert=received.tokens_per_expert,
            handle=handle,
        )

    def redispatch(self, hidden_states: Tensor, handle: DispatchHandle) -> Tensor:
        assert isinstance(handle, _DeepepHandle)
        self._check(hidden_states, handle.first_slot.shape[1])
        return self.adapter.redispatch(_at_least_one(hidden_states), handle.route)

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(handle, _DeepepHandle)
        if rows.dtype is not torch.bfloat16:
            raise ValueError(f"backend.dispatcher 'deepep' moves torch.bfloat16 rows, found {rows.dtype}; make the experts return bf16")
        total, weights = self.adapter.combine(rows, handle.route, row_weights)
        total = total[: handle.num_tokens]
        if weights is None:
            return total, None
        # Each slot of a merged expert gets the gradient of the sum.
        by_slot = weights[: handle.num_tokens].gather(1, handle.first_slot)
        return total, torch.where(handle.topk_idx < 0, 0.0, by_slot)

    def _check(self, hidden_states: Tensor, top_k: int) -> None:
        """What the kernels would answer with an assertion."""
        if hidden_states.dtype is not torch.bfloat16:
            raise ValueError(
                f"backend.dispatcher 'deepep' moves torch.bfloat16 hidden states, found {hidden_states.dtype}; set precision to bf16,"
                " or use dispatcher all_to_all"
            )
        self.adapter.check_sizes(hidden_states.shape[1], self.num_experts, top_k, self.ep_size)


def _at_least_one(hidden_states: Tensor) -> Tensor:
    """A rank without tokens sends one row of zeros, which no slot sends anywhere: kernels get no empty tensors."""
    return hidden_states if hidden_states.shape[0] else F.pad(hidden_states, (0, 0, 0, 1))
