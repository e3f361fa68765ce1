"""Known faults of expert-parallel training, each as the smallest run that shows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemo_moe.testing.parity import Outcome, Setting, parallel_model, reference_outcome, run_rank, run_ranks_of_several, whole
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative


def _run(*settings: Setting) -> list[Outcome]:
    outcomes = run_distributed(run_ranks_of_several, settings[0].world_size, list(settings))[0]
    assert all(outcome is not None for outcome in outcomes)
    return outcomes


def _ratio(actual: Tensor, expected: Tensor) -> float:
    """By how much `actual` is larger than `expected`, as the projection of one on the other."""
    return ((actual * expected).sum() / expected.square().sum()).item()


@pytest.mark.parametrize("mesh", [(1, 2, 2), (1, 4, 2), (2, 2, 2)], ids=str)
def test_expert_and_dense_gradients_have_one_scale(mesh: tuple[int, int, int]) -> None:
    """Case B14: EP does not multiply expert gradients, FSDP does not divide dense ones."""
    setting = Setting(mesh=mesh)
    expected = reference_outcome(setting.reference()).gradients
    (outcome,) = _run(setting)
    assert any("experts" in name for name in expected) and any("self_attn" in name for name in expected)
    for name, gradient in outcome.gradients.items():
        assert _ratio(gradient, expected[name]) == pytest.approx(1.0, rel=1e-5), name


def test_unused_experts_hold_gradients_that_are_exactly_zero() -> None:
    """Case B01: E = 4, K = 1, every token picks expert 0 or 1, both on rank 0; rank 1 computes no row and still steps."""
    setting = Setting(num_experts=4, top_k=1, routing="two", batch="equal")
    for experts in ("loop", "grouped_mm"):
        (outcome,) = _run(Setting(**{**vars(setting), "experts": experts}))
        gradients = [gradient for name, gradient in outcome.gradients.items() if ".experts." in name]
        assert len(gradients) == 4  # two matrices in two layers; run_rank has checked that none is missing
        for gradient in gradients:
            assert gradient[:2].abs().sum(dim=(1, 2)).min() > 0
            assert torch.equal(gradient[2:], torch.zeros_like(gradient[2:]))
        assert outcome.tokens_per_expert[:, 2:].sum() == 0
        assert outcome.losses == pytest.approx(reference_outcome(setting.reference()).losses, rel=1e-5)


def test_the_router_learns_from_the_main_loss_under_ep() -> None:
    """Case B16; with K = 1 unnormalised it is the only way the router can learn (case B08)."""
    for top_k in (1, 2):
        setting = Setting(aux_coef=0.0, z_coef=0.0, top_k=top_k)
        (outcome,) = _run(setting)
        expected = reference_outcome(setting.reference()).gradients
        gates = [name for name in expected if name.endswith("gate.weight")]
        assert len(gates) == 2
        for name in gates:
            assert outcome.gradients[name].norm() > 1e-4
            assert_close_relative(outcome.gradients[name], expected[name], 1e-5, name)


def test_auxiliary_losses_have_one_scale_on_every_layout() -> None:
    """Case B23: main loss masked to zero; twice the coefficient, twice the gradient; ranks and accumulation change nothing."""

    def setting(coefficient: float, accumulation: int) -> Setting:
        return Setting(main_loss=False, aux_coef=coefficient, z_coef=0.0, batch="repeated", accumulation=accumulation, steps=1)

    single = reference_outcome(setting(0.01, 1).reference())
    once, twice, accumulated = _run(setting(0.01, 1), setting(0.02, 1), setting(0.01, 4))
    for name in (name for name in once.gradients if name.endswith("gate.weight")):
        assert once.gradients[name].norm() > 1e-5
        assert_close_relative(once.gradients[name], single.gradients[name], 1e-5, name)
        assert_close_relative(twice.gradients[name], 2 * once.gradients[name], 1e-5, name)
        assert_close_relative(accumulated.gradients[name], once.gradients[name], 1e-5, name)
    assert once.losses == pytest.approx(single.losses, rel=1e-5)


def test_loss_curves_overlap_over_20_steps() -> None:
    """Case B15, second half."""
    setting = Setting(steps=20, learning_rate=0.1, experts="grouped_mm")
    (outcome,) = _run(setting)
    expected = reference_outcome(setting.reference())
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-4)
    assert outcome.losses[-1] < 0.9 * outcome.losses[0]


def test_bf16_trains_alike_with_and_without_ep() -> None:
    """Case B05: finite on steps 1 to 3, and equal within bf16's rounding; the sums and the master weights stay fp32."""
    without, with_ep = (Setting(mesh=(1, 2, ep), experts="grouped_mm", precision="bf16", learning_rate=0.1) for ep in (1, 2))
    expected, outcome = _run(without, with_ep)
    assert outcome.losses == pytest.approx(expected.losses, rel=2e-2)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)
    exact = reference_outcome(with_ep.reference())
    assert outcome.losses == pytest.approx(exact.losses, rel=2e-2)


def _bf16_dtypes() -> tuple[set[torch.dtype], set[torch.dtype], torch.dtype, torch.dtype, set[torch.dtype]]:
    model, _ = parallel_model(Setting(precision="bf16", experts="grouped_mm"))
    experts = model.moe_layers()[0].experts
    weights_dtype: set[torch.dtype] = set()
    experts.register_forward_pre_hook(lambda module, args: weights_dtype.add(args[2].dtype))
    logits, stats = model(torch.arange(8)[None])
    assert stats is not None
    (logits.float().sum() + stats.probs_sum.sum()).backward()
    parameters = {parameter.dtype for parameter in model.parameters()}
    gradients = {parameter.grad.dtype for parameter in model.parameters()}
    return parameters, gradients, logits.dtype, stats.probs_sum.dtype, weights_dtype


def test_bf16_keeps_master_weights_gradients_and_routing_weights_in_fp32() -> None:
    for parameters, gradients, logits, stats, routing_weights in run_distributed(_bf16_dtypes, 2):
        assert parameters == gradients == routing_weights == {torch.float32}
        assert logits is torch.bfloat16 and stats is torch.float32


def _same_tokens_in_bf16() -> Tensor:
    model, _ = parallel_model(Setting(precision="bf16", experts="grouped_mm", num_experts=8, top_k=4))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return model(torch.randint(64, (4, 16), generator=generator)).logits.float()


def test_the_same_tokens_have_the_same_logits_on_both_ranks() -> None:
    """Case B20: routing weights travel in fp32, so it does not matter on which rank a token starts."""
    first, second = run_distributed(_same_tokens_in_bf16, 2)
    assert torch.isfinite(first).all() and torch.equal(first, second)


def _initial_weights(setting: Setting) -> dict[str, Tensor]:
    model, meshes = parallel_model(setting)
    return whole(model, meshes, {name: parameter.detach() for name, parameter in model.named_parameters()})


def test_every_mesh_starts_from_the_same_weights_bit_for_bit() -> None:
    untrained = Setting(steps=0)
    expected = reference_outcome(untrained.reference()).weights
    assert len({tensor.sum().item() for tensor in expected.values() if tensor.dim() > 1}) == sum(
        tensor.dim() > 1 for tensor in expected.values()
    )
    for mesh in [(1, 2, 2), (1, 2, 1), (1, 4, 4), (1, 4, 2), (2, 2, 2)]:
        setting = Setting(mesh=mesh)
        for weights in run_distributed(_initial_weights, setting.world_size, setting):
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_two_runs_are_equal_bit_for_bit() -> None:
    setting = Setting(experts="grouped_mm", checkpointing="selective")
    first, second = _run(setting, setting)
    assert first.losses == second.losses
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def _two_models() -> tuple[list[float], list[float], list[float]]:
    """A student and a teacher with other sizes, alternating; no state may leak from one into the other."""
    student, teacher = Setting(steps=1), Setting(num_experts=4, top_k=1, steps=1)
    models = [parallel_model(setting)[0] for setting in (student, teacher)]
    ids = torch.arange(8)[None]
    student_logits = models[0](ids).logits
    with torch.no_grad():
        teacher_logits = models[1](ids).logits
    (student_logits * teacher_logits).sum().backward()
    together = [parameter.grad.full_tensor().norm().item() for parameter in models[0].parameters()]
    alone_model = parallel_model(student)[0]
    (alone_model(ids).logits * teacher_logits).sum().backward()
    return together, [parameter.grad.full_tensor().norm().item() for parameter in alone_model.parameters()], run_losses(student)


def run_losses(setting: Setting) -> list[float]:
    outcome = run_rank(setting)
    return [] if outcome is None else outcome.losses


def test_two_models_in_one_process_do_not_disturb_each_other() -> None:
    together, alone, losses = run_distributed(_two_models, 2)[0]
    assert together == alone
    assert losses == pytest.approx(reference_outcome(Setting(steps=1).reference()).losses, rel=1e-5)
