"""The folder that a run writes to. It is looked at before the run is built, and changed only when the run can begin.

So a start that fails (a misspelt model, a folder with tensors missing) leaves an earlier run's records as they were.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from nemo_moe.checkpoint.step_folders import StepFolders
from nemo_moe.compose import to_yaml
from nemo_moe.config import RunConfig
from nemo_moe.resolve import Resolved

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_logger = logging.getLogger(__name__)
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
        self._lock: IO[str] | None = None
        self._saves = config.checkpoint.every_steps is not None

    def check(self) -> tuple[bool, str]:
        """Make the folder and take it. On rank 0.

        Returns:
            Whether an earlier run is there, and a text that `check_shared` finds where the folder is the same one.

        Raises ValueError where it cannot be written, holds something that would be lost, or belongs to a run that is not over.
        """
        config_file = self.path / "config.yaml"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            token = self._take()
            self.checkpoints.recover()
            if config_file.exists() and not config_file.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
                raise ValueError(
                    f"output_dir: {config_file} was not written by a run, and this run would replace it; choose another output_dir"
                )
            taken = [name for name in ("resolved.json", "train.jsonl", "validation.jsonl") if (self.path / name).is_dir()]
            if taken:
                raise ValueError(f"output_dir: {self.path / taken[0]} is a folder, where a run writes a file; choose another output_dir")
            return any((self.path / name).exists() for name in ("config.yaml", "train.jsonl", "model")), token
        except OSError as error:
            raise ValueError(f"output_dir: cannot write in {self.path} ({error.strerror or error}); choose another output_dir") from error

    def check_shared(self, token: str) -> None:
        """Raise ValueError where this rank's folder is not rank 0's, and checkpoints, which all ranks write, are asked for."""
        path = self.path / _LOCK
        if self._saves and not (path.is_file() and path.read_text(encoding="utf-8", errors="replace") == token):
            raise ValueError(
                f"output_dir: {self.path} on {socket.gethostname()} is not the folder that rank 0 writes to; checkpoints"
                " (checkpoint.every_steps) need one that all nodes share"
            )

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None:
            self._lock.close()  # the file stays: removing it would let two others lock two files of that name
            self._lock = None

    def _take(self) -> str:
        self._lock = (self.path / _LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise ValueError(
                f"output_dir: another run is writing to {self.path}; wait until it is over, or choose another output_dir"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _logger.warning("%s is on a file system without locks: take care that no other run writes to it", self.path)
        token = secrets.token_hex(16)
        self._lock.truncate(0)
        self._lock.write(token)
        self._lock.flush()
        return token

    def write_configs(self, config: RunConfig, resolved: Resolved, record: Mapping[str, Any]) -> None:
        """Write config.yaml (a recipe, with what it was resolved to in comments) and resolved.json (`record`).

        Args:
            record: the config as plain values, with what it was resolved to: what W&B gets.
        """
        lines = "".join(f"# {line}\n" for line in resolved.lines)
        (self.path / "config.yaml").write_text(_MARK + lines + to_yaml(config), encoding="utf-8")
        (self.path / "resolved.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
