"""The watchdog on real gloo ranks that hang: who is named, once, and where each rank is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from nemo_moe.train.watchdog import Answer, Watchdog, report

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("hanging_rank.py")
LINES = SCRIPT.read_text().splitlines()


class Ranks:
    """Real processes in one scenario of hanging_rank.py."""

    def __init__(self, scenario: str, world_size: int, folder: Path) -> None:
        self.store: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.logs = [folder / f"rank{rank}" for rank in range(world_size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        self.processes = []
        for rank, log in enumerate(self.logs):
            arguments = [sys.executable, str(SCRIPT), scenario, str(rank), str(world_size), str(self.store.port)]
            with log.open("w") as out:
                self.processes.append(subprocess.Popen(arguments, stdout=out, stderr=subprocess.STDOUT, env=environment))
        self.until(lambda: all("ready" in text for text in self.texts()), 120)

    def texts(self) -> list[str]:
        return [log.read_text() for log in self.logs]

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.texts()
            time.sleep(0.05)

    def reports(self) -> list[str]:
        return [part for text in self.texts() for part in re.findall(r"^watchdog: .*\n(?:  .*\n)*", text, flags=re.MULTILINE)]

    def one_report(self, *, by_rank: int = 0) -> str:
        """The only report, also after some more seconds of hanging."""
        self.until(lambda: bool(self.reports()))
        time.sleep(3.0)
        (only,) = self.reports()
        assert "watchdog: " in self.texts()[by_rank]
        return only

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[[str, int], Ranks]]:
    started: list[Ranks] = []

    def start(scenario: str, world_size: int = 2) -> Ranks:
        started.append(Ranks(scenario, world_size, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.end()


def line_of(text: str) -> int:
    (number,) = [number for number, line in enumerate(LINES, start=1) if line.strip() == text]
    return number


EXCHANGE = f"in all_to_all_single, called at hanging_rank.py:{line_of('dist.all_to_all_single(received, sent)')} in exchange"


def test_a_rank_that_is_not_in_the_collective_of_the_others_is_named_once(ranks: Callable[..., Ranks]) -> None:
    text = ranks("all_wait_but_rank_1", 4).one_report()
    head, culprit, others = text.splitlines()
    assert re.fullmatch(r"watchdog: no progress for [1-9] s since 'step 7': rank 1 is not where the others wait", head)
    assert culprit.startswith(
        f"  rank 1: at hanging_rank.py:{line_of('time.sleep(seconds)')} in read_a_batch: time.sleep(seconds) ('step 7' "
    )
    assert others.startswith(f"  ranks 0, 2-3: {EXCHANGE} ('step 7' ")


def test_a_stopped_rank_does_not_answer_and_the_next_one_reports_it(ranks: Callable[..., Ranks]) -> None:
    started = ranks("rank_0_is_stopped", 4)
    head, silent, others = started.one_report(by_rank=1).splitlines()
    assert head.endswith("since 'step 7': rank 0 does not answer")
    assert silent.startswith(f"  rank 0: process {started.processes[0].pid} on ")
    assert silent.endswith("is stopped (by a signal, or a debugger)") or not Path("/proc/self/stat").is_file()
    assert others.startswith(f"  ranks 1-3: {EXCHANGE}")
    started.processes[0].send_signal(signal.SIGCONT)
    assert [process.wait(timeout=60) for process in started.processes] == [0] * 4, "it was only held up"
    assert len(started.reports()) == 1


def test_ranks_in_different_collectives_are_told_apart(ranks: Callable[..., Ranks]) -> None:
    head, first, second = ranks("two_collectives").one_report().splitlines()
    assert head.endswith("the ranks wait in different places")
    blocking, asynchronous = (
        "dist.all_reduce(torch.ones(1), group=groups[0])",
        "dist.all_reduce(torch.ones(1), group=groups[1], async_op=True).wait()",
    )
    assert first.startswith(f"  rank 0: in all_reduce, called at hanging_rank.py:{line_of(blocking)} in two_collectives")
    assert second.startswith(f"  rank 1: at hanging_rank.py:{line_of(asynchronous)} in two_collectives: {asynchronous}")


@pytest.mark.slow
def test_a_collective_in_backward_and_one_made_of_others_go_by_the_name_they_were_called_by(ranks: Callable[..., Ranks]) -> None:
    text = ranks("backward_and_objects").one_report()
    assert f"in all_reduce, called at hanging_rank.py:{line_of('dist.all_reduce(grad.clone())')} in backward" in text
    assert re.search(r"rank 1: in (all_gather_object|new_group), called at hanging_rank.py:\d+ in backward_and_objects", text)


@pytest.mark.slow
def test_a_second_hang_after_progress_is_a_second_report(ranks: Callable[..., Ranks]) -> None:
    started = ranks("twice")
    assert [process.wait(timeout=60) for process in started.processes] == [0, 0]
    first, second = started.reports()
    assert "'step 1': rank 0 is not where" in first and "'step 2': rank 1 is not where" in second


def test_a_run_that_makes_progress_is_left_alone(ranks: Callable[..., Ranks]) -> None:
    started = ranks("slow_but_steady")
    assert [process.wait(timeout=60) for process in started.processes] == [0, 0]
    assert started.texts() == ["ready\n"] * 2


def test_a_rank_whose_peer_has_failed_ends_soon_after_the_launcher_asked_it_to(ranks: Callable[..., Ranks]) -> None:
    """Its main thread waits in a collective for the rank that failed; the grace time would be 600 seconds."""
    started = ranks("rank_1_fails")
    time.sleep(1.0)
    started.processes[0].send_signal(signal.SIGTERM)
    assert started.processes[0].wait(timeout=15) == 128 + signal.SIGTERM
    assert "Traceback" not in started.texts()[0]


@pytest.mark.slow
def test_a_failure_that_is_known_stands_in_the_report(ranks: Callable[..., Ranks]) -> None:
    assert "\n  rank 1 has failed: no space left\n" in ranks("rank_1_fails").one_report()


@pytest.mark.slow
def test_without_the_store_every_rank_reports_itself(ranks: Callable[..., Ranks]) -> None:
    started = ranks("all_wait_but_rank_1")
    started.store = None  # the server ends with it
    started.until(lambda: len(started.reports()) == 2)
    time.sleep(2.0)
    first, second = started.reports()
    for rank, text in enumerate((first, second)):
        assert f"\n  rank {rank}: " in text and "the process group's store is gone" in text


# Without ranks


def test_a_process_alone_needs_no_store() -> None:
    written: list[str] = []
    with Watchdog(None, 0, 1, 0.2, write=written.append) as watchdog:
        watchdog.now("step 1")
        time.sleep(1.0)
    (text,) = written
    assert "'step 1'" in text and "test_watchdog.py" in text and "time.sleep(1.0)" in text and "store is gone" not in text


def test_a_hash_store_will_do_and_a_silent_end_leaves_no_thread() -> None:
    written: list[str] = []
    with Watchdog(dist.HashStore(), 0, 1, 0.2, write=written.append) as watchdog:
        time.sleep(2.5)
    assert len(written) == 1 and not watchdog._thread.is_alive()


def test_seconds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="above 0, found 0"):
        Watchdog(None, 0, 1, 0)


@pytest.mark.parametrize(
    ("places", "what"),
    [
        ({0: ("in a", True), 1: ("in a", True)}, "all wait in the same place"),
        ({0: ("at b", False)}, "it is busy"),
        ({0: ("at b", False), 1: ("at c", False)}, "no rank waits for another"),
        ({0: ("in a", True), 2: ("at c", False)}, "rank 1 does not answer"),
        ({1: ("in a", True), 3: ("in a", True)}, "ranks 0, 2 do not answer"),
        ({0: ("at b", False), 1: ("at b", False), 2: ("at b", False), 3: ("in a", True)}, "ranks 0-2 are not where the others wait"),
    ],
)
def test_the_first_line_says_what_is_wrong(places: dict[int, tuple[str, bool]], what: str) -> None:
    answers = {rank: Answer("step 1", 2.0, *place) for rank, place in places.items()}
    head = report(answers, max(answers) + 1, {}, None).splitlines()[0]
    assert head == f"watchdog: no progress for 2 s since 'step 1': {what}"
