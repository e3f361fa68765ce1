"""The gate against plain loops, and the faults it must not have."""

from __future__ import annotations

import pytest
import torch

from nemo_moe.config import MoEConfig, ScoreFunction
from nemo_moe.moe.gate import FakeBalancedGate, Gate
from nemo_moe.testing.tolerances import assert_close_relative


def moe_config(**changes: object) -> MoEConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "hidden_size": 16, "moe_intermediate_size": 8}
    return MoEConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def gate_giving(logits: list[float], **changes: object) -> tuple[Gate, torch.Tensor]:
    """A gate and one token whose router logits are `logits`."""
    gate = Gate(moe_config(num_experts=len(logits), hidden_size=len(logits), **changes))
    with torch.no_grad():
        gate.weight.copy_(torch.eye(len(logits)))
    return gate, torch.tensor([logits])


def slow_route(gate: Gate, token: torch.Tensor) -> dict[int, float]:
    """Expert -> weight of one token, by the definitions."""
    config = gate.config
    logits = (gate.weight.detach() @ token).tolist()
    exponentials = [torch.tensor(value, dtype=torch.float64).exp().item() for value in logits]
    softmax = config.score_function is ScoreFunction.softmax
    scores = [e / sum(exponentials) if softmax else e / (1 + e) for e in exponentials]
    bias = [0.0] * len(scores) if gate.expert_bias is None else gate.expert_bias.tolist()
    chosen = sorted(range(len(scores)), key=lambda i: -(scores[i] + bias[i]))[: config.num_experts_per_tok]
    weights = {i: scores[i] for i in chosen}
    if softmax and not config.score_before_topk:
        weights = {i: exponentials[i] / sum(exponentials[j] for j in chosen) for i in chosen}
    if config.norm_topk_prob:
        weights = {i: weight / sum(weights.values()) for i, weight in weights.items()}
    return {i: weight * config.routed_scaling_factor for i, weight in weights.items()}


@pytest.mark.parametrize("score_function", list(ScoreFunction))
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("score_before_topk", [False, True])
@pytest.mark.parametrize("use_expert_bias", [False, True])
def test_routing_equals_the_definition(
    score_function: ScoreFunction, norm_topk_prob: bool, score_before_topk: bool, use_expert_bias: bool
) -> None:
    torch.manual_seed(0)
    gate = Gate(
        moe_config(
            score_function=score_function,
            norm_topk_prob=norm_topk_prob,
            score_before_topk=score_before_topk,
            use_expert_bias=use_expert_bias,
            routed_scaling_factor=1.5,
            num_experts_per_tok=3,
        )
    )
    torch.nn.init.normal_(gate.weight)
    if gate.expert_bias is not None:
        gate.expert_bias.copy_(torch.tensor([0.0, 0.4, -0.4, 0.3, 0.0, -0.2]))
    tokens = torch.randn(20, 16)
    topk_idx, topk_weights, stats = gate(tokens)
    assert topk_idx.dtype is torch.int64 and topk_weights.dtype is torch.float32
    for token, ids, weights in zip(tokens, topk_idx.tolist(), topk_weights.tolist(), strict=True):
        expected = slow_route(gate, token)
        assert set(ids) == set(expected)
        for expert, weight in zip(ids, weights, strict=True):
            assert weight == pytest.approx(expected[expert], rel=1e-5)
    assert stats.tokens_per_expert.sum() == 60 and stats.num_tokens == 20
    assert stats.probs_sum.sum().item() == pytest.approx(20, rel=1e-5)


@pytest.mark.parametrize(("norm_topk_prob", "expected"), [(False, [0.6095, 0.2242]), (True, [0.7311, 0.2689])])
def test_case_b22_norm_topk_prob(norm_topk_prob: bool, expected: list[float]) -> None:
    gate, token = gate_giving([2.0, 1.0, 0.5, -1.0], norm_topk_prob=norm_topk_prob)
    _, topk_weights, _ = gate(token)
    assert topk_weights[0].tolist() == pytest.approx(expected, abs=5e-5)


def test_case_b08_one_expert_per_token_learns_from_the_main_loss_only_without_renormalisation() -> None:
    gradients = {}
    for norm_topk_prob in (False, True):
        torch.manual_seed(0)
        gate = Gate(moe_config(num_experts_per_tok=1, norm_topk_prob=norm_topk_prob))
        _, topk_weights, _ = gate(torch.randn(5, 16))
        topk_weights.square().sum().backward()
        gradients[norm_topk_prob] = gate.weight.grad.abs().max().item()  # type: ignore[union-attr]
    assert gradients[False] > 1e-3
    assert gradients[True] < 1e-6


def test_scores_are_fp32_for_bf16_tokens() -> None:
    """Ties that bf16 rounding would make are not made."""
    gate, token = gate_giving([1.0, 1.001, 0.0, 0.0], num_experts_per_tok=1)
    topk_idx, topk_weights, _ = gate(token.bfloat16() * 0 + token.bfloat16())
    assert topk_weights.dtype is torch.float32 and topk_idx.shape == (1, 1)
    with torch.no_grad():
        gate.weight.copy_(torch.diag(torch.tensor([1.0, 1.001, 0.0, 0.0])))
    topk_idx, _, _ = gate(torch.ones(1, 4, dtype=torch.bfloat16))
    assert topk_idx.item() == 1


def test_case_b13_padding_is_not_routed_and_not_counted() -> None:
    torch.manual_seed(0)
    gate = Gate(moe_config())
    tokens, mask = torch.randn(32, 16), torch.ones(32, dtype=torch.bool)
    mask[22:] = False
    topk_idx, topk_weights, stats = gate(tokens, mask)
    assert (topk_idx[22:] == -1).all() and not topk_weights[22:].any()
    assert stats.tokens_per_expert.sum() == 22 * 2 and stats.num_tokens == 22
    changed = tokens.clone()
    changed[22:] = 100.0
    _, changed_weights, changed_stats = gate(changed, mask)
    assert torch.equal(changed_weights, topk_weights)
    for before, after in zip(stats, changed_stats, strict=True):
        assert torch.equal(before, after)


def test_fake_balanced_gate_is_even_and_spreads_a_token_over_ranks() -> None:
    gate = FakeBalancedGate(moe_config(num_experts=8, num_experts_per_tok=4))
    topk_idx, topk_weights, stats = gate(torch.randn(16, 16))
    assert stats.tokens_per_expert.tolist() == [8.0] * 8
    assert all(len(set(ids)) == 4 for ids in topk_idx.tolist())
    assert all(len({expert // 4 for expert in ids}) == 2 for ids in topk_idx.tolist())
    assert_close_relative(topk_weights, torch.full((16, 4), 0.25), 1e-6)
    topk_weights.sum().backward()
    assert gate.weight.grad is not None and not gate.weight.grad.any()


def test_a_score_function_may_be_given_by_its_name_and_another_is_refused() -> None:
    """A text that is compared with a member would mean softmax, whatever it says."""
    gate, token = gate_giving([2.0, 1.0, 0.5, -1.0], score_function="sigmoid", norm_topk_prob=False)
    _, topk_weights, _ = gate(token)
    assert topk_weights[0].tolist() == pytest.approx([0.8808, 0.7311], abs=5e-5)
    with pytest.raises(ValueError, match=r"score_function: unknown value 'foo' \(legal: softmax, sigmoid\)"):
        moe_config(score_function="foo")


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"num_experts": 2.5}, "num_experts must be a whole number, found 2.5"),
        ({"num_experts": True}, "num_experts must be a whole number, found True"),
        ({"hidden_size": 32.0}, "hidden_size must be a whole number, found 32.0"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be 1 or more, found 0"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be above 0 and finite, found nan"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor must be above 0 and finite, found inf"),
    ],
)
def test_sizes_and_factors_that_make_no_layer_are_refused(changes: dict[str, object], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        moe_config(**changes)


@pytest.mark.parametrize("kind", [Gate, FakeBalancedGate])
def test_nan_in_padding_reaches_nothing(kind: type[Gate]) -> None:
    torch.manual_seed(0)
    gate = kind(moe_config())
    mask = torch.tensor([True, True, False, True])
    results = []
    for filling in (0.0, float("nan")):
        gate.zero_grad()
        tokens = torch.ones(4, 16).cumsum(0)
        tokens[2] = filling
        tokens.requires_grad_()
        _, topk_weights, stats = gate(tokens, mask)
        (topk_weights.square().sum() + stats.z_sum + stats.probs_sum.square().sum()).backward()
        assert tokens.grad is not None and gate.weight.grad is not None and not tokens.grad[2].any()
        results.append([tokens.grad, gate.weight.grad, topk_weights.detach(), *(value.detach() for value in stats)])
    for clean, poisoned in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, poisoned)
