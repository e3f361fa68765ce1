"""One MoE expert layer (dispatch, experts, combine; the router excluded), every dispatcher x experts pair against the others.

Several distinct layers run back to back, so that weights do not stay in a cache; routing is drawn per token. All pairs
work on the same weights and the same tokens: a dispatcher whose ranks share one batch gets on every rank the tokens that
the others hold between them. So every pair must come to the same outputs and gradients, and does as much for users.
Each is compared with all_to_all + loop, in the same process, before anything is timed.

T tokens a rank, W ranks, H hidden size, K experts per token, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_moe.bench.memory import peak_increase
from nemo_moe.bench.pairs import ORACLE, pair_name
from nemo_moe.bench.report import Row
from nemo_moe.bench.shares import shares
from nemo_moe.bench.timing import Protocol, time_contenders
from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import Experts, build_experts
from nemo_moe.registry import DISPATCHERS

# (norm of the difference over the norm, largest difference over the largest element) of outputs and gradients. The order
# of sums differs, and where partial sums are rounded; bf16 has 8 bits, and four layers pass the roundings on. The second
# sees one wrong token among many.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-2, 2e-1)}


class WrongResult(RuntimeError):
    """A pair does not compute what the reference does; raised alike on all ranks."""


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


@dataclass(frozen=True)
class Work:
    """What every pair computes."""

    shape: Shape
    tokens: int
    layers: int
    device: torch.device
    dtype: torch.dtype
    training: bool


def benchmark_layer(work: Work, backends: Mapping[str, BackendConfig], protocol: Protocol) -> dict[str, Row]:
    """Check and time pairs over all ranks of the default group. Collective.

    Returns:
        A row per pair; times are per layer, memory is that of all layers.

    Raises:
        WrongResult: a pair's output or one of its gradients differs from the reference's.
    """
    weights = [_weights(work, layer) for layer in range(work.layers)]
    expected = _outcome(work, ORACLE, weights)
    peaks, differences = {}, {}
    for name, backend in backends.items():
        outcome, peaks[name] = peak_increase(functools.partial(_outcome, work, backend, weights), work.device)
        differences[name] = _compare(name, outcome, expected, TOLERANCES[work.dtype])
        del outcome
    del expected
    stacks = {name: _Stack(work, backend, weights) for name, backend in backends.items()}
    timings = time_contenders({name: stack.run for name, stack in stacks.items()}, work.device, protocol)
    return {
        name: Row(timings[name].per(work.layers), differences[name], peaks[name], shares(stack.run, work.device), stack.shared)
        for name, stack in stacks.items()
    }


class _Batch:
    """The tokens of `ranks`, one rank's after the other's, and where they go in each layer.

    Attributes:
        hidden_states: [T * len(ranks), H]. topk_idx, topk_weights: [layers, T * len(ranks), K].
    """

    def __init__(self, work: Work, ranks: Sequence[int]) -> None:
        shape, parts = work.shape, []
        for rank in ranks:
            generator = torch.Generator().manual_seed(rank)
            hidden_states = torch.randn(work.tokens, shape.hidden_size, generator=generator)
            scores = torch.rand(work.layers, work.tokens, shape.num_experts, generator=generator)
            weights = torch.rand(work.layers, work.tokens, shape.num_experts_per_tok, generator=generator)
            parts.append((hidden_states, scores.topk(shape.num_experts_per_tok, dim=-1).indices, weights))
        hidden, idx, topk_weights = zip(*parts, strict=True)
        self.hidden_states = torch.cat(hidden).to(work.device, work.dtype).requires_grad_(work.training)
        self.topk_idx = torch.cat(idx, dim=1).to(work.device)
        self.topk_weights = torch.cat(topk_weights, dim=1).to(work.device).requires_grad_(work.training)


class _Stack:
    """The layers of one pair on this rank; the weights are everyone's."""

    def __init__(self, work: Work, backend: BackendConfig, weights: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.work, self.weights = work, weights
        self.shared = DISPATCHERS.get(backend.dispatcher).needs_shared_batch and dist.get_world_size() > 1
        self.batch = _Batch(work, range(dist.get_world_size()) if self.shared else [dist.get_rank()])
        self.dispatcher = MoEFlexTokenDispatcher(backend, work.shape.num_experts, dist.group.WORLD)
        self.experts = [_experts_on(work.shape, backend, *pair) for pair in weights]

    def run(self) -> Tensor:
        """One forward, or forward and backward, of all layers."""
        if not self.work.training:
            with torch.no_grad():
                return self._forward()
        for tensor in self._leaves():
            tensor.grad = None
        output = self._forward()
        output.backward(torch.ones_like(output))
        return output.detach()

    def outcome(self) -> dict[str, Tensor]:
        """What a run computes of this rank's tokens and experts, in tensors of its own."""
        first = dist.get_rank() * self.work.tokens if self.shared else 0
        mine = slice(first, first + self.work.tokens)
        self.run()  # what is set up at the first call must not be missing at the second
        result = {"output": self.run()[mine].clone()}
        if self.work.training:
            gradients = [tensor.grad for tensor in self._leaves()]
            assert all(gradient is not None for gradient in gradients)
            hidden, topk, *of_weights = gradients
            result |= {"gradient of hidden_states": hidden[mine].clone(), "gradient of topk_weights": topk[:, mine].clone()}  # type: ignore[index]
            result |= {f"gradient of expert weights {index}": gradient for index, gradient in enumerate(of_weights)}  # type: ignore[misc]
            for tensor in self._leaves():
                tensor.grad = None
        return result

    def _forward(self) -> Tensor:
        hidden_states: Tensor = self.batch.hidden_states
        for experts, idx, weights in zip(self.experts, self.batch.topk_idx, self.batch.topk_weights, strict=True):
            hidden_states = experts(hidden_states, idx, weights, self.dispatcher)
        return hidden_states

    def _leaves(self) -> list[Tensor]:
        return [self.batch.hidden_states, self.batch.topk_weights, *(weight for pair in self.weights for weight in pair)]


def _outcome(work: Work, backend: BackendConfig, weights: list[tuple[nn.Parameter, nn.Parameter]]) -> dict[str, Tensor]:
    """Of a stack that does not live on."""
    return _Stack(work, backend, weights).outcome()


def _weights(work: Work, layer: int) -> tuple[nn.Parameter, nn.Parameter]:
    """gate_up_proj [L, 2I, H] and down_proj [L, H, I] of this rank's experts of one layer."""
    rank, local = dist.get_rank(), work.shape.num_experts // dist.get_world_size()
    hidden, width = work.shape.hidden_size, work.shape.moe_intermediate_size
    generator = torch.Generator(device=work.device).manual_seed(10**6 + rank * work.layers + layer)  # not the tokens' seeds
    gate_up = torch.randn(local, 2 * width, hidden, generator=generator, device=work.device, dtype=work.dtype) * hidden**-0.5
    down = torch.randn(local, hidden, width, generator=generator, device=work.device, dtype=work.dtype) * width**-0.5
    return nn.Parameter(gate_up), nn.Parameter(down)


def _experts_on(shape: Shape, backend: BackendConfig, gate_up: nn.Parameter, down: nn.Parameter) -> Experts:
    with torch.device("meta"):
        experts = build_experts(backend.experts, shape.num_experts, shape.hidden_size, shape.moe_intermediate_size, fp8=backend.experts_fp8)
    experts.keep_local(dist.get_rank(), dist.get_world_size())
    assert experts.gate_up_proj.shape == gate_up.shape and experts.down_proj.shape == down.shape
    experts.gate_up_proj, experts.down_proj = gate_up, down
    return experts


def _compare(name: str, outcome: dict[str, Tensor], expected: dict[str, Tensor], tolerances: tuple[float, float]) -> float:
    """The largest relative difference in norm. Raises WrongResult on all ranks where any rank finds too much. Collective."""
    found = torch.stack([_differences(outcome[key], expected[key]) for key in expected])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    wrong = [
        f"{key} by {norm:.1e} in norm, {largest:.1e} of the largest element"
        for key, (norm, largest) in zip(expected, found.tolist(), strict=True)
        if not (norm <= tolerances[0] and largest <= tolerances[1])
    ]
    if wrong:
        reference = pair_name(ORACLE, dist.get_world_size())
        allowed = f"allowed are {tolerances[0]:.0e} and {tolerances[1]:.0e}"
        raise WrongResult(f"{name} differs from {reference}: {'; '.join(wrong)} ({allowed})")
    return float(found[:, 0].max())


def _differences(actual: Tensor, expected: Tensor) -> Tensor:
    """[2] fp32 on the device: |actual - expected| over |expected|, by norm and by largest element.

    Infinite where either side holds a NaN or an infinity.
    """
    assert actual.shape == expected.shape
    difference, wanted = actual.float() - expected.float(), expected.float()
    return torch.stack([difference.norm() / wanted.norm(), difference.abs().max() / wanted.abs().max()]).nan_to_num(nan=torch.inf)
