"""Auxiliary losses against their formulas and against transformers, and the bias update."""

from __future__ import annotations

import pytest
import torch

from nemo_moe.config import MoEConfig
from nemo_moe.moe.gate import Gate
from nemo_moe.moe.load_balance import load_balance_loss, router_z_loss, sum_over_ranks, update_expert_bias
from nemo_moe.moe.metrics import expert_load_metrics
from nemo_moe.moe.types import RouterStats
from nemo_moe.testing.tolerances import assert_close_relative


def stacked(*stats: RouterStats) -> RouterStats:
    return RouterStats(*(torch.stack(parts) for parts in zip(*stats, strict=True)))


def gate_of(num_experts: int, top_k: int, **changes: object) -> Gate:
    torch.manual_seed(0)
    gate = Gate(MoEConfig(num_experts=num_experts, num_experts_per_tok=top_k, hidden_size=16, moe_intermediate_size=4, **changes))  # type: ignore[arg-type]
    torch.nn.init.normal_(gate.weight, std=0.3)
    return gate


@pytest.mark.parametrize("masked", [False, True])
def test_one_layer_equals_transformers(masked: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    gate, tokens = gate_of(8, 3), torch.randn(24, 16)
    mask = torch.ones(2, 12, dtype=torch.bool)
    if masked:
        mask[1, 5:] = False
    _, _, stats = gate(tokens, mask.view(-1) if masked else None)
    stats = stacked(stats)
    ours = load_balance_loss(stats, sum_over_ranks(stats, None))
    logits = tokens @ gate.weight.t()
    theirs = modeling.load_balancing_loss_func((logits,), 8, 3, mask.long() if masked else None)
    assert_close_relative(ours, theirs, 1e-5)
    mine, expected = torch.autograd.grad(ours, gate.weight)[0], torch.autograd.grad(theirs, gate.weight)[0]
    assert_close_relative(mine, expected, 1e-4)


def test_case_b24_scores_are_normalised_once() -> None:
    """90 % on one of four experts stands clearly above the even load, which is K."""
    losses = {}
    for name, first in (("even", 0.25), ("skewed", 0.9)):
        logits = torch.tensor([first, *[(1 - first) / 3] * 3]).log()
        gate = gate_of(4, 1)
        with torch.no_grad():
            gate.weight.zero_()
            gate.weight[:, 0] = logits
        tokens = torch.zeros(8, 16)
        tokens[:, 0] = 1.0
        _, _, stats = gate(tokens)
        stats = stacked(stats)
        losses[name] = load_balance_loss(stats, sum_over_ranks(stats, None)).item()
    assert losses["skewed"] == pytest.approx(4 * 0.9, rel=1e-5)  # f = (1, 0, 0, 0), P = (0.9, ...)
    assert losses["even"] == pytest.approx(4 * 0.25, rel=1e-5)


def test_z_loss_equals_the_formula_and_layers_are_averaged() -> None:
    gates, tokens = [gate_of(8, 2), gate_of(8, 2)], [torch.randn(10, 16), torch.randn(10, 16)]
    stats = stacked(*(gate(token)[2] for gate, token in zip(gates, tokens, strict=True)))
    squares = [(token @ gate.weight.t()).logsumexp(-1).square().mean() for gate, token in zip(gates, tokens, strict=True)]
    expected = torch.stack(squares).mean()
    assert_close_relative(router_z_loss(stats, sum_over_ranks(stats, None)), expected, 1e-5)


def test_no_tokens_give_zero_losses_with_gradients() -> None:
    gate = gate_of(8, 2)
    stats = stacked(gate(torch.randn(0, 16))[2])
    totals = sum_over_ranks(stats, None)
    loss = load_balance_loss(stats, totals) + router_z_loss(stats, totals)
    loss.backward()
    assert loss.item() == 0.0 and gate.weight.grad is not None and not gate.weight.grad.any()


def test_bias_update_evens_the_load() -> None:
    gate = gate_of(8, 2, use_expert_bias=True)
    tokens = torch.randn(512, 16) + 1.0
    before = expert_load_metrics(gate(tokens)[2].tokens_per_expert[None])["moe/imbalance"]
    for _ in range(300):
        _, _, stats = gate(tokens)
        update_expert_bias([gate], stats.tokens_per_expert[None], rate=2e-3)
    after = expert_load_metrics(gate(tokens)[2].tokens_per_expert[None])["moe/imbalance"]
    assert before > 1.5 and after < 1.15, (before, after)


def test_bias_update_moves_each_expert_by_the_rate_towards_the_mean() -> None:
    gate = gate_of(4, 1, use_expert_bias=True)
    update_expert_bias([gate], torch.tensor([[10.0, 2.0, 4.0, 0.0]]), rate=0.01)
    assert gate.expert_bias is not None
    assert gate.expert_bias.tolist() == pytest.approx([-0.01, 0.01, 0.0, 0.01])


def test_load_metrics() -> None:
    metrics = expert_load_metrics(torch.tensor([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]))
    assert metrics["moe/layer_0/imbalance"] == 3.0 and metrics["moe/layer_1/imbalance"] == 1.0 and metrics["moe/layer_2/imbalance"] == 1.0
    assert metrics["moe/imbalance"] == pytest.approx(5 / 3)
    assert metrics["moe/layer_0/dead_experts"] == 2.0
    assert metrics["moe/layer_0/load"] == [0.75, 0.25, 0.0, 0.0]
