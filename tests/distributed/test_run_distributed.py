"""The pool of ranks itself: results, failures with rank and trace, deaths, hangs, and a clean start after each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_moe.testing.run_distributed import RankError, run_distributed


@dataclass
class _Point:
    x: int


def _sum_of_ranks(offset: torch.Tensor, point: _Point) -> tuple[int, torch.Tensor, int, _Point]:
    total = offset + dist.get_rank()
    dist.all_reduce(total)
    return dist.get_rank(), total, os.getpid(), _Point(point.x + 1)


def _fails_on_rank_1() -> None:
    print("a line before the failure")
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def _dies_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hangs_on_rank_0() -> None:
    while dist.get_rank() == 0:
        time.sleep(0.1)


def _one_collective_too_many() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def _pids() -> int:
    return os.getpid()


def _check_pool_works() -> list[int]:
    results = run_distributed(_sum_of_ranks, 2, torch.tensor([10.0]), _Point(1))
    assert [result[0] for result in results] == [0, 1]
    assert all(result[1].item() == 21.0 and result[3] == _Point(2) for result in results)
    return [result[2] for result in results]


def test_ranks_are_reused_and_tensors_come_back_by_value() -> None:
    assert _check_pool_works() == _check_pool_works()


def test_an_exception_names_rank_and_trace_and_the_next_call_gets_fresh_ranks() -> None:
    before = _check_pool_works()
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_distributed(_fails_on_rank_1, 2)
    assert caught.value.rank == 1
    assert "KeyError: 'the cause'" in caught.value.trace and "_fails_on_rank_1" in caught.value.trace
    assert "a line before the failure" in str(caught.value)
    after = _check_pool_works()
    assert not set(before) & set(after)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("how", "text"), [("exit", "exit code 7"), ("kill", "SIGKILL")])
def test_a_rank_that_dies_is_reported_and_replaced(how: str, text: str) -> None:
    with pytest.raises(RankError, match="failed") as caught:
        run_distributed(_dies_on_rank_1, 2, how)
    assert text in str(caught.value)
    _check_pool_works()


def test_a_rank_that_dies_between_two_calls_is_reported_and_replaced() -> None:
    pids = run_distributed(_pids, 2)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="SIGKILL"):
        run_distributed(_pids, 2)
    _check_pool_works()


def test_a_hang_ends_with_the_stacks_of_the_ranks() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0, 1 of 2 did not finish within 2 s") as caught:
        run_distributed(_hangs_on_rank_0, 2, timeout=2.0)
    assert time.monotonic() - start < 20
    assert "_hangs_on_rank_0" in str(caught.value) and "barrier" in str(caught.value)
    _check_pool_works()


def test_unmatched_collectives_are_found_in_the_test_that_issued_them() -> None:
    with pytest.raises(RankError):
        run_distributed(_one_collective_too_many, 2, timeout=3.0)
    _check_pool_works()


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_distributed(lambda: None, 2)


def test_no_rank_outlives_the_interpreter_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "from nemo_moe.testing.run_distributed import run_distributed\n"
        "def pid(): return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    print(*run_distributed(pid, 2), flush=True)\n"
        "    if sys.argv[1] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    for end in ("exit", "kill"):
        done = subprocess.run([sys.executable, str(script), end], check=False, capture_output=True, text=True, timeout=120, env=environment)
        pids = [int(word) for word in done.stdout.split()]
        assert len(pids) == 2, done.stderr
        deadline = time.monotonic() + 15
        while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True).stdout
    return not state.startswith("Z")  # ended, but its new parent has not asked how
