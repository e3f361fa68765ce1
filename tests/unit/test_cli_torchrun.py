"""Our torchrun under real signals: its exit code is the ranks' verdict, and no rank outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="finds the ranks in /proc")
RANK = """
import os, pathlib, signal, sys, time
from nemo_moe.stopping import StopRequest

def ready():
    pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))

"""
SAVES = """
with StopRequest() as stop:
    ready()
    while not stop.requested:
        time.sleep(0.02)
    time.sleep(2.0)  # saving
    os.write(1, f"saved {stop.signal_name}\\n".encode())  # in one piece: the ranks share the pipe
"""
DIES = "ready(); time.sleep(60)"
FAILS = "ready(); sys.exit(int(os.environ['RANK']) * 3)"
DOES_NOT_HEAR = """
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, signal.SIG_IGN)
ready(); time.sleep(60)
"""


class Launcher:
    """The command in a process group of its own, as a shell would start it, with what its ranks do."""

    def __init__(self, folder: Path, ranks: str, options: tuple[str, ...] = (), makefile: bool = False, **variables: str) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK + ranks)
        command = [sys.executable, "-m", "nemo_moe.cli.torchrun", "--standalone", "--nproc-per-node=2", *options]
        command += [str(folder / "rank.py"), str(folder)]
        if makefile:
            (folder / "Makefile").write_text(f"demo:\n\t@{' '.join(command)}\n")
            command = ["make", "-C", str(folder), "demo"]
        self.log = folder / "log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
            )

    def ranks(self) -> list[int]:
        """Their pids, once both are ready."""
        deadline = time.monotonic() + 60
        while True:
            texts = [path.read_text() for rank in "01" if (path := self.folder / rank).is_file()]
            if len(texts) == 2 and all(texts):
                return [int(text) for text in texts]
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def to_group(self, signum: int) -> None:
        """As the terminal does with Ctrl-C: to the shell's whole job. The ranks lead sessions of their own."""
        os.killpg(self.process.pid, signum)

    def ended(self) -> tuple[int, str]:
        code = self.process.wait(timeout=60)
        return code, self.log.read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(*arguments: object, **more: object) -> Launcher:
        started.append(Launcher(tmp_path, *arguments, **more))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for launcher in started:
        if launcher.process.poll() is None:
            os.killpg(launcher.process.pid, signal.SIGKILL)
        launcher.process.wait()
        for rank in "01":
            path = launcher.folder / rank
            if path.is_file() and is_alive(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_all_ranks_call_clean_is_exit_code_0_also_when_signals_repeat(launch: Callable[..., Launcher], signum: int) -> None:
    launcher = launch(SAVES)
    ranks = launcher.ranks()
    for _ in range(4):
        launcher.to_group(signum)
        time.sleep(0.3)
    code, text = launcher.ended()
    name = signal.Signals(signum).name
    assert code == 0 and text.count(f"saved {name}") == 2, text
    assert text.count(f"{name}: the ranks are asked to stop, within 30 s") == 1 and "Traceback" not in text
    assert not any(is_alive(pid) for pid in ranks)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_ctrl_c_on_make_waits_until_the_ranks_have_saved(launch: Callable[..., Launcher]) -> None:
    launcher = launch(SAVES, makefile=True)
    launcher.ranks()
    launcher.to_group(signal.SIGINT)
    _, text = launcher.ended()
    assert text.count("saved SIGINT") == 2 and "Traceback" not in text, text


def test_one_rank_that_stops_by_a_signal_of_its_own_is_no_failure(launch: Callable[..., Launcher]) -> None:
    launcher = launch(SAVES)
    for pid in launcher.ranks():
        os.kill(pid, signal.SIGTERM)
    assert launcher.ended() == (0, "saved SIGTERM\n" * 2)


def test_ranks_that_die_of_the_signal_give_its_exit_code_without_a_traceback(launch: Callable[..., Launcher]) -> None:
    launcher = launch(DIES)
    launcher.ranks()
    launcher.to_group(signal.SIGTERM)
    code, text = launcher.ended()
    assert code == 128 + signal.SIGTERM and "Traceback" not in text, text


def test_ranks_that_do_not_stop_are_ended_after_the_shutdown_timeout(launch: Callable[..., Launcher]) -> None:
    launcher = launch(DOES_NOT_HEAR, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2")
    ranks = launcher.ranks()
    begin = time.monotonic()
    launcher.to_group(signal.SIGTERM)
    code, text = launcher.ended()
    assert code == 128 + signal.SIGTERM and 1.5 < time.monotonic() - begin < 10, text
    assert "have not stopped within 2 s" in text and "Traceback" not in text
    assert not any(is_alive(pid) for pid in ranks)


def test_a_signal_before_there_are_ranks_ends_it_at_once(launch: Callable[..., Launcher]) -> None:
    launcher = launch(SAVES)
    deadline = time.monotonic() + 30
    caught = 0
    while not caught & 1 << (signal.SIGTERM - 1):  # it has taken the signal, and imports torch now
        assert time.monotonic() < deadline
        lines = Path(f"/proc/{launcher.process.pid}/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    launcher.to_group(signal.SIGTERM)
    assert launcher.ended() == (128 + signal.SIGTERM, "")


def test_a_rank_that_fails_is_exit_code_1_and_is_named_without_a_traceback(launch: Callable[..., Launcher]) -> None:
    code, text = launch(FAILS).ended()
    assert code == 1 and "exitcode  : 3" in text and "rank      : 1" in text and "Traceback (most" not in text, text


def test_who_names_the_signals_gets_torchs_own_way(launch: Callable[..., Launcher]) -> None:
    launcher = launch(SAVES, ("--signals-to-handle", "SIGTERM"))
    launcher.ranks()
    launcher.to_group(signal.SIGTERM)
    code, text = launcher.ended()
    assert code == 1 and "SignalException" in text and text.count("saved SIGTERM") == 2
