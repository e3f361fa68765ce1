"""The folder that a run writes to. It is looked at before the run is built, and changed only when the run can begin.

So a start that fails (a misspelt model, a folder with tensors missing) leaves an earlier run's records as they were.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from nemo_moe.checkpoint.step_folders import StepFolders
from nemo_moe.compose import to_yaml
from nemo_moe.config import RunConfig
from nemo_moe.resolve import Resolved

_LOCK = ".lock"
_MARK = "# The config of a run, written by nemo_moe; it can be started again from here.\n"


class RunFolder:
    """output_dir of a config. Rank 0 alone calls what looks or writes.

    From `check` to `release` it is this run's: another one that would write to it is refused. A process that dies lets go.

    Attributes:
        path: absolute.
        checkpoints: its folder of checkpoints.
        model: where the trained model goes.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.output_dir).expanduser().resolve()
        self.checkpoints = StepFolders(self.path / "checkpoints")
        self.model = self.path / "model"
        self._lock: IO[bytes] | None = None

    def check(self) -> bool:
        """Whether an earlier run is there. Makes the folder.

        Raises ValueError where it cannot be written, holds something that would be lost, or belongs to a run that is not over.
        """
        config_file = self.path / "config.yaml"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take()
            if config_file.exists() and not config_file.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
                raise ValueError(
                    f"output_dir: {config_file} was not written by a run, and this run would replace it; choose another output_dir"
                )
            taken = [name for name in ("resolved.json", "train.jsonl", "validation.jsonl") if (self.path / name).is_dir()]
            if taken:
                raise ValueError(f"output_dir: {self.path / taken[0]} is a folder, where a run writes a file; choose another output_dir")
            return any((self.path / name).exists() for name in ("config.yaml", "train.jsonl", "model"))
        except OSError as error:
            raise ValueError(f"output_dir: cannot write in {self.path} ({error.strerror or error}); choose another output_dir") from error

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None:
            self._lock.close()  # the file stays: removing it would let two others lock two files of that name
            self._lock = None

    def _take(self) -> None:
        lock = (self.path / _LOCK).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ValueError(
                f"output_dir: another run is writing to {self.path}; wait until it is over, or choose another output_dir"
            ) from error
        self._lock = lock

    def write_configs(self, config: RunConfig, resolved: Resolved, record: Mapping[str, Any]) -> None:
        """Write config.yaml (a recipe, with what it was resolved to in comments) and resolved.json (`record`).

        Args:
            record: the config as plain values, with what it was resolved to: what W&B gets.
        """
        lines = "".join(f"# {line}\n" for line in resolved.lines)
        (self.path / "config.yaml").write_text(_MARK + lines + to_yaml(config), encoding="utf-8")
        (self.path / "resolved.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
