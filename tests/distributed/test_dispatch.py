"""Every registered dispatcher against the reference, on gloo ranks, with the torch experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nemo_moe.config import BackendConfig, MoEConfig
from nemo_moe.moe.dispatch.all_to_all import _AllToAllManager
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.layer import MoE
from nemo_moe.registry import DISPATCHERS, DispatcherSpec
from nemo_moe.testing.conformance import CASES, Case, check_case, draw_batches, run_layer
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative

CPU_DISPATCHERS = [name for name in DISPATCHERS if not DISPATCHERS.get(name).requires]
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


class _RoundingManager(_AllToAllManager):
    """Wrong on purpose: routing weights travel in bf16."""

    def dispatch(self, hidden_states, topk_idx, topk_weights):  # type: ignore[no-untyped-def]
        return super().dispatch(hidden_states, topk_idx, topk_weights.bfloat16().float())


class _ShiftedManager(_AllToAllManager):
    """Wrong on purpose: every token goes to the expert after the one it chose."""

    def dispatch(self, hidden_states, topk_idx, topk_weights):  # type: ignore[no-untyped-def]
        return super().dispatch(hidden_states, torch.where(topk_idx < 0, -1, (topk_idx + 1) % self.num_experts), topk_weights)


def _check_wrong(manager: str, name: str, dtype: torch.dtype, tolerance: float) -> str:
    DISPATCHERS.register("wrong", DispatcherSpec(target=f"{__name__}:{manager}", summary="wrong on purpose"))
    try:
        backend = BackendConfig(dispatcher="wrong", experts="loop")
        check_case(BY_NAME[name], backend, dist.group.WORLD, dtype=dtype, tolerance=tolerance)
    except AssertionError as error:
        return str(error)
    finally:
        DISPATCHERS.unregister("wrong")
    return ""


@pytest.mark.parametrize("name", ["random", "uneven", "hot_expert", "one_token"])
def test_the_suite_fails_when_routing_is_shifted_by_one_expert(name: str) -> None:
    messages = run_distributed(_check_wrong, 2, "_ShiftedManager", name, torch.float32, 1e-5)
    assert any(messages), f"case {name} passes with wrong routing"


def test_the_suite_fails_when_routing_weights_are_sent_in_bf16() -> None:
    """case B20: within the tolerance of a bf16 run, so only the bitwise comparison of the weights shows it."""
    messages = run_distributed(_check_wrong, 2, "_RoundingManager", "random", torch.bfloat16, 1.5e-2)
    assert all("routing weights changed on their way" in message for message in messages)


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
    """case B20; that routing weights arrive bit for bit as they were sent is asserted by every conformance case."""
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


def _outputs_twice(dispatcher: str) -> list[torch.Tensor]:
    case, backend = BY_NAME["uneven"], BackendConfig(dispatcher=dispatcher, experts="loop")
    shared = DISPATCHERS.get(dispatcher).needs_shared_batch
    batch = draw_batches(case, 2, shared=shared, seed=0)[dist.get_rank()]
    results = [run_layer(case, backend, batch, dist.group.WORLD, seed=0, device=torch.device("cpu")) for _ in range(2)]
    return [torch.cat([result.output.flatten(), result.hidden_states.flatten(), result.topk_weights.flatten()]) for result in results]


@pytest.mark.parametrize("dispatcher", [name for name in CPU_DISPATCHERS if DISPATCHERS.get(name).deterministic])
def test_a_deterministic_dispatcher_gives_the_same_bits_twice(dispatcher: str) -> None:
    for first, second in run_distributed(_outputs_twice, 2, dispatcher):
        assert torch.equal(first, second)


def _moe_layer(dispatcher: str, shared: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(from this rank's sharded layer, from the whole layer in one process) for outputs and all gradients."""
    config = MoEConfig(num_experts=8, num_experts_per_tok=3, hidden_size=32, moe_intermediate_size=16)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    batches = torch.randn(world_size, 12, 32)
    batches = batches[:1].expand_as(batches) if shared else batches

    def run(parallel: bool) -> tuple[MoE, list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        moe = MoE(config, BackendConfig(dispatcher=dispatcher, experts="grouped_mm"))
        if parallel:
            moe.shard_experts(dist.group.WORLD)
        mine = [batches[rank]] if parallel else list(batches[:1] if shared else batches)
        inputs = [batch.clone().requires_grad_() for batch in mine]
        outputs = [moe(batch)[0] for batch in inputs]
        sum((output * torch.linspace(-1, 1, 32)).sum() for output in outputs).backward()  # type: ignore[union-attr]
        return moe, [output.detach() for output in outputs], [batch.grad for batch in inputs]  # type: ignore[misc]

    (layer, output, grad), (whole, all_outputs, all_grads) = run(True), run(False)
    place = 0 if shared else rank
    local = slice(layer.experts.expert_offset, layer.experts.expert_offset + layer.experts.num_local_experts)
    gate_grad = layer.gate.weight.grad
    assert gate_grad is not None
    if not shared:  # ranks saw different tokens, so their gate gradients add up; on a shared batch each has the whole one
        dist.all_reduce(gate_grad)
    pairs = {"output": (output[0], all_outputs[place]), "input gradient": (grad[0], all_grads[place])}
    pairs["gate gradient"] = (gate_grad, whole.gate.weight.grad)  # type: ignore[assignment]
    for name in ("gate_up_proj", "down_proj"):
        pairs[name] = (getattr(layer.experts, name).grad, getattr(whole.experts, name).grad[local])
    return pairs


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dispatcher", CPU_DISPATCHERS)
def test_the_moe_layer_equals_one_process_in_values_and_all_gradients(dispatcher: str, world_size: int) -> None:
    """For `all_reduce` on a batch that its ranks share, for the others on a batch each."""
    shared = DISPATCHERS.get(dispatcher).needs_shared_batch
    for pairs in run_distributed(_moe_layer, world_size, dispatcher, shared):
        for name, (actual, expected) in pairs.items():
            assert_close_relative(actual, expected, 1e-5, name)
