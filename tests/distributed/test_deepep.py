"""The DeepEP and HybridEP managers against the contract emulator, on gloo ranks: values, gradients, modes, settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from emulated_backends import EMULATED, VARIANTS, emulated
from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.compiled import open_tickets
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import build_experts
from nemo_moe.testing.conformance import CASES, EXPERT_WIDTH, Case, Result, check_case, draw_batches, expert_weights, run_layer
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative

BY_NAME = {case.name: case for case in CASES}
BF16 = 2.5e-2  # of the largest element; in 11 cases and all gradients that many roundings meet
HIDDEN_SIZE = 256  # serves every generation
CPU = torch.device("cpu")


def _check(names: list[str], dispatcher: str, experts: str, backend: dict[str, object], options: dict[str, object]) -> None:
    with emulated(dispatcher):
        for name in names:
            config = BackendConfig(dispatcher=dispatcher, experts=experts, **backend)
            check_case(BY_NAME[name], config, dist.group.WORLD, dtype=torch.bfloat16, tolerance=BF16, **options)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dispatcher", EMULATED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dispatcher_equals_the_reference(case: Case, dispatcher: str, world_size: int) -> None:
    """cases B01, B06, B07, B09, B10: outputs, input, routing-weight and expert gradients; two steps, dirty memory."""
    experts = "grouped_mm" if world_size == 2 else "loop"
    run_distributed(_check, world_size, [case.name], dispatcher, experts, {}, {"steps": 2, "poison": True})


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_recomputation_reuses_the_route(dispatcher: str) -> None:
    """case B27."""
    names = ["random", "uneven", "empty_rank", "dropped_slots", "duplicate_ids"]
    run_distributed(_check, 2, names, dispatcher, "grouped_mm", {}, {"recompute": True})


def _layer(dispatcher: MoEFlexTokenDispatcher, case: Case, experts: str = "grouped_mm", seed: int = 0) -> Result:
    batch = draw_batches(case, dist.get_world_size(), shared=False, seed=seed, dtype=torch.bfloat16, hidden_size=HIDDEN_SIZE)
    backend = BackendConfig(experts=experts)
    return run_layer(case, backend, batch[dist.get_rank()], dist.group.WORLD, seed=seed, device=CPU, poison=True, dispatcher=dispatcher)


def _assert_same(actual: Result, expected: Result, tolerance: float = BF16) -> None:
    for name in ("output", "hidden_states", "topk_weights", "row_weights"):
        assert_close_relative(getattr(actual, name).double(), getattr(expected, name).double(), tolerance, name)
    for got, wanted in zip(actual.experts, expected.experts, strict=True):
        assert_close_relative(got.double(), wanted.double(), tolerance, "experts")
    assert torch.equal(actual.tokens_per_expert, expected.tokens_per_expert)


def _worst_case_equals_eager(name: str) -> None:
    with emulated(name):
        for case in (BY_NAME["random"], BY_NAME["uneven"], BY_NAME["empty_rank"], BY_NAME["hot_expert"], BY_NAME["duplicate_ids"]):
            dispatcher = MoEFlexTokenDispatcher(BackendConfig(dispatcher=name), case.num_experts, dist.group.WORLD)
            eager = _layer(dispatcher, case)
            manager = dispatcher.manager
            rows = manager.worst_case_rows(HIDDEN_SIZE, case.top_k)
            received: list[int] = []

            def worst_case(*args: Tensor, call: Callable = manager.dispatch_worst_case, received: list[int] = received):  # type: ignore[no-untyped-def, type-arg]
                dispatched = call(*args)
                received.append(dispatched.hidden_states.shape[0])
                return dispatched

            manager.dispatch = worst_case  # type: ignore[method-assign]
            _assert_same(_layer(dispatcher, case), eager)
            assert received == [rows]


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_without_host_synchronisation_rows_are_worst_case_and_nothing_else_differs(dispatcher: str) -> None:
    """What runs under CUDA-graph capture: rows past the counts are NaN here, and reach nothing."""
    run_distributed(_worst_case_equals_eager, 2, dispatcher)


def _compiled_equals_eager(name: str, backend: str) -> None:
    torch._dynamo.reset()
    case = BY_NAME["random"]
    with emulated(name):
        dispatcher = MoEFlexTokenDispatcher(BackendConfig(dispatcher=name), case.num_experts, dist.group.WORLD)
        experts = build_experts("grouped_mm", case.num_experts, HIDDEN_SIZE, EXPERT_WIDTH).to(torch.bfloat16)
        for parameter, weights in zip(experts.parameters(), expert_weights(case, 0, torch.bfloat16, HIDDEN_SIZE), strict=True):
            parameter.data.copy_(weights)
        experts.keep_local(dist.get_rank(), dist.get_world_size())

        def layer(hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
            # Doubled inside, so that the compiler owns a buffer that a handle must not share.
            return experts(hidden_states * 2, topk_idx + 0, topk_weights * 2, dispatcher) * 2

        results = []
        for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
            for seed in range(2):
                batch = draw_batches(case, 2, shared=False, seed=seed, dtype=torch.bfloat16, hidden_size=HIDDEN_SIZE)[dist.get_rank()]
                leaves = batch.hidden_states.requires_grad_(), batch.topk_weights.requires_grad_()
                experts.zero_grad()
                output = run(leaves[0], batch.topk_idx, leaves[1])
                (output.float() * batch.loss_weights).sum().backward()
                results.append([output.detach(), *(leaf.grad for leaf in leaves), *(parameter.grad for parameter in experts.parameters())])
                del output
        for eager, compiled in zip(results[:2], results[2:], strict=True):
            for got, wanted in zip(compiled, eager, strict=True):
                assert_close_relative(got.double(), wanted.double(), BF16, "compiled")
        assert open_tickets() == 0, "handles of compiled programs outlive their graphs"


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_a_compiled_layer_equals_the_eager_one(dispatcher: str) -> None:
    """fullgraph, forward and backward, two batches through one program."""
    run_distributed(_compiled_equals_eager, 2, dispatcher, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", EMULATED)
def test_a_layer_compiled_to_code_equals_the_eager_one(dispatcher: str) -> None:
    run_distributed(_compiled_equals_eager, 2, dispatcher, "inductor", timeout=280)


def _refused_without_warm_up(name: str) -> list[str]:
    torch._dynamo.reset()
    case = BY_NAME["random"]
    messages = []
    with emulated(name):
        dispatcher = MoEFlexTokenDispatcher(BackendConfig(dispatcher=name), case.num_experts, dist.group.WORLD)
        tokens, ids, weights = torch.randn(600, HIDDEN_SIZE).bfloat16(), torch.zeros(600, 2, dtype=torch.int64), torch.rand(600, 2)
        for warm_up in (0, 16):
            if warm_up:
                dispatcher.dispatch(tokens[:warm_up], ids[:warm_up], weights[:warm_up])
            try:
                dispatcher.manager.dispatch_worst_case(tokens, ids, weights)
            except ValueError as error:
                messages.append(str(error))
        try:
            torch.compile(lambda *args: dispatcher.dispatch(*args).hidden_states, fullgraph=True, backend="aot_eager")(tokens, ids, weights)
        except Exception as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_capture_without_warm_up_or_above_its_size_is_refused_with_what_to_do(dispatcher: str) -> None:
    for cold, large, compiled in run_distributed(_refused_without_warm_up, 2, dispatcher):
        assert "has no buffer yet" in cold and "eagerly, on all ranks" in cold
        assert "was warmed up for" in large and "gets 600" in large
        assert "was warmed up for" in compiled and "gets 600" in compiled


def _refused_dispatcher() -> str:
    dispatcher = MoEFlexTokenDispatcher(BackendConfig(), 4, dist.group.WORLD)
    tokens, ids, weights = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2)
    try:
        torch.compile(lambda *args: dispatcher.dispatch(*args).hidden_states, fullgraph=True, backend="aot_eager")(tokens, ids, weights)
    except Exception as error:
        return str(error)
    return ""


def test_a_dispatcher_that_reads_counts_is_refused_under_compile_with_those_that_do_not() -> None:
    for message in run_distributed(_refused_dispatcher, 2):
        assert "reads row counts on the host" in message and "all_reduce" in message and "deepep" in message


def _async(name: str) -> tuple[int, int, Result, Result]:
    case = BY_NAME["uneven"]
    waits = []
    with emulated(name) as library:
        original = library.EventOverlap.current_stream_wait

        def counted(event: object) -> None:
            waits.append(event)
            original(event)

        library.EventOverlap.current_stream_wait = counted
        try:
            results, counts = [], []
            for asynchronous in (False, True):
                config = BackendConfig(dispatcher=name, dispatcher_async_dispatch=asynchronous)
                waits.clear()
                results.append(_layer(MoEFlexTokenDispatcher(config, case.num_experts, dist.group.WORLD), case))
                counts.append(len(waits))
        finally:
            library.EventOverlap.current_stream_wait = original
        return counts[0], counts[1], results[0], results[1]


@pytest.mark.parametrize("dispatcher", [name for name in EMULATED if name.startswith("deepep")])
def test_asynchronous_dispatch_is_used_and_gives_the_same_numbers_b33(dispatcher: str) -> None:
    """case B33: forward dispatch and combine, and both backwards, are waited for through events."""
    for without, with_events, expected, actual in run_distributed(_async, 2, dispatcher):
        assert without == 0 and with_events == 4
        _assert_same(actual, expected)


@pytest.mark.parametrize("dispatcher", VARIANTS)
def test_what_installed_libraries_may_be_computes_the_same(dispatcher: str) -> None:
    """Other versions and builds: ids of 32 bits, two generations in one package, handles and arguments of HybridEP by version."""
    names = ["uneven", "empty_rank", "dropped_slots", "duplicate_ids"]
    run_distributed(_check, 2, names, dispatcher, "grouped_mm", {}, {"poison": True})
