"""Saving a run and going on with it: what a checkpoint holds besides tensors, and when it counts.

A checkpoint is a folder of DCP files (`checkpoint.training_state`), `state.json` (where the run stands, in the data too,
and the whole config), and `hf/`, a Hugging Face folder without weights, so that it can be exported without the recipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nemo_moe import __version__
from nemo_moe.checkpoint.dcp import write_tensors
from nemo_moe.checkpoint.dcp_index import CheckpointReadError, read_index
from nemo_moe.checkpoint.folder_writer import write_configs
from nemo_moe.checkpoint.shards import LocalShard
from nemo_moe.checkpoint.step_folders import StepFolders
from nemo_moe.checkpoint.together import SaveError, on_rank_zero
from nemo_moe.checkpoint.training_state import Restore, training_boxes
from nemo_moe.data.loader import StepLoader
from nemo_moe.train.assemble import Run
from nemo_moe.train.progress import transfer_text
from nemo_moe.train.resume import FORMAT, STATE_FILE, Resume, read_state
from nemo_moe.train.run_state import RunState
from nemo_moe.train.runtime import StartError, agreed
from nemo_moe.train.schedule import set_schedule

HF_FOLDER = "hf"


def restore_run(run: Run, resume: Resume, group: dist.ProcessGroup) -> bool:
    """Put a new run where the checkpoint was. Collective.

    Returns:
        Whether the random generators are as they were; not on another number of ranks.

    Raises:
        StartError: the checkpoint is damaged or does not fit; on all ranks.
    """
    ranks_then = int(resume.state["ranks"])
    restore = agreed(lambda: Restore(run.model, run.optimizer, resume.folder, dist.get_rank(), ranks_then, dist.get_world_size()))
    try:
        restore.read(group)
    except CheckpointReadError as error:  # on all ranks
        raise StartError(str(error)) from error
    agreed(lambda: _place_loader(run.loader, resume))
    # The learning rate is a function of the step and of this run's config, which may have changed.
    set_schedule(run.schedule, resume.progress.step)
    return restore.same_random


def _place_loader(loader: StepLoader, resume: Resume) -> None:
    loader.load_state_dict(resume.state["loader"])
    if loader.epoch * len(loader) + loader.step != resume.progress.step:
        raise ValueError(
            f"{resume.folder / STATE_FILE} is damaged: step {resume.progress.step} is not where its position in the data is"
            f" (epoch {loader.epoch}, step {loader.step} of {len(loader)})"
        )


class Checkpoints:
    """Saves the checkpoints of a run, now or in the background.

    Args:
        run: what is saved.
        record: the config and what it came to, as plain values.
        folders: where.
        group: all ranks, over gloo; of a save alone, because one in the background uses it while training goes on.
        note: called on rank 0 with a line about each save; from another thread for one in the background.
        restored: where the run stands right now as the latest of `folders` has it, so that it need not be saved again.
    """

    def __init__(
        self,
        run: Run,
        record: Mapping[str, Any],
        folders: StepFolders,
        group: dist.ProcessGroup,
        note: Callable[[str], None],
        restored: RunState | None = None,
    ) -> None:
        self._run, self._record, self._folders, self._group, self._note = run, record, folders, group, note
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved = None if restored is None else restored.to_dict()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step is asked for."""
        every = self._run.config.checkpoint.every_steps
        return every is not None and step > 0 and (step % every == 0 or step == self._run.steps)

    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank; `wait` raises it."""
        return self._error is not None

    def save(self, progress: RunState, log_position: Mapping[str, Any], *, in_background: bool = False) -> None:
        """Save the run as it stands. Collective. Nothing happens where the very same was saved last.

        Args:
            log_position: of `RunLogger.position`, on rank 0.
            in_background: return as soon as all tensors are copied to CPU memory.

        Raises:
            SaveError: this save, or the one before in the background, failed; on all ranks. Older checkpoints are as they were.
        """
        self.wait()
        state = self._state(progress, log_position)
        if state["progress"] == self._saved:
            return
        boxes = training_boxes(self._run.model, self._run.optimizer, dist.get_rank())
        if not in_background:
            self._write(progress.step, boxes, state)
        else:
            copies = [dataclasses.replace(box, tensor=box.tensor.to("cpu", copy=True)) for box in boxes]
            # Not a daemon: leaving the program waits for it.
            self._thread = threading.Thread(target=self._write_in_background, args=(progress.step, copies, state))
            self._thread.start()
        self._saved = state["progress"]

    def wait(self) -> None:
        """Until a save in the background is over. Raises SaveError if it failed; on all ranks that saved."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._saved = None
            raise error

    def remove_unasked(self) -> None:
        """Remove the checkpoints that only an interruption left: of runs with every_steps null. Collective."""

        def remove() -> None:
            for step, folder in self._folders.steps().items():
                with contextlib.suppress(ValueError):  # one that cannot be read stays: nobody knows whose it is
                    if read_state(folder)["config"]["checkpoint"]["every_steps"] is None:
                        self._folders.remove(step)

        on_rank_zero(remove, f"removing the checkpoints of an interruption from {self._folders.root}", self._group)

    def _write_in_background(self, *arguments: Any) -> None:
        if self._run.meshes.device.type == "cuda":
            torch.cuda.set_device(self._run.meshes.device)  # a new thread begins with device 0
        try:
            self._write(*arguments)
        except Exception as error:
            self._error = error

    def _write(self, step: int, boxes: list[LocalShard], state: dict[str, Any]) -> None:
        folders, began = self._folders, time.perf_counter()

        def finish() -> None:
            size = self._finish(step, state)
            self._note(f"checkpoint of step {step}: {transfer_text(size, time.perf_counter() - began)}")

        try:
            on_rank_zero(lambda: folders.begin(step), "making its folder", self._group)
            write_tensors(boxes, folders.partial(step), self._group)
            on_rank_zero(finish, "completing it", self._group)
        except SaveError as error:  # on all ranks alike
            on_rank_zero(lambda: folders.abandon(step), "removing what was written", self._group)
            raise SaveError(f"saving {folders.folder(step)} failed: {error}; older checkpoints are as they were") from error

    def _finish(self, step: int, state: dict[str, Any]) -> int:
        """On rank 0: write what is no tensor, look at the whole, and make it the latest. Returns its bytes."""
        partial = self._folders.partial(step)
        (partial / HF_FOLDER).mkdir()
        write_configs(partial / HF_FOLDER, state["model_config"], self._run.data.tokenizer, self._run.config.model.folder)
        with (partial / STATE_FILE).open("w", encoding="utf-8") as file:
            json.dump(state, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        read_index(partial)
        read_state(partial)
        size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        self._folders.publish(step, is_best=self._is_best(state), keep_last=self._run.config.checkpoint.keep_last)
        return size

    def _is_best(self, state: Mapping[str, Any]) -> bool:
        """Whether its validation loss is below that of the best checkpoint there is."""
        progress, best = state["progress"], self._folders.best()
        if not self._run.config.checkpoint.keep_best or progress["validated_step"] != progress["step"]:
            return False
        loss = progress["validation_loss"]
        return math.isfinite(loss) and (best is None or loss < read_state(best)["progress"]["validation_loss"])

    def _state(self, progress: RunState, log_position: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "progress": progress.to_dict(),
            "loader": self._run.loader.state_dict(),
            "log": dict(log_position),
            "ranks": dist.get_world_size(),
            "data_digest": self._run.data_digest,
            "model_config": self._run.model_config.to_hf(),
            "versions": {"nemo_moe": __version__, "torch": torch.__version__},
            "config": {key: value for key, value in self._record.items() if key != "resolved"},
            "resolved": self._record["resolved"],
        }
