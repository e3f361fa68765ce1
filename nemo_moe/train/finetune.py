"""Fine-tuning: one function from a RunConfig to a saved model and its figures.

`finetune` runs the same on one process and on many ranks; all numbers that it decides by are agreed on by all ranks, so
no rank leaves the others behind. Only rank 0 prints, logs and writes.

Left out on purpose: stopping and resuming in the middle of a run, skipping steps that are not finite.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_moe.checkpoint.hf import save_hf_folder
from nemo_moe.compose import to_plain, to_yaml
from nemo_moe.config import RunConfig
from nemo_moe.data.loader import MicroBatch, StepLoader
from nemo_moe.distributed.mesh import Meshes
from nemo_moe.moe.load_balance import update_expert_bias
from nemo_moe.moe.metrics import expert_load_metrics
from nemo_moe.resolve import Resolved, resolve
from nemo_moe.train.assemble import Run, assemble, warnings_of
from nemo_moe.train.evaluate import ExactMatch, exact_match, most_frequent_answer_accuracy
from nemo_moe.train.logging import RunLogger, Value, peak_memory_gib
from nemo_moe.train.loss import count_label_tokens, token_loss_sum
from nemo_moe.train.report import Accuracy, accuracy_lines, load_command
from nemo_moe.train.runtime import agreed, local_device, local_world_size, process_group, world_size
from nemo_moe.train.step import StepResult, train_step


def finetune(config: RunConfig) -> dict[str, Value]:
    """Train the model that `config` describes and save it to config.output_dir/model. Collective over all ranks.

    Uses the process group that there is, or one made from torchrun's environment variables, or one of a single process.

    Returns:
        The final figures, equal on all ranks but for times: steps, loss (of the last step), validation_loss, seconds
        (of training), steps_without_labels, and with validation.exact_match also exact_match_before,
        exact_match_after and most_frequent_answer (accuracies).

    Raises:
        ValueError, ImportError: the run cannot start, with the reason; alike on all ranks (`runtime.StartError`).
        TrainingStopped: the loss or gradient norm is not finite any more.
        SaveError: the trained model cannot be written; its figures are reported before.
    """
    resolved = resolve(config, world_size(), local_world_size=local_world_size())
    device = local_device(resolved.device)
    with process_group(resolved.dist_backend, config.distributed.timeout_minutes, device):
        torch.manual_seed(config.seed)
        record = {**to_plain(config), "resolved": dataclasses.asdict(resolved)}
        folder, replaced = agreed(lambda: _prepare_folder(config, resolved, record))
        with RunLogger(config.logging, folder, record, dist.get_rank()) as log:
            log.note(to_yaml(config).rstrip())
            for line in resolved.lines:
                log.note(line)
            if replaced:
                log.warn(f"{folder} holds an earlier run, whose logs and model are replaced; set output_dir to keep both")
            return _run(assemble(config, resolved), folder, log)


def _run(run: Run, folder: Path, log: RunLogger) -> dict[str, Value]:
    for line in _start_lines(run):
        log.note(line)
    for line in warnings_of(run):
        log.warn(line)
    before = _exact_match(run, 0, log)
    metrics = _train(run, log)
    after = _exact_match(run, run.steps, log)
    if before is not None and after is not None:
        answer, share = most_frequent_answer_accuracy(run.data.train_answers, run.data.held_out)
        for line in accuracy_lines(Accuracy(before, after, answer, share), run.data.held_out, run.config.validation.show_samples):
            log.note(line)
        metrics |= {"exact_match_before": before.accuracy, "exact_match_after": after.accuracy, "most_frequent_answer": share}
    model_folder = folder / "model"  # last: what cannot be written must not cost the figures
    save_hf_folder(run.model, model_folder, tokenizer=run.data.tokenizer, source=run.config.model.folder)
    log.note(f"run folder: {folder} (the model in model/; config.yaml, resolved.json, train.jsonl and validation.jsonl beside it)")
    log.note(f"load the model with transformers:\n  {load_command(model_folder, run.data.held_out[0].question)}")
    return metrics


def _train(run: Run, log: RunLogger) -> dict[str, Value]:
    """The loop over optimizer steps, with validation in between and at the end."""
    config, validate_every = run.config, run.config.validation.every_steps
    gates = [layer.gate for layer in run.model.moe_layers()]
    pace = _Pace(config.logging.every_steps)
    without_labels, loss, validation_loss = 0, 0.0, 0.0
    log.start(run.steps)
    pace.resume()
    for step, micro_batches in enumerate(_steps(run.loader, run.steps), start=1):
        lr = float(run.optimizer.param_groups[0]["lr"])
        result = train_step(run.model, run.optimizer, micro_batches, run.meshes, run.coefficients, config.train.max_grad_norm, step)
        with warnings.catch_warnings():  # torch takes a schedule that moves on past a skipped update for a mistake
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            run.schedule.step()
        if result.label_tokens == 0:
            without_labels += 1
            if without_labels == 1:
                log.warn(f"step {step} has no label token on any rank and changes nothing; steps_without_labels counts such steps")
        elif config.router.bias_update_rate > 0:
            update_expert_bias(gates, result.tokens_per_expert, config.router.bias_update_rate)
        pace.finished(result.tokens)
        loss = result.loss
        metrics = {**_step_metrics(result, pace), "lr": lr, "epoch": step / len(run.loader), "steps_without_labels": float(without_labels)}
        log.step(step, metrics, functools.partial(_details, result, run.meshes.device))
        if step == run.steps or (validate_every is not None and step % validate_every == 0):
            validation_loss = held_out_loss(run.model, run.validation_loader, run.meshes)
            log.validation(step, {"loss": validation_loss})
            pace.resume()
    log.end_progress()
    return {
        "steps": float(run.steps),
        "loss": loss,
        "validation_loss": validation_loss,
        "seconds": pace.seconds,
        "steps_without_labels": float(without_labels),
    }


@torch.no_grad()
def held_out_loss(model: nn.Module, loader: StepLoader, meshes: Meshes) -> float:
    """Mean loss per label token over one pass of the loader; NaN where there is no label token. Collective."""
    totals = torch.zeros(2, dtype=torch.float64, device=meshes.device)
    was_training = model.training
    model.eval()
    for micro_batches in loader:
        for batch in micro_batches:
            labels = batch.labels.to(meshes.device)
            logits = model(batch.input_ids.to(meshes.device), token_mask=batch.token_mask.to(meshes.device)).logits
            totals += torch.stack([token_loss_sum(logits, labels).double(), count_label_tokens(labels).double()])
    model.train(was_training)
    dist.all_reduce(totals, group=meshes.dp_group)
    total, count = totals.tolist()
    return total / count if count else math.nan


class _Pace:
    """Training time and speed: laps end with a step, so evaluation in between does not count."""

    def __init__(self, window: int) -> None:
        self.seconds = 0.0
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
    """Optimizer steps, epoch after epoch."""
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


def _details(result: StepResult, device: torch.device) -> dict[str, Value]:
    """What costs something to find out, for the steps that are written down."""
    load = expert_load_metrics(result.tokens_per_expert) if result.tokens_per_expert.numel() else {}
    return {"peak_memory_gib": peak_memory_gib(device), **load}


def _exact_match(run: Run, step: int, log: RunLogger) -> ExactMatch | None:
    if not run.config.validation.exact_match:
        return None
    found = exact_match(run.model, run.data.tokenizer, run.data.held_out, device=run.meshes.device, dp_group=run.meshes.dp_group)
    log.validation(step, {"exact_match": found.accuracy, **{f"exact_match/{task}": share for task, share in found.per_task.items()}})
    return found


def _start_lines(run: Run) -> list[str]:
    config, coefficients = run.config, run.coefficients
    of_experts = {id(parameter) for layer in run.model.moe_layers() for parameter in layer.experts.parameters()}
    copies = ((parameter.numel(), run.meshes.sizes.ep if id(parameter) in of_experts else 1) for parameter in run.model.parameters())
    start = "random weights" if config.model.path is None else config.model.path
    tokenizer = "trained from the training items" if config.model.path is None else f"the one in {config.model.path}"
    biases = [layer.gate.expert_bias for layer in run.model.moe_layers()]
    fixed = any(bias is not None for bias in biases) and config.router.bias_update_rate == 0
    return [
        *run.data.summary,
        f"tokenizer: {tokenizer}, {len(run.data.tokenizer)} entries",
        f"model: {config.model.family} from {start}, {sum(numel * ranks for numel, ranks in copies):,} parameters",
        f"auxiliary losses: {coefficients.load_balance:g} x load balance, {coefficients.router_z:g} x router z-loss",
        *(["expert biases: from the folder, used as they are (router.bias_update_rate is 0)"] if fixed else []),
        f"training: {run.steps} optimizer steps, {len(run.loader)} an epoch",
    ]


def _prepare_folder(config: RunConfig, resolved: Resolved, record: dict[str, Any]) -> tuple[Path, bool]:
    """The run folder, with the resolved config in it, and whether an earlier run was there (told on rank 0).

    Rank 0 alone writes, and finds out now if it cannot.

    Args:
        record: the config as plain values, with what it was resolved to: what W&B gets, here as resolved.json.
    """
    folder = Path(config.output_dir).expanduser().resolve()
    replaced = False
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replaced = any((folder / name).exists() for name in ("config.yaml", "train.jsonl", "model"))
            lines = "".join(f"# {line}\n" for line in resolved.lines)
            (folder / "config.yaml").write_text(lines + to_yaml(config), encoding="utf-8")
            (folder / "resolved.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"output_dir: cannot write in {folder} ({error.strerror or error}); choose another output_dir") from error
    return folder, replaced
