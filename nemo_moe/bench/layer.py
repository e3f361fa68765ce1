"""One MoE expert layer (dispatch, experts, combine; the router excluded), every dispatcher x experts pair against the others.

Several distinct layers run back to back, so that weights do not stay in a cache; routing is drawn per token. Each pair is
checked against the reference pair in the same process before it is timed. Dispatchers that need a shared batch get one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.bench.shares import shares
from nemo_moe.bench.timing import Timing, time_contenders
from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import Experts, build_experts
from nemo_moe.registry import DISPATCHERS
from nemo_moe.testing.tolerances import relative_difference

REFERENCE = BackendConfig(dispatcher="all_to_all", experts="loop")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Shape:
    """E experts, hidden size H, expert width I, K experts per token."""

    num_experts: int
    hidden_size: int
    moe_intermediate_size: int
    num_experts_per_tok: int


SHAPES = {
    "30b": Shape(128, 2048, 768, 8),
    "h4096": Shape(128, 4096, 1536, 8),
    "small": Shape(16, 128, 64, 4),
}


class _Stack:
    """`layers` expert layers of one pair on this rank, with the input and routing they run on."""

    def __init__(self, shape: Shape, backend: BackendConfig, tokens: int, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        group = dist.group.WORLD
        shared = DISPATCHERS.get(backend.dispatcher).needs_shared_batch
        generator = torch.Generator().manual_seed(0 if shared else dist.get_rank())
        self.hidden_states = torch.randn(tokens, shape.hidden_size, generator=generator).to(device, dtype).requires_grad_()
        scores = torch.rand(layers, tokens, shape.num_experts, generator=generator)
        self.topk_idx = scores.topk(shape.num_experts_per_tok, dim=-1).indices.to(device)
        self.topk_weights = torch.rand(layers, tokens, shape.num_experts_per_tok, generator=generator).to(device)
        self.dispatcher = MoEFlexTokenDispatcher(backend, shape.num_experts, group)
        self.layers = [self._experts(shape, backend, layer, device, dtype) for layer in range(layers)]

    @staticmethod
    def _experts(shape: Shape, backend: BackendConfig, layer: int, device: torch.device, dtype: torch.dtype) -> Experts:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        with torch.device("meta"):
            experts = build_experts(backend.experts, shape.num_experts, shape.hidden_size, shape.moe_intermediate_size)
        experts.keep_local(rank, world_size)
        experts.to(dtype).to_empty(device=device)
        generator = torch.Generator(device=device).manual_seed(100 * rank + layer)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        return experts

    def forward(self) -> Tensor:
        hidden_states: Tensor = self.hidden_states
        for experts, idx, weights in zip(self.layers, self.topk_idx, self.topk_weights, strict=True):
            hidden_states = experts(hidden_states, idx, weights, self.dispatcher)
        return hidden_states

    def train(self) -> Tensor:
        self.hidden_states.grad = None
        for experts in self.layers:
            experts.zero_grad(set_to_none=True)
        output = self.forward()
        output.backward(torch.ones_like(output))
        return output.detach()

    @torch.no_grad()
    def infer(self) -> Tensor:
        return self.forward()


@dataclass(frozen=True)
class LayerResult:
    """Times are per layer; shares are this rank's."""

    timings: dict[str, Timing]
    shares: dict[str, dict[str, float]]


def benchmark_layer(
    shape: Shape, backends: list[BackendConfig], tokens: int, *, layers: int, device: torch.device, dtype: torch.dtype, training: bool
) -> LayerResult:
    """Check and time pairs at one token count. Collective.

    Raises:
        AssertionError: a pair's output or input gradient differs from the reference pair's.
    """
    calls: dict[str, Callable[[], Tensor]] = {}
    for backend in backends:
        stack = _Stack(shape, backend, tokens, layers, device, dtype)
        _check(stack, shape, backend, tokens, layers, device, dtype, training)
        calls[pair_name(backend)] = stack.train if training else stack.infer
    timings = {
        name: Timing(timing.median / layers, timing.smallest / layers, timing.largest / layers, timing.peak_mib)
        for name, timing in time_contenders(calls, device).items()
    }
    return LayerResult(timings, {name: shares(call, device) for name, call in calls.items()})


def pair_name(backend: BackendConfig) -> str:
    """How a pair is written in tables."""
    return f"{backend.dispatcher} + {backend.experts}"


def _check(
    stack: _Stack, shape: Shape, backend: BackendConfig, tokens: int, layers: int, device: torch.device, dtype: torch.dtype, training: bool
) -> None:
    """Compare with the loop experts under the same dispatcher kind (a shared batch needs the same batch on both sides)."""
    shared = DISPATCHERS.get(backend.dispatcher).needs_shared_batch
    oracle = BackendConfig(dispatcher=backend.dispatcher if shared else REFERENCE.dispatcher, experts=REFERENCE.experts)
    reference = _Stack(shape, oracle, tokens, layers, device, dtype)
    outputs = (stack.train(), reference.train()) if training else (stack.infer(), reference.infer())
    assert outputs[1].isfinite().all(), "the reference is not finite"
    pairs = {"output": outputs}
    if training:
        assert stack.hidden_states.grad is not None and reference.hidden_states.grad is not None
        pairs["input gradient"] = (stack.hidden_states.grad, reference.hidden_states.grad)
    for name, (actual, expected) in pairs.items():
        difference = relative_difference(actual, expected)
        assert difference <= TOLERANCE[dtype], f"{pair_name(backend)}: {name} differs from the reference by {difference:.2e}"
