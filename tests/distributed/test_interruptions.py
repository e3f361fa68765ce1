"""Runs that are stopped, killed or run out of disk, through the command line with real processes and signals.

What is compared is everything in train.jsonl and validation.jsonl but times: equal to the last bit to a run that
nobody disturbed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_run import CommandRun
from nemo_moe.config import CheckpointConfig, OptimizerConfig, RunConfig, ValidationConfig
from tiny_run import tiny_config

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="finds ranks and their state in /proc")
STEPS = 24
Start = Callable[..., CommandRun]


def config(folder: Path, **checkpoint: Any) -> RunConfig:
    """Four epochs of six steps, validated after steps 8, 16 and 24. A checkpoint is 9 MB, so that a save takes a while."""
    tiny = tiny_config(
        folder,
        ep_size=2,
        max_steps=STEPS,
        items=48,
        model={"hidden_size": 96, "moe_intermediate_size": 160, "num_experts": 8},
        optimizer=OptimizerConfig(name="adamw", lr=1e-3),
        validation=ValidationConfig(every_steps=8, exact_match=True),
        checkpoint=CheckpointConfig(**{"every_steps": 6, **checkpoint}),
    )
    return dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, held_out_per_task=40))  # several batches on each rank


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the run, or with resume=True go on with it."""
    started: list[CommandRun] = []

    def start_run(*arguments: str, resume: bool = False, ranks: int = 2, **checkpoint: Any) -> CommandRun:
        going_on = {"resume": "latest"} if resume else {}
        started.append(CommandRun(config(tmp_path / "run", **checkpoint, **going_on), *arguments, ranks=ranks))
        return started[-1]

    yield start_run
    for run in started:
        run.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> CommandRun:
    run = CommandRun(config(tmp_path_factory.mktemp("undisturbed") / "run"))
    try:
        assert run.ended() == 0, run.text
    finally:
        run.kill()
    assert [record["step"] for record in run.records()] == list(range(1, STEPS + 1))
    return run


def assert_equal_runs(run: CommandRun, undisturbed: CommandRun) -> None:
    for name in ("train", "validation"):
        assert run.records(name) == undisturbed.records(name)
    ours, theirs = (each.folder / "model" / "model.safetensors" for each in (run, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


def stopped_after(run: CommandRun, signal_name: str) -> int:
    """The step after which it says it stopped; exit code 0, one such line, a checkpoint of it, nothing half-written."""
    assert run.ended() == 0, run.text
    (line,) = [line for line in run.text.splitlines() if line.startswith("stopped by")]
    start = f"stopped by {signal_name} after step "
    assert line.startswith(start) and "go on with: checkpoint.resume=latest" in line and "Traceback" not in run.text, run.text
    step = int(line.removeprefix(start).split()[0])
    assert run.latest() == f"step-{step:08d}" and not run.partials()
    state = json.loads((run.checkpoints / f"step-{step:08d}" / "state.json").read_text())
    assert state["progress"]["step"] == step
    return step


# Signals


def before_the_first_step(run: CommandRun) -> None:
    run.send(1, signal.SIGTERM)  # as soon as it takes signals


def in_the_first_evaluation(run: CommandRun) -> None:
    run.pid(1)
    run.until(lambda: "training: " in run.text, "evaluation")
    with run.frozen(1):
        assert run.count("validation") == 0, "the evaluation has ended before the signal"
        run.send(1, signal.SIGTERM)


def in_a_step(run: CommandRun) -> None:
    run.pid(1)
    run.step_is(2)
    with run.frozen(1):
        run.send(1, signal.SIGTERM)


def in_a_validation(run: CommandRun) -> None:
    run.pid(1)
    run.step_is(8)
    with run.frozen(1):
        assert run.count("validation") == 1, "the validation has ended before the signal"
        run.send(1, signal.SIGTERM)


def in_a_save(run: CommandRun) -> None:
    with run.frozen_in_a_save(1):
        run.send(1, signal.SIGTERM)


def ctrl_c(run: CommandRun) -> None:
    run.step_is(16)
    for _ in range(3):
        run.send_to_all(signal.SIGINT)
        time.sleep(0.05)


def in_the_last_evaluation(run: CommandRun) -> None:
    run.pid(1)
    run.until(lambda: run.count("validation") == 4, "last validation")
    with run.frozen(1):
        assert run.count("validation") == 4, "the evaluation has ended before the signal"
        run.send(1, signal.SIGTERM)


# In the order in which a run meets them, with the steps after which it may be stopped: a signal that comes after the last
# batch of an evaluation is seen in the step that follows.
PHASES: list[tuple[Callable[[CommandRun], None], str, range]] = [
    (before_the_first_step, "SIGTERM", range(1)),
    (in_the_first_evaluation, "SIGTERM", range(1)),
    (in_a_step, "SIGTERM", range(2, 8)),
    (in_a_validation, "SIGTERM", range(8, 10)),
    (in_a_save, "SIGTERM", range(6, 20)),
    (ctrl_c, "SIGINT", range(16, STEPS + 1)),
    (in_the_last_evaluation, "SIGTERM", range(STEPS, STEPS + 1)),
]


SHORT = [phase for phase in PHASES if phase[0] in (before_the_first_step, in_a_step, in_a_save)]


@pytest.mark.parametrize("phases", [pytest.param(SHORT, id="some"), pytest.param(PHASES, id="all", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_in_every_phase_equals_one_that_is_not(
    start: Start, undisturbed: CommandRun, phases: list[tuple[Callable[[CommandRun], None], str, range]]
) -> None:
    """case B48 among them: a signal to one rank only, in a step. Each run goes on from where the one before was stopped."""
    for number, (interrupt, name, steps) in enumerate(phases):
        run = start(resume=number > 0)
        interrupt(run)
        assert stopped_after(run, name) in steps, (interrupt.__name__, run.text)
    run = start(resume=True)
    assert run.ended() == 0, run.text
    assert_equal_runs(run, undisturbed)


@pytest.mark.slow
def test_a_save_in_the_background_is_awaited_and_the_step_reached_is_saved_after_it(start: Start, undisturbed: CommandRun) -> None:
    run = start(async_save=True)
    with run.frozen_in_a_save(1):
        run.send(0, signal.SIGTERM)
    step = stopped_after(run, "SIGTERM")
    assert step < STEPS
    run = start(resume=True, async_save=True)
    assert run.ended() == 0, run.text
    assert_equal_runs(run, undisturbed)
    assert run.latest() == f"step-{STEPS:08d}", "case B46: the last save is awaited"


def test_one_process_without_torchrun_says_at_once_that_it_stops(start: Start) -> None:
    run = start("distributed.ep_size=1", ranks=0)
    run.step_is(2)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "SIGINT: stopping as soon as all is saved, within 120 s" in run.text or run.process.poll() is not None, "answer", 20)
    stopped_after(run, "SIGINT")
    assert run.text.count("SIGINT: stopping") == 1


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_by_the_watchdog_and_the_run_goes_on_with_it(start: Start, undisturbed: CommandRun) -> None:
    run = start("distributed.hang_report_minutes=0.05")
    run.step_is(2)
    with run.frozen(1):
        run.until(lambda: "does not answer" in run.text and "  rank 0: " in run.text, "report", 30)
        time.sleep(3.0)
    assert run.ended() == 0, run.text
    (head,) = [line for line in run.text.splitlines() if line.startswith("watchdog: ")]
    assert "rank 1 does not answer" in head
    (silent,) = [line for line in run.text.splitlines() if line.startswith("  rank 1: process")]
    assert f"process {run.pid(1)} on " in silent and "is stopped" in silent
    (waiting,) = [line for line in run.text.splitlines() if line.startswith("  rank 0: ")]
    assert "nemo_moe/" in waiting and ".py:" in waiting
    assert_equal_runs(run, undisturbed)


@pytest.mark.slow
def test_a_stop_that_cannot_be_agreed_on_ends_all_ranks_after_the_grace_time(start: Start) -> None:
    run = start(grace_seconds=3.0)
    run.step_is(7)
    with run.frozen(1):
        begin = time.monotonic()
        run.send_to_all(signal.SIGTERM)
        assert run.ended() == 128 + signal.SIGTERM
    assert 3 < time.monotonic() - begin < 40, run.text
    assert "[rank 0] SIGTERM came 3 s ago and the process has not left by itself" in run.text and "Traceback" not in run.text
    assert run.latest() == "step-00000006"


# Death and failure in a save


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_older_checkpoint_as_latest(
    start: Start, undisturbed: CommandRun, rank: int
) -> None:
    run = start()
    run.until(run.latest, "first checkpoint")
    with run.frozen_in_a_save(rank):
        older = run.latest()
        run.send(rank, signal.SIGKILL)
    assert run.ended() == 1
    assert older is not None and run.latest() == older and "SIGKILL" in run.text
    run = start(resume=True)
    assert run.ended() == 0, run.text
    assert f"going on from {run.checkpoints / older}" in run.text
    assert_equal_runs(run, undisturbed)
    assert not run.partials(), "what was half-written is removed by the next save"


def assert_failed_once_because(run: CommandRun, cause: str, older: str) -> None:
    assert run.ended() == 1
    (line,) = [line for line in run.text.splitlines() if "error: " in line and "saving" in line]
    assert cause in line
    assert "Traceback (most recent" not in run.text, run.text
    assert run.latest() == older and (run.checkpoints / older / "state.json").is_file() and not run.partials()


def test_a_limit_on_one_ranks_files_stops_all_ranks_with_that_cause(start: Start) -> None:
    """case B50: rank 1 alone cannot write."""
    run = start()
    older = run.until(run.latest, "first checkpoint")
    resource.prlimit(run.pid(1), resource.RLIMIT_FSIZE, (100_000, 100_000))
    assert_failed_once_because(run, os.strerror(errno.EFBIG), older)
    assert "(rank 1)" in run.text


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "cause"), [(None, "No space left on device"), ("remount,ro", "Read-only file system")])
def test_a_disk_that_cannot_be_written_to_stops_all_ranks_with_that_cause(
    start: Start, tmp_path: Path, change: str | None, cause: str
) -> None:
    """case B50: there is room for one checkpoint and not for two."""
    folder = tmp_path / "run" / "checkpoints"
    with small_disk(folder, megabytes=1 if change is None else 64):
        small = ("model.config.hidden_size=32", "model.config.moe_intermediate_size=16") if change is None else ()
        run = start(*small)
        older = run.until(run.latest, "first checkpoint")
        if change is not None:
            subprocess.run(["mount", "-o", change, str(folder)], check=True)
        assert_failed_once_because(run, cause, older)
        if change is None:
            subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
            run = start(*small, resume=True)
            assert run.ended() == 0, run.text
            assert [record["step"] for record in run.records()] == list(range(1, STEPS + 1))
