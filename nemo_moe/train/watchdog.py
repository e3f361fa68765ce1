"""Who keeps the others waiting: a step that hangs is reported once, with what every rank is doing.

Each rank marks its progress. When a mark has grown old, that rank's thread raises a call in the store; the threads of
all ranks answer with their mark and with what their main thread is in; and the lowest rank that is alive writes one
report. A rank that does not answer is stopped, dead or in native code that keeps the interpreter's lock. The watchdog
only reports: the process group's timeout ends the job.

What a main thread is in is read from its Python frames: a function of torch.distributed and the line of ours that
called it, or our innermost line. With NCCL the host has gone ahead and waits for the device somewhere else, so the
first collective that the device has not finished is read from torch's flight recorder.

Limits: needs a store that answers, which a process other than a hung rank must keep (torchrun does). Where the store
is gone, a rank reports itself alone.

Cost: two small requests to the store per rank and poll (every two seconds for hangs reported after 40 s or more).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import linecache
import os
import re
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_COLLECTIVES = tuple(os.path.join(_TORCH, "distributed", name) for name in ("distributed_c10d.py", "_functional_collectives.py"))
_LOGGER = os.path.join(_TORCH, "distributed", "c10d_logger.py")  # wraps every collective
_WAITS = re.compile(r"\.(wait|synchronize)\(|\bwait_tensor\(")
_SLOWEST_POLL = 2.0
_STAGGER = 0.25  # seconds between the ranks that may write the report, should those below be dead
_STATES = {"T": "is stopped (by a signal, or a debugger)", "t": "is stopped by a debugger", "Z": "has ended", "D": "is in the kernel"}
_numbers = itertools.count()


class Watchdog:
    """For the time of a `with` block, report when this rank or another makes no progress.

    Args:
        store: of the process group, alike on all ranks, which build their watchdogs in the same order. A connection of
            its own is made from it. None: this process alone.
        rank, world_size: of this process.
        seconds: how old a mark may grow: more than the longest step, save or evaluation takes.
        on_peer_failure: called once, in the watchdog's thread, when another rank has called `failed`.
        write: where a report goes; stderr by default.

    Raises:
        ValueError: seconds is not above 0.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        seconds: float,
        *,
        on_peer_failure: Callable[[], object] | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"a watchdog's seconds must be above 0, found {seconds:g}")
        self.rank, self.world_size, self.seconds = rank, world_size, seconds
        self._on_peer_failure, self._write = on_peer_failure, write or _write_to_stderr
        prefix = f"nemo_moe/watchdog/{next(_numbers)}"
        self._store: dist.Store | None = None if store is None else dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._poll = min(_SLOWEST_POLL, seconds / 20)
        self._mark = _Mark("start", time.monotonic())
        self._answered: _Mark | None = None
        self._calls = 0  # that this rank has answered
        self._failure_known = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def now(self, text: str) -> None:
        """Mark progress: what begins now, such as "step 12". From any thread; costs next to nothing."""
        self._mark = _Mark(text, time.monotonic())

    def failed(self, message: str) -> None:
        """Tell the other ranks that this one cannot go on. Never raises: where the store is gone, nobody is told."""
        self._failure_known = True
        if self._store is not None:
            try:
                if self._store.add("failures", 1) == 1:
                    self._store.set("failure", f"rank {self.rank} has failed: {message}")
            except RuntimeError:
                self._store = None

    def __enter__(self) -> Watchdog:
        self.now(self._mark.text)
        if self._store is not None:  # here, not in the thread: a process may be stopped before that has run
            with contextlib.suppress(RuntimeError):
                self._store.set(f"process/{self.rank}", f"{os.getpid()} {socket.gethostname()}")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(timeout=5.0)  # no longer: it may wait for a store that has stopped

    def _run(self) -> None:
        try:
            while not self._done.wait(self._poll):
                if self._store is not None:
                    self._look(self._store)
                elif self._late():
                    self._report_alone()
        except RuntimeError:  # what torch raises when the store is gone
            self._store = None
            while not self._done.wait(self._poll):
                if self._late():
                    self._report_alone()

    def _late(self) -> bool:
        return self._mark is not self._answered and self._mark.age() > self.seconds

    def _look(self, store: dist.Store) -> None:
        """One poll: failures of others, calls of others, and a call of this rank's own."""
        if not self._failure_known and store.check(["failure"]):
            self._failure_known = True
            if self._on_peer_failure is not None:
                self._on_peer_failure()
        call = f"call/{self._calls}"
        if not store.check([call]):
            if not self._late():
                return
            store.set(call, "")
        self._calls += 1
        self._answered = self._mark
        store.set(f"{call}/{self.rank}", json.dumps(asdict(self._answer())))
        # By then every thread that runs has answered, and the lowest of their ranks is the first to come here.
        if self._done.wait(3 * self._poll + 1.0 + _STAGGER * min(self.rank, 64)) or store.add(f"{call}/written", 1) > 1:
            return
        everyone = range(self.world_size)
        answers = {rank: Answer(**json.loads(text)) for rank, text in _present(store, f"{call}/", everyone).items()}
        silent = _present(store, "process/", [rank for rank in everyone if rank not in answers])
        failure = store.get("failure").decode() if store.check(["failure"]) else None
        self._write(report(answers, self.world_size, silent, failure))

    def _answer(self) -> Answer:
        mark = self._mark
        return Answer(mark.text, mark.age(), *main_thread_place())

    def _report_alone(self) -> None:
        self._answered = self._mark
        text = report({self.rank: self._answer()}, self.rank + 1, {}, None, asked=[self.rank])
        self._write(text if self.world_size == 1 else f"{text}\n  the other ranks cannot be asked: the process group's store is gone")


@dataclass(frozen=True, eq=False)
class _Mark:
    text: str
    at: float

    def age(self) -> float:
        return time.monotonic() - self.at


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself.

    Attributes:
        mark, age: its last mark, and the seconds since.
        place: what its main thread is in, in words that follow "rank 1".
        waits: whether that is a collective, or a wait for one.
    """

    mark: str
    age: float
    place: str
    waits: bool


def report(
    answers: Mapping[int, Answer],
    world_size: int,
    silent: Mapping[int, str],
    failure: str | None,
    *,
    asked: Sequence[int] | None = None,
) -> str:
    """The text of a report: the ranks that keep the others waiting in the first line, then all ranks.

    Args:
        answers: by rank.
        silent: "pid host" of ranks that did not answer, where they have said so before.
        failure: what a rank that failed has said.
        asked: the ranks that could have answered; all by default.
    """
    missing = [rank for rank in (asked or range(world_size)) if rank not in answers]
    places: dict[tuple[bool, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        places.setdefault((answer.waits, answer.place), []).append(rank)
    elsewhere = [rank for rank, answer in sorted(answers.items()) if not answer.waits]
    waiting = len(answers) > len(elsewhere)
    oldest = max(answers.values(), key=lambda answer: answer.age)
    if missing:
        what = f"{_ranks(missing)} {'does' if len(missing) == 1 else 'do'} not answer"
    elif elsewhere and waiting:
        what = f"{_ranks(elsewhere)} {'is' if len(elsewhere) == 1 else 'are'} not where the others wait"
    elif waiting:
        what = "the ranks wait in different places" if len(places) > 1 else "all wait in the same place"
    else:
        what = "no rank waits for another" if len(answers) > 1 else "it is busy"
    lines = [f"watchdog: no progress for {oldest.age:.0f} s since {oldest.mark!r}: {what}"]
    lines += [f"  {failure}"] * (failure is not None)
    lines += [f"  {_ranks([rank])}: {_about_process(silent.get(rank))}" for rank in missing]
    for (_, place), ranks in sorted(places.items(), key=lambda item: (item[0][0], len(item[1]))):
        ages = {answers[rank].mark: answers[rank].age for rank in sorted(ranks, key=lambda rank: answers[rank].age)}
        marks = ", ".join(f"{mark!r} {age:.0f} s ago" for mark, age in ages.items())
        lines.append(f"  {_ranks(ranks)}: {place} ({marks})")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """[0, 2, 3, 4] -> "ranks 0, 2-4"."""
    runs = [[rank for _, rank in group] for _, group in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _about_process(pid_and_host: str | None) -> str:
    if pid_and_host is None:
        return "has not come so far as to start its watchdog"
    pid, host = pid_and_host.split(" ", 1)
    unknown = "is stopped, has ended, or is in native code that lets no thread of Python run"
    if host != socket.gethostname() or not Path("/proc/self/stat").is_file():
        return f"process {pid} on {host} {unknown}"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "Z"
    return f"process {pid} on {host} {_STATES.get(state, 'runs, but lets no thread of Python run')}"


def _present(store: dist.Store, prefix: str, ranks: Iterable[int]) -> dict[int, str]:
    """The values of the keys prefix + rank that are there."""
    return {rank: store.get(f"{prefix}{rank}").decode() for rank in ranks if store.check([f"{prefix}{rank}"])}


def main_thread_place() -> tuple[str, bool]:
    """What the main thread is in, in words, and whether it waits for other ranks there. From any thread."""
    frames = sys._current_frames()
    stack = _stack(frames.get(threading.main_thread().ident or 0))
    if stack and stack[0].f_code.co_name == "_engine_run_backward":
        # Backward on a device runs in threads of its own; the main thread waits for them.
        others = [_stack(frames[ident]) for ident in frames if ident not in (threading.main_thread().ident, threading.get_ident())]
        stack = next((other for other in others if any(_is_collective(frame) for frame in other)), stack)
    ours = next((frame for frame in stack if _is_ours(frame)), None)
    at = "somewhere" if ours is None else f"{_short(ours.f_code.co_filename)}:{ours.f_lineno} in {ours.f_code.co_name}"
    line = "" if ours is None else linecache.getline(ours.f_code.co_filename, ours.f_lineno).strip()
    collective, on_device = _collective(stack), _unfinished_on_device()
    if collective is not None:
        return f"in {collective}, called at {at}", True
    if on_device is not None:
        return f"waits for the device in {on_device}; the host is at {at}: {line}", True
    innermost = stack[0] if stack else None
    waits = innermost is not None and _WAITS.search(linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)) is not None
    return f"at {at}: {line}", waits


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_ours(frame: FrameType) -> bool:
    """Of this package, or of a script that uses it; not of a library."""
    file = frame.f_code.co_filename
    return file.startswith(_PACKAGE) or not (file.startswith((*_LIBRARIES, _TORCH, "<")))


def _is_collective(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _COLLECTIVES


def _collective(stack: Sequence[FrameType]) -> str | None:
    """The function of torch.distributed that the innermost frames are in: as it was called from outside."""
    name = None
    for frame in stack:
        file = frame.f_code.co_filename
        if _is_collective(frame):
            name = frame.f_code.co_name
        elif file != _LOGGER and (name is not None or not file.startswith(_TORCH)):
            break
    return name


def _unfinished_on_device() -> str | None:
    """The first NCCL collective that the device has not finished, from torch's flight recorder; None without CUDA."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_initialized():
        return None
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    if not entries:
        return None
    first = min(entries, key=lambda entry: entry["time_created_ns"])
    group = first["process_group"][1] or first["process_group"][0]
    return f"{first['profiling_name']} number {first['collective_seq_id']} of group {group}"


def _short(file: str) -> str:
    """From the package's name on; else the file's own name."""
    return os.path.join("nemo_moe", file[len(_PACKAGE) :]) if file.startswith(_PACKAGE) else os.path.basename(file)


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
