"""Every registered dispatcher against the reference, on gloo ranks, with the torch experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.all_to_all import _AllToAllManager
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.registry import DISPATCHERS, DispatcherSpec
from nemo_moe.testing.conformance import CASES, Case, check_case, draw_batches, run_layer
from nemo_moe.testing.run_distributed import run_distributed

CPU_DISPATCHERS = ("all_to_all", "all_reduce")
BY_NAME = {case.name: case for case in CASES}


def _check(name: str, dispatcher: str, experts: str, options: dict[str, object]) -> None:
    check_case(BY_NAME[name], BackendConfig(dispatcher=dispatcher, experts=experts), dist.group.WORLD, **options)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dispatcher", CPU_DISPATCHERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dispatcher_equals_the_reference(case: Case, dispatcher: str, world_size: int) -> None:
    """cases B01, B06, B07, B09, B10: outputs, input, routing-weight and expert gradients; two steps, dirty memory."""
    experts = "grouped_mm" if world_size == 2 else "loop"
    run_distributed(_check, world_size, case.name, dispatcher, experts, {"steps": 2, "poison": True})


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("experts", ["loop", "grouped_mm"])
@pytest.mark.parametrize("dispatcher", CPU_DISPATCHERS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_pair_equals_the_reference(case: Case, recompute: bool, dispatcher: str, experts: str, world_size: int) -> None:
    run_distributed(_check, world_size, case.name, dispatcher, experts, {"steps": 2, "poison": True, "recompute": recompute})


@pytest.mark.parametrize("dispatcher", CPU_DISPATCHERS)
@pytest.mark.parametrize("name", ["random", "uneven", "dropped_slots"])
def test_recomputation_reuses_the_route(name: str, dispatcher: str) -> None:
    run_distributed(_check, 2, name, dispatcher, "grouped_mm", {"recompute": True})


@pytest.mark.parametrize("dispatcher", CPU_DISPATCHERS)
def test_bf16_stays_within_bf16_of_the_reference(dispatcher: str) -> None:
    run_distributed(_check, 2, "random", dispatcher, "loop", {"dtype": torch.bfloat16, "tolerance": 1.5e-2})


class _ShiftedManager(_AllToAllManager):
    """Wrong on purpose: every token goes to the expert after the one it chose."""

    def dispatch(self, hidden_states, topk_idx, topk_weights):  # type: ignore[no-untyped-def]
        return super().dispatch(hidden_states, torch.where(topk_idx < 0, -1, (topk_idx + 1) % self.num_experts), topk_weights)


def _check_shifted(name: str) -> str:
    DISPATCHERS.register("shifted", DispatcherSpec(target=f"{__name__}:_ShiftedManager", summary="wrong on purpose"))
    try:
        check_case(BY_NAME[name], BackendConfig(dispatcher="shifted", experts="loop"), dist.group.WORLD)
    except AssertionError as error:
        return str(error)
    finally:
        DISPATCHERS.unregister("shifted")
    return ""


@pytest.mark.parametrize("name", ["random", "uneven", "hot_expert", "one_token"])
def test_the_suite_fails_when_routing_is_shifted_by_one_expert(name: str) -> None:
    messages = run_distributed(_check_shifted, 2, name)
    assert any(messages), f"case {name} passes with wrong routing"


def _count_raw_calls() -> tuple[int, int]:
    calls = {"dispatch": 0, "redispatch": 0}

    class Counting(_AllToAllManager):
        def dispatch(self, *args):  # type: ignore[no-untyped-def]
            calls["dispatch"] += 1
            return super().dispatch(*args)

        def redispatch(self, *args):  # type: ignore[no-untyped-def]
            calls["redispatch"] += 1
            return super().redispatch(*args)

    case = BY_NAME["random"]
    backend = BackendConfig(experts="loop")
    dispatcher = MoEFlexTokenDispatcher(backend, case.num_experts, dist.group.WORLD)
    dispatcher.manager = Counting(dist.group.WORLD, case.num_experts)
    batch = draw_batches(case, 2, shared=False, seed=0)[dist.get_rank()]
    run_layer(case, backend, batch, dist.group.WORLD, seed=0, device=torch.device("cpu"), recompute=True, dispatcher=dispatcher)
    return calls["dispatch"], calls["redispatch"]


def test_routing_is_exchanged_once_a_step_under_checkpointing() -> None:
    """case B27: one dispatch; redispatch inside it, for the recomputed forward, and for combine's backward."""
    assert run_distributed(_count_raw_calls, 2) == [(1, 3), (1, 3)]


def _identical_tokens() -> torch.Tensor:
    torch.manual_seed(3)
    case = BY_NAME["random"]
    batch = draw_batches(case, 1, shared=False, seed=5, dtype=torch.bfloat16)[0]
    backend = BackendConfig(experts="loop")
    return run_layer(case, backend, batch, dist.group.WORLD, seed=0, device=torch.device("cpu")).output


def test_same_tokens_give_the_same_output_on_every_rank_in_bf16() -> None:
    """case B20: routing weights stay fp32 all the way, so ranks cannot differ by their rounding."""
    first, second = run_distributed(_identical_tokens, 2)
    assert torch.equal(first, second)


def _sent_rows() -> tuple[int, int]:
    case = BY_NAME["random"]
    batch = draw_batches(case, 2, shared=False, seed=0)[dist.get_rank()]
    manager = _AllToAllManager(dist.group.WORLD, case.num_experts)
    handle = manager.dispatch(batch.hidden_states, batch.topk_idx, batch.topk_weights).handle
    owners = batch.topk_idx // manager.num_local_experts
    return sum(handle.send_splits), sum(len(set(row)) for row in owners.tolist())


def test_a_token_crosses_the_wire_once_per_rank_that_needs_it() -> None:
    for sent, needed in run_distributed(_sent_rows, 2):
        assert sent == needed


def _two_models() -> None:
    """Interleaved layers of two models, with different expert counts, share nothing."""
    first, second = BY_NAME["random"], BY_NAME["hot_expert"]
    group, backend = dist.group.WORLD, BackendConfig(experts="loop")
    dispatchers = [MoEFlexTokenDispatcher(backend, case.num_experts, group) for case in (first, second)]
    handles = []
    for case, dispatcher in zip((first, second), dispatchers, strict=True):
        batch = draw_batches(case, 2, shared=False, seed=0)[dist.get_rank()]
        dispatched = dispatcher.dispatch(batch.hidden_states, batch.topk_idx, batch.topk_weights)
        handles.append((batch, dispatched))
    for dispatcher, (batch, dispatched) in zip(dispatchers, handles, strict=True):
        # Identity experts: each token comes back once per slot.
        returned = dispatcher.combine(dispatched.hidden_states, dispatched.handle)
        torch.testing.assert_close(returned, batch.hidden_states * batch.topk_idx.shape[1])


def test_two_models_interleave() -> None:
    run_distributed(_two_models, 2)
