"""HybridEP: DeepEP's `HybridEPBuffer`, which dispatches and groups rows by expert in one call and undoes both in another.

What the library demands is met in here, so that callers see the common contract: all ranks pass the same number of tokens
(they agree on the most, and each pads with rows that reach no expert), routing is a map [T, E] (`_indices_to_multihot`
also drops -1 slots and adds a token's duplicates up), and a buffer is built large enough by all ranks together, because the
library itself would grow it silently and only where it thinks that it must.

Rows are bf16, so `precision: fp32` is refused for it. It has no asynchronous mode and its fp8 transport is not used. Each
capacity, number of SMs and mode is compiled at first use (some 20 s), so capacities are rounded. Its handles differ by
version and stay opaque here.

T tokens of this rank, P tokens a rank after padding, K experts per token, E experts, L local experts, R received rows,
H hidden size.
Cost: 2 * H bytes a row and rank and 4 * E bytes a token on the wire, two host synchronisations an eager dispatch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nemo_moe.availability import load_hybridep
from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.dispatch.buffers import (
    CommBuffer,
    agree_on_most,
    find_buffer,
    get_buffer,
    is_capturing,
    refuse_while_capturing,
    require_same_on_all_ranks,
    rounded_capacity,
)
from nemo_moe.moe.types import Dispatched, DispatchHandle

_KIND = "hybridep"
_TOKENS_MULTIPLE = 64  # of a rank's tokens: whole chunks, for which no rule about remainders remains


@dataclass(frozen=True, eq=False)
class _HybridEPHandle(DispatchHandle):
    """The library's handle, opaque; topk_idx [T, K]; padded_tokens P; num_rows R, which later calls must repeat.

    `counts` is the library's own tensor: pinned memory that must live until its copy to the device is done.
    """

    buffer: CommBuffer
    library_handle: Any
    counts: Tensor
    topk_idx: Tensor
    padded_tokens: int
    num_rows: int
    sync_free: bool


class _HybridEPManager(DispatchManager):
    """Dispatch through HybridEP; see the module's text.

    Attributes:
        fuse_permutation: let the library group rows inside its dispatch kernel; for versions that can.
    """

    fuse_permutation: ClassVar[bool] = False

    def __init__(self, ep_group: dist.ProcessGroup, num_experts: int, *, num_sms: int | None = None, async_dispatch: bool = False) -> None:
        if async_dispatch:
            raise ValueError("backend.dispatcher 'hybridep' has no asynchronous dispatch; set dispatcher_async_dispatch to false")
        super().__init__(ep_group, num_experts, num_sms=num_sms)
        self.group = ep_group
        self.check_num_sms(num_sms)
        self.buffer_class: Any = self.library().HybridEPBuffer
        parameters = inspect.signature(self.buffer_class.dispatch_with_permute).parameters
        self.can_be_sync_free = "non_blocking" in parameters
        if self.fuse_permutation and "fuse_permute_dispatch" not in parameters:
            raise ValueError("this version of HybridEP has no fused permutation; set fuse_permutation to False, or install a newer one")
        require_same_on_all_ranks(ep_group, f"HybridEPBuffer({', '.join(parameters)}) with num_sms {num_sms}")

    @classmethod
    def library(cls) -> ModuleType:
        """The module with HybridEPBuffer. Raises ImportError naming what this machine lacks."""
        return load_hybridep()

    @classmethod
    def check_available(cls) -> None:
        cls.library()

    @classmethod
    def check_sizes(cls, hidden_size: int, num_experts: int, top_k: int, ep_size: int) -> None:
        if hidden_size % 16:
            raise ValueError(f"backend.dispatcher 'hybridep' needs a hidden_size that is a multiple of 16, found {hidden_size}")
        if num_experts % 4:  # local experts * ranks, whose probabilities travel in units of 16 bytes
            raise ValueError(f"backend.dispatcher 'hybridep' needs a number of experts that is a multiple of 4, found {num_experts}")

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return self._dispatch(hidden_states, topk_idx, topk_weights, sync_free=is_capturing())

    def dispatch_worst_case(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return self._dispatch(hidden_states, topk_idx, topk_weights, sync_free=True)

    def worst_case_rows(self, hidden_size: int, top_k: int) -> int | None:
        if not self.can_be_sync_free:
            raise ValueError(
                "this version of HybridEP reads row counts on the host, so it can run neither under CUDA-graph capture nor under"
                " torch.compile; install a newer one (its dispatch_with_permute has the argument non_blocking), or run it eagerly"
            )
        capacity = find_buffer(_KIND, self.group, self._shape(hidden_size)).size
        return self.ep_size * capacity * min(top_k, self.num_local_experts)

    def _dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, sync_free: bool) -> Dispatched:
        self._check(hidden_states, "hidden states")
        (num_tokens, top_k), hidden_size = topk_idx.shape, hidden_states.shape[1]
        self.check_sizes(hidden_size, self.num_experts, top_k, self.ep_size)
        if sync_free:
            self.worst_case_rows(hidden_size, top_k)  # raises where this version cannot
            buffer = find_buffer(_KIND, self.group, self._shape(hidden_size))
            padded_tokens = buffer.size
            if num_tokens > padded_tokens:
                problem = f"was warmed up for {padded_tokens} tokens a rank and gets {num_tokens}"
                refuse_while_capturing(_KIND, problem, always=True)
        else:
            most = max(1, agree_on_most(num_tokens, self.group, hidden_states.device))
            padded_tokens = -(-most // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE
            buffer = self._buffer(hidden_size, most, hidden_states.device)
        routing_map, probs = self._indices_to_multihot(topk_idx, topk_weights.detach())
        worst = self.ep_size * padded_tokens * min(top_k, self.num_local_experts)
        rows, row_weights, _, counts, library_handle = buffer.library.dispatch_with_permute(
            hidden=_padded(hidden_states, padded_tokens),
            routing_map=_padded(routing_map, padded_tokens),
            probs=_padded(probs, padded_tokens),
            num_of_experts_per_rank=self.num_local_experts,
            **({"num_permuted_tokens": worst, "non_blocking": True} if sync_free else {}),
            **self._fusion("fuse_permute_dispatch"),
        )
        handle = _HybridEPHandle(
            num_tokens=num_tokens,
            tokens_per_expert=counts.to(hidden_states.device, non_blocking=True).int(),
            topk_weights=row_weights,
            buffer=buffer,
            library_handle=library_handle,
            counts=counts,
            topk_idx=topk_idx,
            padded_tokens=padded_tokens,
            num_rows=rows.shape[0],
            sync_free=sync_free,
        )
        buffer.keep_for(handle)
        return Dispatched(hidden_states=rows, topk_weights=row_weights, tokens_per_expert=handle.tokens_per_expert, handle=handle)

    def redispatch(self, hidden_states: Tensor, handle: DispatchHandle) -> Tensor:
        assert isinstance(handle, _HybridEPHandle)
        self._check(hidden_states, "hidden states")
        rows: Tensor = handle.buffer.library.dispatch_with_permute(
            hidden=_padded(hidden_states, handle.padded_tokens),
            handle=handle.library_handle,
            num_permuted_tokens=handle.num_rows,
            **({"non_blocking": True} if handle.sync_free else {}),
            **self._fusion("fuse_permute_dispatch"),
        )[0]
        return rows

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(handle, _HybridEPHandle)
        self._check(rows, "rows")
        total, probs = handle.buffer.library.combine_with_unpermute(
            hidden=rows, probs=row_weights, handle=handle.library_handle, **self._fusion("fuse_unpermute_combine")
        )
        total = total[: handle.num_tokens]
        if row_weights is None:
            return total, None
        # Dense [P, E]: each slot takes its expert's number, duplicates of an expert the same one.
        by_slot = probs[: handle.num_tokens].gather(1, handle.topk_idx.clamp(min=0))
        return total, torch.where(handle.topk_idx < 0, 0.0, by_slot)

    def _indices_to_multihot(self, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K] ids and weights -> [T, E] bool, who goes where, and [T, E] fp32 weights; -1 slots appear in neither.

        An expert that a token names twice gets the sum of its weights.
        """
        num_tokens = topk_idx.shape[0]
        real = topk_idx >= 0
        columns = topk_idx.clamp(min=0)
        probs = topk_weights.new_zeros(num_tokens, self.num_experts)
        probs.scatter_add_(1, columns, torch.where(real, topk_weights, 0.0))
        named = torch.zeros(num_tokens, self.num_experts, dtype=torch.uint8, device=topk_idx.device)
        return named.scatter_add_(1, columns, real.to(torch.uint8)).bool(), probs

    def _shape(self, hidden_size: int) -> tuple[Any, ...]:
        return (hidden_size, self.num_local_experts, self.num_sms)

    def _buffer(self, hidden_size: int, num_tokens: int, device: torch.device) -> CommBuffer:
        sms = {} if self.num_sms is None else {"num_sms_dispatch_api": self.num_sms, "num_sms_combine_api": self.num_sms}

        def build(capacity: int) -> Any:
            return self.buffer_class(
                group=self.group,
                hidden_dim=hidden_size,
                max_num_of_tokens_per_rank=capacity,
                num_local_experts=self.num_local_experts,
                **sms,
            )

        return get_buffer(_KIND, self.group, self._shape(hidden_size), rounded_capacity(num_tokens), build, device)

    def _fusion(self, argument: str) -> dict[str, bool]:
        return {argument: True} if self.fuse_permutation else {}

    @staticmethod
    def _check(tensor: Tensor, what: str) -> None:
        if tensor.dtype is not torch.bfloat16:
            raise ValueError(
                f"backend.dispatcher 'hybridep' moves torch.bfloat16 {what}, found {tensor.dtype}; set precision to bf16, or use"
                " dispatcher all_to_all"
            )


def init_hybrid_ep_buffer(
    group: dist.ProcessGroup, hidden_size: int, num_tokens: int, num_experts: int, *, num_sms: int | None = None
) -> None:
    """Build the buffer of layers of this shape now, for `num_tokens` a rank, so that no later batch has to. Collective.

    Args:
        group: the expert-parallel ranks.
        num_tokens: the most that a rank will send; the largest of the ranks' numbers counts.
        num_experts: E over all ranks.
        num_sms: the recipe's `dispatcher_num_sms`.

    Raises:
        ValueError, ImportError: as building a dispatcher does.
    """
    manager = _HybridEPManager(group, num_experts, num_sms=num_sms)
    manager.check_sizes(hidden_size, num_experts, 1, manager.ep_size)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    manager._buffer(hidden_size, agree_on_most(num_tokens, group, device), device)


def _padded(tensor: Tensor, num_tokens: int) -> Tensor:
    """[P, ...]: zeros, which name no expert, below the T rows; contiguous, and never the tensor's own memory past it."""
    missing = num_tokens - tensor.shape[0]
    return tensor.contiguous() if missing == 0 else F.pad(tensor, (0, 0, 0, missing))
