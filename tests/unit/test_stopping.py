"""StopRequest in real processes that get real signals, in Python and in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_moe.stopping import StopRequest

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import ctypes, os, signal, sys, threading, time, warnings
from nemo_moe.stopping import StopRequest

def ready():
    print("ready", flush=True)

def stuck_in_native_code():
    mutex = ctypes.create_string_buffer(64)  # all zero: a mutex that is free
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # no signal ends this wait
"""

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a script that says when it is ready; ended after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start_script(code: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()
        return process

    yield start_script
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, and the rest of both outputs; not by communicate(), which loses what readline() has read ahead."""
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    return process.wait(timeout=30), out, err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_raises_the_flag_and_further_ones_change_nothing(start: Start, signum: signal.Signals) -> None:
    process = start("""
with StopRequest() as stop:
    assert not stop.requested and stop.signal_name is None
    ready()
    while not stop.requested:
        time.sleep(0.01)
    print(stop.signal_name, flush=True)
    time.sleep(1.0)
    print("saved", stop.signal_name, flush=True)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.set_wakeup_fd(-1) == -1 and threading.active_count() == 1
""")
    process.send_signal(signum)
    assert process.stdout is not None and process.stdout.readline() == f"{signum.name}\n"
    for again in (signum, signal.SIGINT, signal.SIGTERM):
        process.send_signal(again)
    assert ended(process) == (0, f"saved {signum.name}\n", "")


@pytest.mark.parametrize("where", ["stuck_in_native_code()", "time.sleep(60)"])
def test_a_process_that_does_not_leave_is_ended_after_the_grace_time_and_says_where_it_was(start: Start, where: str) -> None:
    process = start(f"""
def save():
    {where}

with StopRequest(1.5):
    ready()
    save()
""")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 128 + signal.SIGTERM and 1.4 < time.monotonic() - begin < 6
    assert "SIGTERM came" in err and "in save" in err
    assert ("in stuck_in_native_code" in err) == ("native" in where)


def test_the_flag_is_up_at_once_while_the_main_thread_is_in_native_code(start: Start) -> None:
    process = start("""
def tell(stop):
    while not stop.requested:
        time.sleep(0.01)
    print("flag", flush=True)

with StopRequest(60, announce=True) as stop:
    threading.Thread(target=tell, args=(stop,), daemon=True).start()
    ready()
    stuck_in_native_code()
""")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "flag\n"
    process.kill()
    assert ended(process)[2] == "SIGINT: stopping as soon as all is saved, within 60 s\n"


def test_the_grace_time_may_be_set_after_the_signal(start: Start) -> None:
    process = start("""
with StopRequest(600) as stop:
    ready()
    while not stop.requested:
        time.sleep(0.01)
    stop.grace_seconds = 0.5
    stuck_in_native_code()
""")
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 128 + signal.SIGINT


@pytest.mark.parametrize("order", ["signal first", "failure first"])
def test_after_a_peer_has_failed_a_process_that_was_asked_to_stop_ends_within_seconds_in_silence(start: Start, order: str) -> None:
    process = start(f"""
with StopRequest(600) as stop:
    if {order == "failure first"}:
        stop.peer_failed()
    else:
        threading.Thread(target=lambda: (time.sleep(1.0), stop.peer_failed()), daemon=True).start()
    ready()
    stuck_in_native_code()
""")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (128 + signal.SIGTERM, "", "")
    assert 2.5 < time.monotonic() - begin < 10


def test_a_failed_peer_alone_ends_nothing(start: Start) -> None:
    process = start("""
with StopRequest(600) as stop:
    stop.peer_failed()
    ready()
    time.sleep(4.0)
print("went on")
""")
    assert ended(process) == (0, "went on\n", "")


def test_a_signal_that_was_ignored_stays_ignored(start: Start) -> None:
    process = start("""
signal.signal(signal.SIGINT, signal.SIG_IGN)
with StopRequest() as stop:
    ready()
    while not stop.requested:
        time.sleep(0.01)
    print(stop.signal_name)
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
""")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, "SIGTERM\n", "")


def test_a_signal_to_a_forked_child_ends_the_child_and_not_its_parent(start: Start) -> None:
    process = start("""
with StopRequest() as stop:
    warnings.simplefilter("ignore")  # of Python 3.12, about threads and fork
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    results = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop.requested
    ready()
    print("child", *results)
""")
    assert ended(process) == (0, f"child {-signal.SIGTERM} False\n", "")


def test_outside_the_main_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def use() -> None:
        with StopRequest() as stop:
            seen.extend([stop.requested, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [False, before]
