"""DeepEP and HybridEP themselves, on two GPUs: the conformance suite, values against all_to_all, CUDA graphs, compile, memory.

Each generation that the installed library has runs under a name of its own; one that this machine cannot run is skipped
with the reason that `is_deepep_loadable` gives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.availability import GENERATIONS, deepep_generation, load_deepep_kernel, load_hybridep
from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.buffers import buffer_count, destroy_all_buffers
from nemo_moe.moe.dispatch.deepep import _DeepepManager
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import Experts, build_experts
from nemo_moe.registry import DISPATCHERS, DispatcherSpec
from nemo_moe.testing.conformance import CASES, Case, check_case
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import relative_difference

pytestmark = pytest.mark.gpu2

BY_NAME = {case.name: case for case in CASES}
HIDDEN_SIZE, EXPERT_WIDTH, NUM_EXPERTS, TOP_K = 2048, 768, 32, 8


class _V1(_DeepepManager):
    generation = "v1"


class _Elastic(_DeepepManager):
    generation = "elastic"


class _EP25(_DeepepManager):
    generation = "ep25"


NAMES = {"deepep_v1": "_V1", "deepep_elastic": "_Elastic", "deepep_ep25": "_EP25", "hybridep": None}


def _missing(name: str) -> str | None:
    """Why a generation cannot run here; None where it can."""
    try:
        if name == "hybridep":
            load_hybridep()
        else:
            deepep_generation(load_deepep_kernel(), name.removeprefix("deepep_"))
    except ImportError as error:
        return str(error)
    return None


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    reason = _missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


def _register(name: str) -> None:
    """On this rank, for as long as its pool lives: buffers stay warm from test to test."""
    manager = NAMES[name]
    if manager is not None and name not in DISPATCHERS:
        spec = DISPATCHERS.get("deepep")
        DISPATCHERS.register(
            name,
            DispatcherSpec(
                target=f"{__name__}:{manager}",
                summary=spec.summary,
                precisions=spec.precisions,
                devices=spec.devices,
                capturable=True,
                async_dispatch=True,
                merges_duplicates=True,
                num_sms_multiple_of=2,
                hidden_size_multiple_of=16,
            ),
        )


def _device() -> torch.device:
    return torch.device("cuda", dist.get_rank())


def _check(name: str, cases: list[str], experts: str, backend: dict[str, object], recompute: bool) -> None:
    _register(name)
    for case in cases:
        check_case(
            BY_NAME[case],
            BackendConfig(dispatcher=name, experts=experts, **backend),
            dist.group.WORLD,
            device=_device(),
            dtype=torch.bfloat16,
            tolerance=2.5e-2,
            steps=3,
            recompute=recompute,
            poison=True,
            hidden_size=256,
        )


@pytest.mark.parametrize("experts", ["loop", "grouped_mm"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dispatcher_equals_the_reference(name: str, case: Case, experts: str) -> None:
    run_distributed(_check, 2, name, [case.name], experts, {}, False, backend="nccl", timeout=280)


def test_recomputation_async_and_sms(name: str) -> None:
    """cases B27, B31 and B33."""
    cases = ["random", "uneven", "dropped_slots"]
    run_distributed(_check, 2, name, cases, "grouped_mm", {}, True, backend="nccl", timeout=280)
    run_distributed(_check, 2, name, cases, "grouped_mm", {"dispatcher_num_sms": 16}, False, backend="nccl", timeout=280)
    if DISPATCHERS.get("hybridep" if name == "hybridep" else "deepep").async_dispatch:
        run_distributed(_check, 2, name, cases, "grouped_mm", {"dispatcher_async_dispatch": True}, False, backend="nccl", timeout=280)


Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def _layer(dispatcher: str, dtype: torch.dtype) -> tuple[Experts, Layer]:
    experts = build_experts("grouped_mm" if dtype is torch.bfloat16 else "loop", NUM_EXPERTS, HIDDEN_SIZE, EXPERT_WIDTH)
    generator = torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.03)
    experts.to(dtype).keep_local(dist.get_rank(), 2)
    experts.to(_device())
    moved = MoEFlexTokenDispatcher(BackendConfig(dispatcher=dispatcher), NUM_EXPERTS, dist.group.WORLD)
    return experts, lambda tokens, ids, weights: experts(tokens, ids, weights, moved)


def _batch(num_tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    tokens = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K, dim=1).indices
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    return tokens.bfloat16().to(_device(), dtype), ids.to(_device()), weights.to(_device())


def _forward_backward(experts: Experts, layer: Layer, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    tokens, ids, weights = batch[0].detach().requires_grad_(), batch[1], batch[2].detach().requires_grad_()
    experts.zero_grad()
    output = layer(tokens, ids, weights)
    (output.float() * torch.linspace(-1, 1, HIDDEN_SIZE, device=output.device)).sum().backward()
    gradients = [tokens.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())]
    assert all(gradient is not None for gradient in gradients)
    return [output.detach().clone(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def _against_all_to_all(name: str) -> list[tuple[float, float]]:
    _register(name)
    results = {}
    for key, dispatcher, dtype in (
        ("truth", "all_to_all", torch.float32),
        ("bf16", "all_to_all", torch.bfloat16),
        ("tested", name, torch.bfloat16),
    ):
        results[key] = _forward_backward(*_layer(dispatcher, dtype), _batch(300 + 41 * dist.get_rank(), dtype))
    return [
        (relative_difference(tested.float(), truth.float()), relative_difference(bf16.float(), truth.float()))
        for truth, bf16, tested in zip(results["truth"], results["bf16"], results["tested"], strict=True)
    ]


def test_values_and_gradients_are_within_twice_the_error_of_bf16_all_to_all(name: str) -> None:
    for errors in run_distributed(_against_all_to_all, 2, name, backend="nccl", timeout=280):
        for tested, bf16 in errors:
            assert tested <= 2 * bf16 + 1e-6, errors


def _graph_replay(name: str) -> list[float]:
    """A captured forward and backward, replayed on other data, against eager; and what is refused before a warm-up."""
    _register(name)
    destroy_all_buffers()
    experts, layer = _layer(name, torch.bfloat16)
    num_tokens = 64
    static = [tensor.clone() for tensor in _batch(num_tokens, torch.bfloat16)]
    leaves = static[0].requires_grad_(), static[2].requires_grad_()

    def step() -> Tensor:
        output = layer(leaves[0], static[1], leaves[1])
        (output.float() * torch.linspace(-1, 1, HIDDEN_SIZE, device=output.device)).sum().backward()
        return output

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    for tensor in (*leaves, *experts.parameters()):
        tensor.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    differences = []
    for seed in range(1, 4):
        batch = _batch(num_tokens, torch.bfloat16, seed)
        with torch.no_grad():
            for place, value in zip(static, batch, strict=True):
                place.copy_(value)
            for tensor in (*leaves, *experts.parameters()):
                assert tensor.grad is not None
                tensor.grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        found = [output.detach().clone(), *(tensor.grad.clone() for tensor in (*leaves, *experts.parameters()) if tensor.grad is not None)]
        other, eager_layer = _layer(name, torch.bfloat16)
        wanted = _forward_backward(other, eager_layer, batch)
        differences += [relative_difference(got, right) for got, right in zip(found, wanted, strict=True)]
    return differences


def test_a_captured_layer_replays_like_eager(name: str) -> None:
    """case B64."""
    for differences in run_distributed(_graph_replay, 2, name, backend="nccl", timeout=280):
        assert max(differences) <= 2.5e-2, differences


def _capture_refused(name: str) -> str:
    _register(name)
    destroy_all_buffers()
    _, layer = _layer(name, torch.bfloat16)
    batch = _batch(16, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    message = ""
    with torch.no_grad():
        layer_alone, _ = _layer("all_to_all", torch.bfloat16)  # sets cuBLAS up, outside of the capture
        del layer_alone
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                layer(*batch)
        except ValueError as error:
            message = str(error)
    torch.cuda.synchronize()
    return message


def test_capture_without_warm_up_is_refused(name: str) -> None:
    for message in run_distributed(_capture_refused, 2, name, backend="nccl", timeout=280):
        assert "has no buffer yet" in message and "eagerly" in message


def _compiled(name: str) -> list[float]:
    _register(name)
    torch._dynamo.reset()
    experts, layer = _layer(name, torch.bfloat16)
    batch = _batch(200, torch.bfloat16)
    eager = _forward_backward(experts, layer, batch)
    torch.cuda.synchronize()
    compiled = _forward_backward(experts, torch.compile(layer, fullgraph=True), batch)
    return [relative_difference(got, wanted) for got, wanted in zip(compiled, eager, strict=True)]


def test_a_compiled_layer_equals_eager(name: str) -> None:
    for differences in run_distributed(_compiled, 2, name, backend="nccl", timeout=280):
        assert max(differences) <= 2.5e-2, differences


def _memory(name: str) -> tuple[int, int, int]:
    _register(name)
    experts, layer = _layer(name, torch.bfloat16)
    allocated = []
    for step in range(200):
        _forward_backward(experts, layer, _batch(256, torch.bfloat16, step % 3))
        if step in (9, 199):
            gc.collect()
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
    return allocated[0], allocated[1], buffer_count("hybridep" if name == "hybridep" else "deepep")


def test_memory_is_flat_over_200_steps(name: str) -> None:
    """case B28."""
    for after_10, after_200, _ in run_distributed(_memory, 2, name, backend="nccl", timeout=280):
        assert after_200 <= 1.01 * after_10


def _uneven(name: str) -> None:
    _register(name)
    moved = MoEFlexTokenDispatcher(BackendConfig(dispatcher=name), NUM_EXPERTS, dist.group.WORLD)
    for first, second in ((128, 512), (640, 512), (64, 512), (5, 5), (6, 6), (7, 9), (0, 1), (0, 0)):
        batch = _batch((first, second)[dist.get_rank()], torch.bfloat16, first)
        dispatched = moved.dispatch(*batch)
        returned = moved.combine(dispatched.hidden_states, dispatched.handle)
        assert relative_difference(returned.float(), batch[0].float() * TOP_K) <= 1e-2


def test_uneven_and_odd_numbers_of_tokens(name: str) -> None:
    """cases B11 and B12; identity experts."""
    run_distributed(_uneven, 2, name, backend="nccl", timeout=280)


def _too_many_sms(name: str) -> str:
    _register(name)
    try:
        MoEFlexTokenDispatcher(BackendConfig(dispatcher=name, dispatcher_num_sms=100000), NUM_EXPERTS, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


def test_more_sms_than_the_device_has_are_refused_b31(name: str) -> None:
    for message in run_distributed(_too_many_sms, 2, name, backend="nccl", timeout=280):
        assert "100000" in message and "streaming multiprocessors" in message


def test_each_generation_is_here_or_skipped_by_name() -> None:
    """What the skips above stand for."""
    assert {f"deepep_{generation.name}" for generation in GENERATIONS} | {"hybridep"} == set(NAMES)
