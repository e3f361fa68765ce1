"""Learning-rate schedule: linear warm-up, then constant, linear or cosine down to a share of the peak.

One optimizer step is one schedule step, so a schedule needs the number of optimizer steps of the run beforehand:
`total_steps` counts the last, partial step of an epoch too.
"""

from __future__ import annotations

import math
import warnings

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from nemo_moe.config import ScheduleConfig, ScheduleName, TrainConfig


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: max_steps or num_epochs, whichever comes first."""
    limits = []
    if config.max_steps is not None:
        limits.append(config.max_steps)
    if config.num_epochs is not None:
        limits.append(config.num_epochs * steps_per_epoch)
    return min(limits)


def learning_rate_factor(step: int, config: ScheduleConfig, steps: int) -> float:
    """What the peak learning rate is multiplied by in `step` (counted from 0) of `steps`.

    Warm-up reaches the peak in its last step and starts above 0, so that no step is wasted; the last step of the run
    has exactly `min_lr_ratio`. A warm-up longer than the run just stays a warm-up.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name is ScheduleName.constant:
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    shape = 1.0 - done if config.name is ScheduleName.linear else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, steps: int) -> LambdaLR:
    """A torch LambdaLR; call `step()` once after each optimizer step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, steps))


def set_schedule(schedule: LambdaLR, steps_done: int) -> None:
    """Put a schedule where it is after so many optimizer steps, and the learning rates of its optimizer with it."""
    schedule.last_epoch = steps_done - 1
    with warnings.catch_warnings():  # torch takes a schedule that moves on without an update for a mistake
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        schedule.step()
