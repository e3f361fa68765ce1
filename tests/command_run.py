"""A fine-tuning run through the command line, and what tests do to its ranks: find, freeze, signal, limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemo_moe.compose import to_yaml
from nemo_moe.config import RunConfig
from tiny_run import records

ROOT = Path(__file__).resolve().parents[1]
_TIMES = ("tokens_per_second", "tokens_per_second_per_gpu", "peak_memory_gib")


class CommandRun:
    """`nemo-moe finetune` on a recipe, with the log of all its processes.

    Args:
        config: written to a file beside its output_dir.
        arguments: overrides and options of torchrun.
        ranks: how many torchrun starts; 0 is the command without torchrun.
    """

    def __init__(self, config: RunConfig, *arguments: str, ranks: int = 2) -> None:
        self.folder = Path(config.output_dir)
        self.checkpoints = self.folder / "checkpoints"
        recipe = self.folder.with_suffix(".yaml")
        recipe.write_text(to_yaml(config))
        self.log = self.folder.with_suffix(".log")
        options = ["--nproc-per-node", str(ranks)] if ranks else []
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nemo_moe.cli.main", "finetune", str(recipe), *options, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**_outside_environment(), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
            )
        self._seen: dict[int, int] = {}

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 150.0) -> Any:
        """The first true value of `condition`, asked a thousand times a second. The run must not end before."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, f"it ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.text}"
            time.sleep(0.001)
        return value

    def pid(self, rank: int) -> int:
        """Of a rank, once it takes signals."""
        if rank not in self._seen:
            self._seen[rank] = self.until(
                lambda: next((pid for pid in _children(self.process.pid) if _is_ready(pid, rank)), None), f"rank {rank}"
            )
        return self._seen[rank]

    def send(self, rank: int, signum: int) -> None:
        os.kill(self.pid(rank), signum)

    def send_to_all(self, signum: int) -> None:
        """To the command's process group, as the terminal does with Ctrl-C."""
        os.killpg(self.process.pid, signum)

    @contextlib.contextmanager
    def frozen(self, rank: int) -> Iterator[None]:
        """The rank stands still in the block, so that what it is in does not end before a signal comes."""
        self.send(rank, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.send(rank, signal.SIGCONT)

    def step_is(self, step: int) -> None:
        """Wait until a step has been recorded."""
        self.until(lambda: self.count() >= step, f"step {step}")

    def count(self, name: str = "train") -> int:
        """Records in a JSONL file."""
        path = self.folder / f"{name}.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    @contextlib.contextmanager
    def frozen_in_a_save(self, rank: int) -> Iterator[None]:
        """The rank stands still in the block, in the middle of a save that cannot end without it."""
        for _ in range(10):
            self.until(self.partials, "save", 60)
            with self.frozen(rank):
                time.sleep(0.5)
                if self.partials():
                    yield
                    return
            self.until(lambda: not self.partials(), "end of that save", 60)  # it had ended already: the next one
        raise AssertionError(f"no save was seen in time:\n{self.text}")

    def partials(self) -> list[Path]:
        """Folders of checkpoints that are being written."""
        return list(self.checkpoints.glob(".step-*.partial"))

    def latest(self) -> str | None:
        """The name that the file `latest` holds."""
        path = self.checkpoints / "latest"
        return path.read_text().strip() if path.is_file() else None

    def records(self, name: str = "train") -> list[dict[str, Any]]:
        """Complete records of a JSONL file, without times and speeds."""
        path = self.folder / f"{name}.jsonl"
        if not path.is_file() or not path.read_text().endswith("\n"):
            return []
        return [{key: value for key, value in record.items() if key not in _TIMES} for record in records(self.folder, name)]

    def ended(self, seconds: float = 150.0) -> int:
        """The exit code; no process of the run is left."""
        code = self.process.wait(timeout=seconds)
        assert not [pid for pid in self._seen.values() if _state(pid) not in ("", "Z")], "a rank is left"
        return code

    def kill(self) -> None:
        """End what is left of it."""
        for pid in (*_children(self.process.pid), *self._seen.values(), self.process.pid):
            if _state(pid) not in ("", "Z"):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _outside_environment() -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_ready(pid: int, rank: int) -> bool:
    """Whether it is that rank, and has a handler for SIGTERM."""
    with contextlib.suppress(OSError, StopIteration):
        if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            caught = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
            return bool(int(caught, 16) & 1 << (signal.SIGTERM - 1))
    return False
