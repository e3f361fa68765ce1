"""The loop over optimizer steps: train, validate, save, stop; the same on one process and on many ranks.

At the end of a step come, in this order, a validation, a checkpoint (which so knows whether it is the best one) and the
question whether to stop. A rank that was asked to stop tells the others within the next step; all leave after it. What
was due at that step and has not been done, is done first by the run that goes on.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_moe.data.loader import MicroBatch, StepLoader
from nemo_moe.distributed.mesh import Meshes
from nemo_moe.moe.load_balance import update_expert_bias
from nemo_moe.moe.metrics import expert_load_metrics
from nemo_moe.train.assemble import Run
from nemo_moe.train.checkpoints import Checkpoints
from nemo_moe.train.logging import RunLogger, Value, peak_memory_gib
from nemo_moe.train.loss import count_label_tokens, token_loss_sum
from nemo_moe.train.run_state import RunState
from nemo_moe.train.step import StepResult, train_step
from nemo_moe.train.stop_vote import StopAgreed, StopVote
from nemo_moe.train.watchdog import Watchdog


class TrainLoop:
    """Training of one run, from where `progress` stands to its last step.

    Args:
        run: assembled, and put to `progress` where that is not the beginning.
        progress: kept up to date.
    """

    def __init__(self, run: Run, progress: RunState, log: RunLogger, checkpoints: Checkpoints, vote: StopVote, watchdog: Watchdog) -> None:
        self._run, self._progress, self._log = run, progress, log
        self._checkpoints, self._vote, self._watchdog = checkpoints, vote, watchdog
        self._gates = [layer.gate for layer in run.model.moe_layers()]
        self._pace = _Pace(run.config.logging.every_steps, progress.seconds)

    def train(self) -> None:
        """Run to the last step, validated and, where that is configured, saved. Collective.

        Raises:
            StopAgreed: a rank was asked to stop; the run stands after a whole step on all ranks.
            TrainingStopped: the loss or gradient norm is not finite any more.
            SaveError: a checkpoint could not be written.
        """
        run, progress = self._run, self._progress
        self._log.start(run.steps, progress.step)
        self._vote.check()
        self._after_step()
        self._pace.resume()
        for micro_batches in _steps(run.loader, run.steps - progress.step):
            if self._train_one(micro_batches).stop:
                raise StopAgreed
            self._after_step()
        self._log.end_progress()

    def save(self, *, in_background: bool = False) -> None:
        """Save the run as it stands. Collective."""
        self._watchdog.now(f"saving step {self._progress.step}")
        self._checkpoints.save(self._progress, self._log.position(), in_background=in_background)

    def _train_one(self, micro_batches: list[MicroBatch]) -> StepResult:
        run, config, progress, step = self._run, self._run.config, self._progress, self._progress.step + 1
        self._watchdog.now(f"step {step}")
        lr = float(run.optimizer.param_groups[0]["lr"])
        stop = self._vote.wants_to_stop()
        norm = config.train.max_grad_norm
        result = train_step(run.model, run.optimizer, micro_batches, run.meshes, run.coefficients, norm, step, stop=stop)
        with warnings.catch_warnings():  # torch takes a schedule that moves on past a skipped update for a mistake
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            run.schedule.step()
        if result.label_tokens == 0:
            progress.steps_without_labels += 1
            if progress.steps_without_labels == 1:
                self._log.warn(f"step {step} has no label token on any rank and changes nothing; steps_without_labels counts such steps")
        elif config.router.bias_update_rate > 0:
            update_expert_bias(self._gates, result.tokens_per_expert, config.router.bias_update_rate)
        self._pace.finished(result.tokens)
        progress.step, progress.loss, progress.seconds = step, result.loss, self._pace.seconds
        metrics = {
            **_step_metrics(result, self._pace),
            "lr": lr,
            "epoch": step / len(run.loader),
            "steps_without_labels": float(progress.steps_without_labels),
        }
        self._log.step(step, metrics, functools.partial(_details, result, run.meshes.device))
        return result

    def _after_step(self) -> None:
        """What is due where the run stands and has not been done."""
        run, progress = self._run, self._progress
        if self._validation_is_due() and progress.validated_step < progress.step:
            loss = held_out_loss(run.model, run.validation_loader, run.meshes, self._before_validation_batch)
            progress.validated_step, progress.validation_loss = progress.step, loss
            self._log.validation(progress.step, {"loss": progress.validation_loss})
            self._pace.resume()
        if self._checkpoints.is_due(progress.step):
            self.save(in_background=run.config.checkpoint.async_save and progress.step < run.steps)
            self._pace.resume()

    def _validation_is_due(self) -> bool:
        config, step = self._run.config, self._progress.step
        every = config.validation.every_steps
        due = step == self._run.steps or (every is not None and step > 0 and step % every == 0)
        return due or (config.checkpoint.keep_best and self._checkpoints.is_due(step))

    def _before_validation_batch(self) -> None:
        self._watchdog.now(f"validation after step {self._progress.step}")
        self._vote.check()


@torch.no_grad()
def held_out_loss(model: nn.Module, loader: StepLoader, meshes: Meshes, check: Callable[[], None] = lambda: None) -> float:
    """Mean loss per label token over one pass of the loader; NaN where there is no label token. Collective.

    Args:
        check: called before each batch on all ranks; what it raises (on all of them) ends the validation.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=meshes.device)
    was_training = model.training
    model.eval()
    try:
        for step in range(len(loader)):
            for batch in loader.micro_batches(0, step):
                check()
                labels = batch.labels.to(meshes.device)
                logits = model(batch.input_ids.to(meshes.device), token_mask=batch.token_mask.to(meshes.device)).logits
                totals += torch.stack([token_loss_sum(logits, labels).double(), count_label_tokens(labels).double()])
    finally:
        model.train(was_training)
    dist.all_reduce(totals, group=meshes.dp_group)
    total, count = totals.tolist()
    return total / count if count else math.nan


class _Pace:
    """Training time and speed: laps end with a step, so evaluation in between does not count."""

    def __init__(self, window: int, seconds: float) -> None:
        self.seconds = seconds
        self._laps: deque[tuple[int, float]] = deque(maxlen=window)
        self._mark = 0.0

    def resume(self) -> None:
        """The next lap starts now."""
        self._mark = time.perf_counter()

    def finished(self, tokens: int) -> None:
        """A step with this many tokens has ended, and the next begins."""
        now = time.perf_counter()
        self._laps.append((tokens, now - self._mark))
        self.seconds += now - self._mark
        self._mark = now

    @property
    def tokens_per_second(self) -> float:
        """Over the last `window` steps."""
        return sum(tokens for tokens, _ in self._laps) / max(1e-9, sum(seconds for _, seconds in self._laps))


def _steps(loader: StepLoader, steps: int) -> Iterator[list[MicroBatch]]:
    """Optimizer steps from where the loader stands, epoch after epoch."""
    endless = itertools.chain.from_iterable(loader for _ in itertools.count())
    return itertools.islice(endless, steps)


def _step_metrics(result: StepResult, pace: _Pace) -> dict[str, Value]:
    """What every step reports; tokens exclude padding."""
    metrics: dict[str, Value] = {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "label_tokens": float(result.label_tokens),
        "tokens": float(result.tokens),
        "tokens_per_second": pace.tokens_per_second,
        "tokens_per_second_per_gpu": pace.tokens_per_second / dist.get_world_size(),  # per process on a CPU
    }
    if result.load_balance_loss is not None:
        metrics["load_balance_loss"] = result.load_balance_loss
    if result.router_z_loss is not None:
        metrics["router_z_loss"] = result.router_z_loss
    return metrics


def _details(result: StepResult, device: torch.device) -> dict[str, Any]:
    """What costs something to find out, for the steps that are written down."""
    load = expert_load_metrics(result.tokens_per_expert) if result.tokens_per_expert.numel() else {}
    return {"peak_memory_gib": peak_memory_gib(device), **load}
