"""The MoE layer in one process: experts backends agree, ids are checked, special routings give the right rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from nemo_moe.config import BackendConfig, MoEConfig
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import Experts, build_experts
from nemo_moe.moe.layer import MoE
from nemo_moe.moe.metrics import expert_load_metrics
from nemo_moe.registry import EXPERTS
from nemo_moe.testing.tolerances import assert_close_relative

ON_CPU = sorted(name for name in EXPERTS if "cpu" in EXPERTS.get(name).devices)
SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 16, "moe_intermediate_size": 8}


def run_experts(name: str, ids: list[list[int]], weights: list[list[float]]) -> tuple[Experts, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    experts = build_experts(name, 4, 16, 8)
    hidden_states = torch.randn(len(ids), 16, requires_grad=True)
    topk_weights = torch.tensor(weights, requires_grad=True)
    dispatcher = MoEFlexTokenDispatcher(BackendConfig(experts=name), 4, None)
    output = experts(hidden_states, torch.tensor(ids), topk_weights, dispatcher)
    (output * torch.linspace(-1, 1, 16)).sum().backward()
    tensors = {"output": output, "tokens": hidden_states, "hidden_grad": hidden_states.grad, "weights_grad": topk_weights.grad}
    return experts, {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


def one_expert(experts: Experts, expert: int, token: torch.Tensor) -> torch.Tensor:
    gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
    return (experts.down_proj[expert] @ (F.silu(gate) * up)).detach()


@pytest.mark.parametrize("name", ON_CPU)
def test_case_b06_an_id_named_twice_counts_as_the_sum_of_its_weights(name: str) -> None:
    experts, got = run_experts(name, [[2, 2], [0, 3]], [[0.6, 0.4], [0.5, 0.5]])
    assert_close_relative(got["output"][0], one_expert(experts, 2, got["tokens"][0]), 1e-5)
    mixed = 0.5 * one_expert(experts, 0, got["tokens"][1]) + 0.5 * one_expert(experts, 3, got["tokens"][1])
    assert_close_relative(got["output"][1], mixed, 1e-5)
    assert got["weights_grad"][0, 0] == got["weights_grad"][0, 1] != 0


@pytest.mark.parametrize("name", ON_CPU)
def test_case_b07_dropped_slots_add_nothing(name: str) -> None:
    experts, got = run_experts(name, [[0, -1], [-1, -1], [3, 1]], [[0.7, 0.3], [0.5, 0.5], [0.2, 0.8]])
    assert_close_relative(got["output"][0], 0.7 * one_expert(experts, 0, got["tokens"][0]), 1e-5)
    assert not got["output"][1].any() and not got["hidden_grad"][1].any()
    assert not got["weights_grad"][1].any() and got["weights_grad"][0, 1] == 0 and got["weights_grad"][0, 0] != 0
    assert experts.gate_up_proj.grad is not None and not experts.gate_up_proj.grad[2].any()


@pytest.mark.parametrize("bad", [7, -2])
def test_case_b07_an_id_out_of_range_is_refused_with_the_range(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"expert id {bad}; allowed are 0 to 3, and -1"):
        run_experts("loop", [[0, bad]], [[0.5, 0.5]])


def test_wrong_dtypes_are_refused_with_the_fix() -> None:
    dispatcher = MoEFlexTokenDispatcher(BackendConfig(), 4, None)
    tokens, ids, weights = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"topk_weights must be torch.float32, found torch.bfloat16"):
        dispatcher.dispatch(tokens, ids, weights.bfloat16())
    with pytest.raises(ValueError, match=r"topk_idx must be torch.int64, found torch.int32"):
        dispatcher.dispatch(tokens, ids.int(), weights)
    with pytest.raises(ValueError, match=r"must be \[T, H\], \[T, K\] and \[T, K\]"):
        dispatcher.dispatch(tokens[:2], ids, weights)


def test_case_b09_all_tokens_to_one_expert() -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(**{**SIZES, "num_experts": 16, "num_experts_per_tok": 1, "norm_topk_prob": False}), BackendConfig())
    with torch.no_grad():
        moe.gate.weight.zero_()
        moe.gate.weight[3] = 1.0
    tokens = torch.rand(8, 16) + 0.1
    output, stats = moe(tokens)
    weight = (tokens @ moe.gate.weight.t()).softmax(-1)[:, 3:4]
    expected = torch.stack([one_expert(moe.experts, 3, token) for token in tokens]) * weight
    assert_close_relative(output, expected, 1e-5)
    output.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in moe.parameters())
    metrics = expert_load_metrics(stats.tokens_per_expert[None])
    assert metrics["moe/layer_0/busiest_share"] == 1.0 and metrics["moe/imbalance"] == 16.0 and metrics["moe/layer_0/dead_experts"] == 15.0


def test_case_b13_changing_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(**SIZES), BackendConfig())
    tokens = torch.randn(2, 16, 16)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 6:] = False
    results = []
    for filling in (0.0, 50.0):
        moe.zero_grad()
        filled = torch.where(mask[..., None], tokens, filling)
        output, stats = moe(filled, mask)
        output.square().sum().backward()
        results.append([output.detach(), stats.probs_sum.detach(), *(parameter.grad.clone() for parameter in moe.parameters())])
    assert stats.tokens_per_expert.sum() == 22 * 2
    assert not results[0][0][1, 6:].any()
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_experts_backends_agree(tokens: int) -> None:
    results: dict[str, list[torch.Tensor]] = {}
    for name in ON_CPU:
        torch.manual_seed(1)
        moe = MoE(MoEConfig(**SIZES), BackendConfig(experts=name))
        hidden_states = torch.randn(tokens, 16, requires_grad=True)
        output, _ = moe(hidden_states)
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in moe.experts.parameters()]
        assert all(gradient is not None for gradient in gradients), f"{name}: an expert without tokens has no gradient"
        results[name] = [output.detach(), hidden_states.grad, *gradients]  # type: ignore[list-item]
    for name, tensors in results.items():
        for got, expected in zip(tensors, results["loop"], strict=True):
            assert_close_relative(got, expected, 1e-5, name)


def test_grouped_mm_refuses_rows_it_cannot_take() -> None:
    experts = build_experts("grouped_mm", 4, 18, 8)
    dispatcher = MoEFlexTokenDispatcher(BackendConfig(), 4, None)
    with pytest.raises(ValueError, match=r"hidden_size 18 in torch.float32 has 72 bytes; use a multiple of 4, or backend.experts: loop"):
        experts(torch.randn(3, 18), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2), dispatcher)


@pytest.mark.parametrize("name", ON_CPU)
def test_nan_in_padding_reaches_no_output_and_no_gradient(name: str) -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(**SIZES), BackendConfig(experts=name))
    mask = torch.tensor([True, True, True, False, True])
    results = []
    for filling in (0.0, float("nan")):
        moe.zero_grad()
        tokens = torch.ones(5, 16).cumsum(0) / 5
        tokens[3] = filling
        tokens.requires_grad_()
        output, stats = moe(tokens, mask)
        (output.square().sum() + stats.z_sum).backward()
        assert tokens.grad is not None and not tokens.grad[3].any() and not output[3].any()
        results.append([output.detach(), tokens.grad, *(parameter.grad for parameter in moe.parameters())])
    for clean, poisoned in zip(*results, strict=True):
        assert clean is not None and clean.isfinite().all() and torch.equal(clean, poisoned)


@pytest.mark.parametrize(
    ("hidden_states", "mask", "hint"),
    [
        (torch.randn(5, 16), torch.ones(1, dtype=torch.bool), r"token_mask must have an entry for each token, \[5\], found \[1\]"),
        (torch.randn(2, 3, 16), torch.ones(3, 2, dtype=torch.bool), r"each token, \[2, 3\], found \[3, 2\]"),
        (torch.randn(5, 16), torch.ones(5, dtype=torch.int64), "token_mask must be torch.bool, True for real tokens, found torch.int64"),
        (torch.randn(5, 12), None, r"hidden_states must be \[T, 16\] or \[B, S, 16\], found \[5, 12\]"),
        (torch.randn(16), None, r"or \[B, S, 16\], found \[16\]"),
        (torch.randn(5, 16).bfloat16(), None, "hidden_states must be torch.float32 like the experts' weights, found torch.bfloat16"),
        (torch.randn(5, 16).half(), None, "like the experts' weights, found torch.float16"),
        (torch.ones(5, 16, dtype=torch.int64), None, "like the experts' weights, found torch.int64"),
    ],
)
def test_tensors_that_do_not_fit_the_layer_are_refused_at_its_door(
    hidden_states: torch.Tensor, mask: torch.Tensor | None, hint: str
) -> None:
    with pytest.raises(ValueError, match=hint):
        MoE(MoEConfig(**SIZES), BackendConfig())(hidden_states, mask)


def test_shapes_that_a_dispatcher_does_not_take_are_refused_by_name() -> None:
    dispatcher = MoEFlexTokenDispatcher(BackendConfig(), 4, None)
    tokens, ids, weights = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for shapes in (
        (tokens[None], ids, weights),
        (tokens, ids[:, 0], weights[:, 0]),
        (tokens, ids[None], weights[None]),
        (tokens[0], ids, weights),
    ):
        with pytest.raises(ValueError, match=r"must be \[T, H\], \[T, K\] and \[T, K\]"):
            dispatcher.dispatch(*shapes)
    with pytest.raises(ValueError, match="hidden_states must be floating point, found torch.int64"):
        dispatcher.dispatch(tokens.long(), ids, weights)
