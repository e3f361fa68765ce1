"""The experts' parameters in the one stored layout, and the three moves of a forward: dispatch, compute, combine.

The stored layout is transformers' in-memory layout: gate_up_proj [L, 2I, H] (gate rows first, then up rows) and
down_proj [L, H, I], both applied as x @ W.T. A backend that wants another layout makes a view, or says why it copies.

Nothing reads the weights outside `forward`: FSDP2 gathers and reduces them by this module's hooks.

T tokens, K experts per token, E experts, L local experts, R received rows, H hidden size, I expert width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_moe.moe.types import Dispatcher, experts_per_rank
from nemo_moe.registry import EXPERTS


class Experts(nn.Module, ABC):
    """SwiGLU experts; subclasses supply `compute`.

    Attributes:
        num_experts: E over all ranks. num_local_experts: L. expert_offset: global id of the first local expert.
    """

    def __init__(self, num_experts: int, hidden_size: int, moe_intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_local_experts = num_experts
        self.expert_offset = 0
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * moe_intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, moe_intermediate_size))
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=0.02)

    @classmethod
    def check_available(cls, fp8: str | None = None) -> None:
        """Raise ImportError or ValueError naming what this machine lacks and the fix; return where nothing is missing."""

    def keep_local(self, ep_rank: int, ep_size: int) -> None:
        """Drop all experts but [ep_rank * L, (ep_rank + 1) * L), L = E / ep_size. Call it once, before FSDP."""
        assert self.num_local_experts == self.num_experts, "experts are sharded already"
        self.num_local_experts = experts_per_rank(self.num_experts, ep_size)
        self.expert_offset = ep_rank * self.num_local_experts
        local = slice(self.expert_offset, self.expert_offset + self.num_local_experts)
        self.gate_up_proj = nn.Parameter(self.gate_up_proj.detach()[local].clone())
        self.down_proj = nn.Parameter(self.down_proj.detach()[local].clone())

    def forward(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor, dispatcher: Dispatcher) -> Tensor:
        """[T, H] tokens, [T, K] int64 global expert ids (-1 drops a slot), [T, K] fp32 weights -> [T, H] weighted sums.

        Raises ValueError for tokens of another dtype or H than the weights, and as `Dispatcher.dispatch` does.
        """
        self._check(hidden_states)
        dispatched = dispatcher.dispatch(hidden_states, topk_idx, topk_weights)
        with torch.profiler.record_function("moe/experts"):
            rows = self.compute(dispatched.hidden_states, dispatched.topk_weights, dispatched.tokens_per_expert)
        return dispatcher.combine(rows, dispatched.handle)

    def _check(self, hidden_states: Tensor) -> None:
        dtype, hidden_size = self.gate_up_proj.dtype, self.gate_up_proj.shape[-1]
        if hidden_states.dtype is not dtype:
            raise ValueError(f"hidden_states must be {dtype} like the experts' weights, found {hidden_states.dtype}; cast one of them")
        if hidden_states.shape[-1] != hidden_size:
            raise ValueError(f"hidden_states must be [T, {hidden_size}] like the experts' weights, found {list(hidden_states.shape)}")

    @abstractmethod
    def compute(self, hidden_states: Tensor, topk_weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Run each group of rows through its expert, with the routing weight applied before the down projection.

        Args:
            hidden_states: [R, H] grouped by local expert; R may be 0.
            topk_weights: [R] fp32.
            tokens_per_expert: [L] int32 on the device; rows past its sum belong to nobody.

        Returns:
            [R, H]; rows past the sum are undefined. Every expert's weights get a gradient, exact zeros without rows.
        """


def build_experts(name: str, num_experts: int, hidden_size: int, moe_intermediate_size: int, *, fp8: str | None = None) -> Experts:
    """The experts backend `name` of the registry, in FP8 by the recipe `fp8` of its entry.

    Raises ValueError for an unknown name or recipe, ImportError for a missing library.
    """
    recipe = {}
    if fp8 is not None:
        check_fp8_sizes(name, fp8, hidden_size, moe_intermediate_size)
        recipe = {"fp8": fp8}
    return cast(Experts, EXPERTS.load(name)(num_experts, hidden_size, moe_intermediate_size, **recipe))


def check_fp8_sizes(name: str, fp8: str, hidden_size: int, moe_intermediate_size: int) -> None:
    """Raise ValueError where the backend has no such recipe, or the recipe cannot cut these sizes into its blocks."""
    recipes = EXPERTS.get(name).fp8
    if fp8 not in recipes:
        raise ValueError(f"experts {name!r} have no FP8 recipe {fp8!r} (legal: {', '.join(recipes) or 'none'})")
    for key, size in (("hidden_size", hidden_size), ("moe_intermediate_size", moe_intermediate_size)):
        if size % recipes[fp8]:
            raise ValueError(
                f"backend.experts_fp8 {fp8!r} needs {key} to be a multiple of {recipes[fp8]}, found {size}; choose another recipe, or null"
            )


def weighted_swiglu(gate_up: Tensor, topk_weights: Tensor) -> Tensor:
    """silu(gate) * up * routing weight: [R, 2I], [R] fp32 -> [R, I] in the dtype of `gate_up`; weighted in fp32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * up * topk_weights[:, None]).to(gate_up.dtype)
