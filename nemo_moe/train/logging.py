"""Everything a run reports, on rank 0 only: console, JSONL files and W&B, on one global step axis.

The step is the number of completed optimizer steps, counted from 1; what is measured before training has step 0. The
training and the validation records use the same number, everywhere, also in a run that goes on from a checkpoint.

Files in the run folder: `config.yaml` (the recipe), `resolved.json` (the recipe and what it came to), `train.jsonl` (a
record every `logging.every_steps` steps and at the last one), `validation.jsonl`. A run that starts anew in an old
folder replaces them; one that goes on from a checkpoint takes them up where they stood when it was saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from nemo_moe.config import LoggingConfig
from nemo_moe.train.progress import ProgressDisplay
from nemo_moe.train.tracking import WandbRun

Value = float | list[float]
_FILES = ("train", "validation")


class RunLogger:
    """Reports of one run. On other ranks than 0 every method does nothing.

    Lines go to the console from the start; records, to the files and W&B, from `begin` on. A file that cannot be written
    any more costs its records and one warning, never the run.

    Args:
        config: how often, and what to use.
        rank: the global rank.
    """

    def __init__(self, config: LoggingConfig, rank: int) -> None:
        self._config = config
        self._active = rank == 0
        self._files: dict[str, IO[str]] = {}
        self._figures: dict[str, str] = {}
        self._total_steps = 0
        self._wandb: WandbRun | None = None
        if self._active:
            self._display = ProgressDisplay(config.progress_bar)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._active:
            self._display.stop()
            for name in tuple(self._files):
                self._guarded(name, lambda file: file.close())
            if self._wandb is not None:
                self._wandb.finish(failed=kind is not None)

    def begin(self, folder: Path, run_config: dict[str, Any], continued: Mapping[str, Any] | None = None) -> None:
        """The run can begin: open its records.

        Args:
            folder: the run folder; it exists.
            run_config: the config and what it was resolved to, as plain values, for W&B.
            continued: the `position` of the run in this folder that is gone on with; None starts new files and a new W&B run.
        """
        if self._active:
            position = continued or {}
            for name in _FILES:
                path = folder / f"{name}.jsonl"
                try:
                    self._files[name] = _open_at(path, position.get(name) if continued else 0)
                except OSError as error:
                    self._without(path, error)
            self._wandb = WandbRun(self._config.wandb, folder, run_config, self.warn, self.note, run_id=position.get("wandb"))

    def note(self, text: str) -> None:
        """Print a line."""
        if self._active:
            self._display.note(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.note(f"warning: {text}")

    def start(self, total_steps: int, done: int = 0) -> None:
        """Training begins, or goes on after `done` steps: show progress."""
        self._total_steps = total_steps
        if self._active:
            self._display.start(total_steps, done)

    def end_progress(self) -> None:
        """Training is over: the bar stays as it is, and what follows is printed below it."""
        if self._active:
            self._display.stop()

    def is_due(self, step: int) -> bool:
        """Whether the records of this step are written."""
        return step % self._config.every_steps == 0 or step == self._total_steps

    def step(self, step: int, metrics: Mapping[str, Value], details: Callable[[], Mapping[str, Value]]) -> None:
        """Report a finished optimizer step.

        Args:
            step: the global step, from 1.
            metrics: must hold loss, grad_norm, lr and tokens_per_second.
            details: makes the metrics that cost something; called for the steps that are written only.
        """
        if not self._active:
            return
        due = self.is_due(step)
        if due:
            metrics = {**metrics, **details()}
            self._write("train", step, metrics)
        self._figures |= _figures(metrics)
        self._display.update(step, list(self._figures.values()), line=due)

    def validation(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Report an evaluation after `step` (0: before training)."""
        if self._active:
            self._write("validation", step, metrics)
            shown = (f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
            self.note(f"validation at step {step}: {', '.join(shown)}")

    def position(self) -> dict[str, Any]:
        """Where the records stand, for a checkpoint: bytes of each file, and the id of the W&B run. Empty on other ranks than 0."""
        if not self._active:
            return {}
        for name in tuple(self._files):
            self._guarded(name, lambda file: os.fsync(file.fileno()))
        return {**{name: file.tell() for name, file in self._files.items()}, "wandb": None if self._wandb is None else self._wandb.run_id}

    def _write(self, name: str, step: int, metrics: Mapping[str, Value]) -> None:
        self._guarded(name, lambda file: file.write(json.dumps({"step": step, **metrics}) + "\n"))
        if self._wandb is not None:
            self._wandb.log({f"{name}/{key}": value for key, value in metrics.items()}, step)

    def _guarded(self, name: str, action: Callable[[IO[str]], object]) -> None:
        file = self._files.get(name)
        if file is not None:
            try:
                action(file)
            except OSError as error:
                del self._files[name]
                self._without(Path(file.name), error)
                with contextlib.suppress(OSError):  # it tries to write what is left
                    file.close()

    def _without(self, path: Path, error: OSError) -> None:
        self.warn(f"{path} cannot be written ({error.strerror or error}); the run goes on without these records")


def _open_at(path: Path, size: int | None) -> IO[str]:
    """Open for more lines after the first `size` bytes; what stands behind them is of steps that were not saved.

    None takes the file as it is: its records had ended when the checkpoint was saved.
    """
    with path.open("ab") as file:
        if size is not None:
            file.truncate(min(size, file.tell()))
    return path.open("a", buffering=1)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far: allocated on this rank's CUDA device, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB


def _figures(metrics: Mapping[str, Value]) -> dict[str, str]:
    """The figures of the console, those that are there."""
    formats = {"loss": "loss {:.4f}", "lr": "lr {:.2e}", "tokens_per_second": "{:,.0f} tokens/s", "moe/imbalance": "imbalance {:.2f}"}
    return {key: form.format(metrics[key]) for key, form in formats.items() if key in metrics}
