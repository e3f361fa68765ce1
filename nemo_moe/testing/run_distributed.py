"""Run one function on N ranks, from a pool of processes that is reused from call to call.

Idea: starting a rank costs seconds (importing torch), a test costs milliseconds. So the ranks of each (world size,
backend) are started once, wait for work on a pipe, and end with the interpreter that started them. A function that
fails, hangs or dies leaves its pool in an unknown state (half of a collective may still be under way), so that pool is
killed and the next call builds a fresh one: a failure never leaks into the next test.

Limits: POSIX, one machine. Function, arguments and results travel by pickle, tensors by value. The function is found
again by its module and name in the ranks, so it must be defined at the top level of a module.

Left out on purpose: several nodes, and an automatic fall-back to another backend.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist

_START_TIMEOUT = 180.0  # importing torch on a busy machine, times the number of ranks
_GRACE = 3.0  # how long the other ranks may still report after the first failure
_LOG_TAIL = 6000  # characters of a rank's output that a failure quotes
_pools: dict[tuple[int, str], _Pool] = {}


class RankError(RuntimeError):
    """A rank raised, died or hung.

    Attributes:
        rank: the first rank that failed; for a hang, the first that did not finish.
        trace: its traceback, or what is known of it.
    """

    def __init__(self, message: str, rank: int, trace: str) -> None:
        super().__init__(message)
        self.rank, self.trace = rank, trace


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, backend: str = "gloo") -> list[Any]:
    """Call fn(*args) on `world_size` ranks with an initialised default process group; return each rank's result.

    torch is seeded with 0 and has one thread. Groups that fn makes stay alive in the pool (destroying them would leave
    dead groups in DTensor's caches), so make them through a cache where many calls need the same ones.

    Args:
        fn: a function at the top level of a module.
        args: picklable; every rank gets its own copy.
        timeout: seconds until the ranks are taken for hung.
        backend: "gloo" (CPU), or "nccl" (rank r uses CUDA device r; CPU tensors still go over gloo).

    Raises:
        RankError: names the rank and carries its traceback and the end of its output; for a hang, the stack of every
            rank. Also when the ranks return but issued different collectives.
    """
    key = (world_size, backend)
    if key not in _pools:
        _pools[key] = _Pool(world_size, backend)
    try:
        return _pools[key].run(fn, args, timeout)
    except BaseException:  # also Ctrl-C: the ranks are in the middle of something
        _pools.pop(key).kill()
        raise


def shutdown_pools() -> None:
    """End all ranks. Runs by itself when the interpreter exits."""
    while _pools:
        _pools.popitem()[1].shutdown()


atexit.register(shutdown_pools)


@dataclass(frozen=True)
class _Task:
    """What travels to a rank. `payload` is pickled apart: the module that its classes live in must be loaded first."""

    module: str
    file: str | None
    name: str
    sys_path: list[str]
    payload: bytes


class _Rank:
    """The parent's end of one rank process. Its output goes to a file, from which failures quote the end."""

    def __init__(self, rank: int, world_size: int, backend: str, store_port: int) -> None:
        self.rank = rank
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        self._log_read = 0
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        environment.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        environment.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
        start = f"from {__name__} import _rank_main; _rank_main({theirs.fileno()}, {store_port}, {backend!r}, {os.getpid()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C goes to the parent alone, which then ends its ranks
        )
        theirs.close()

    def new_output(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), size - self._log_read, self._log_read)
        self._log_read = size
        return data.decode(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        self._log.close()


class _Pool:
    def __init__(self, world_size: int, backend: str) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be 1 or more, found {world_size}")
        # The parent keeps the store, so that it outlives any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [_Rank(rank, world_size, backend, self._store.port) for rank in range(world_size)]
        try:
            self._collect("starting the ranks", _START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
            raise ValueError(f"run_distributed needs a function at the top level of a module, found {fn.__qualname__}")
        file = getattr(sys.modules.get(fn.__module__), "__file__", None)
        task = _Task(fn.__module__, file, fn.__qualname__, list(sys.path), pickle.dumps(args))
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # it died between two calls; _collect finds out and says how
                rank.connection.send(task)
        return self._collect(f"{fn.__module__}.{fn.__qualname__}", timeout)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {rank.connection: rank for rank in self.ranks}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    ok, value = False, f"the process died ({_how_it_ended(rank.process)})"
                if ok:
                    results[rank.rank] = value
                else:
                    failures[rank.rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE)
        hung = sorted(rank.rank for rank in pending.values())
        if hung:
            self._dump_stacks(list(pending.values()))
        output = {rank.rank: rank.new_output() for rank in self.ranks}
        if failures or hung:
            raise _rank_error(what, timeout, len(self.ranks), failures, hung, output)
        for number, text in output.items():
            if text.strip():
                sys.stdout.write("".join(f"[rank {number}] {line}\n" for line in text.splitlines()))
        return [results[rank.rank] for rank in self.ranks]

    @staticmethod
    def _dump_stacks(ranks: list[_Rank]) -> None:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.end()

    def shutdown(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and any(rank.process.poll() is None for rank in self.ranks):
            time.sleep(0.02)
        self.kill()


def _rank_error(what: str, timeout: float, world_size: int, failures: dict[int, str], hung: list[int], output: dict[int, str]) -> RankError:
    """The first failure in full (later ones are mostly its echo in the other ranks), then one line for each other."""
    if failures:
        first = next(iter(failures))
        trace = failures[first]
        lines = [f"{what}: rank {first} of {world_size} failed:", trace.rstrip()]
        lines += [f"rank {rank} failed afterwards: {text.rstrip().splitlines()[-1]}" for rank, text in failures.items() if rank != first]
        lines += [f"rank {rank} was still running and was ended" for rank in hung]
        quoted = [first]
    else:
        first, trace, quoted = hung[0], "no answer", hung
        lines = [f"{what}: rank {', '.join(map(str, hung))} of {world_size} did not finish within {timeout:g} s; their stacks:"]
    for rank in quoted:
        if output[rank].strip():
            lines += [f"--- output of rank {rank} ---", output[rank][-_LOG_TAIL:].rstrip()]
    return RankError("\n".join(lines), first, trace)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return "it closed its pipe and still runs"
    return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


# ---- inside a rank ----


def _rank_main(pipe: int, store_port: int, backend: str, parent: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(pipe)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _answer(connection, lambda: _join(rank, world_size, store_port, backend))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            break
        if task is None:
            break
        _answer(connection, partial(_perform, task))
    # Not sys.exit: a clean end of gloo and CUDA threads is not worth a hang at exit.
    sys.stdout.flush()
    os._exit(0)


def _join(rank: int, world_size: int, store_port: int, backend: str) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    # Longer than any test's timeout: which rank waits for what is told by the parent's stack dump, not by gloo.
    timeout = timedelta(minutes=30)
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _perform(task: _Task) -> Any:
    for path in task.sys_path:
        if path not in sys.path:
            sys.path.append(path)
    fn: Any = _load_module(task.module, task.file)
    for part in task.name.split("."):
        fn = getattr(fn, part)
    torch.manual_seed(0)
    result = fn(*pickle.loads(task.payload))
    # A rank that issued one collective more or less than the others is found here and not in the next test.
    dist.barrier()
    return result


def _load_module(name: str, file: str | None) -> Any:
    if name in sys.modules and (name != "__main__" or getattr(sys.modules[name], "__file__", None) == file):
        return sys.modules[name]
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    # A script, or a test module that pytest loaded from its file without a place on sys.path. A script gets another
    # name, so that `if __name__ == "__main__"` does not run; pickles find it under the old one.
    assert file is not None, f"the module {name!r} can not be imported"
    spec = importlib.util.spec_from_file_location("__rank_main__" if name == "__main__" else name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _answer(connection: Connection, work: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((True, work()))
    except BaseException:  # also pytest's own outcomes, which are not Exceptions
        answer = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    connection.send_bytes(answer)


def _exit_with_parent(parent: int) -> None:
    """A rank that hangs in a collective does not outlive the process that started it, however that one ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
