"""Parameter groups, weight decay on matrices alone, and the learning rate of every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_moe.config import OptimizerConfig, ScheduleConfig, ScheduleName, TrainConfig
from nemo_moe.train.optimizer import build_optimizer, parameter_groups
from nemo_moe.train.schedule import build_schedule, learning_rate_factor, total_steps


def small_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model.register_parameter("experts", nn.Parameter(torch.ones(2, 3, 4)))
    return model


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_moves_matrices_alone(name: str) -> None:
    model = small_model()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, value in model.named_parameters():
        expected = before[key] * (1 - 0.1 * 0.5) if value.ndim >= 2 else before[key]
        torch.testing.assert_close(value.detach(), expected, msg=key)


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_refused() -> None:
    model = small_model()
    model[2].requires_grad_(False)
    grouped = [parameter for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model.requires_grad_(False), OptimizerConfig())


def test_optimizer_state_is_fp32() -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimizerConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq", "step")} == {torch.float32}


@pytest.mark.parametrize(("name", "middle"), [(ScheduleName.constant, 1.0), (ScheduleName.linear, 0.55), (ScheduleName.cosine, 0.55)])
def test_warm_up_starts_above_zero_and_the_last_step_has_the_least_rate(name: ScheduleName, middle: float) -> None:
    least = 0.0 if name is ScheduleName.constant else 0.1
    config = ScheduleConfig(name=name, warmup_steps=4, min_lr_ratio=least)
    factors = [learning_rate_factor(step, config, 15) for step in range(15)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == pytest.approx(1.0) and factors[9] == pytest.approx(middle)
    assert factors[14] == pytest.approx(least or 1.0)


def test_a_warm_up_longer_than_the_run_and_a_run_of_one_step_are_defined() -> None:
    assert learning_rate_factor(2, ScheduleConfig(warmup_steps=60), 3) == pytest.approx(3 / 60)
    assert learning_rate_factor(0, ScheduleConfig(), 1) == 1.0


def test_the_schedule_counts_partial_steps() -> None:
    """case B52: 10 batches at accumulation 4 are 3 optimizer steps, and the schedule ends with the third."""
    assert total_steps(TrainConfig(num_epochs=1), steps_per_epoch=3) == 3
    assert total_steps(TrainConfig(num_epochs=2, max_steps=5), 3) == 5
    assert total_steps(TrainConfig(num_epochs=None, max_steps=7), 3) == 7
    optimizer = build_optimizer(small_model(), OptimizerConfig(name="sgd", lr=2.0))
    schedule = build_schedule(optimizer, ScheduleConfig(name=ScheduleName.linear, min_lr_ratio=0.5), 3)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [2.0, 1.5, 1.0]
