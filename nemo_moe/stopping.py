"""Being asked to stop: SIGTERM and SIGINT become a flag that a loop reads, and the process ends in time whatever happens.

Python runs a signal's handler in the main thread between two of its instructions, which may be never: the thread may
sit in a collective whose other ranks are gone. So the signal's number also goes through a pipe (signal.set_wakeup_fd,
written by the interpreter's C code) to a thread that runs all the same. It raises the flag at once, and where the loop
has not left the block after `grace_seconds`, it says where the main thread is and ends the process.

Limits: native code that keeps the interpreter's lock stops this thread too; whoever started the process has to kill it
then. A signal that was ignored when the block began (a shell's background job, nohup) stays ignored.

Left out on purpose: other signals, and agreement between ranks on when to stop, which takes a collective of theirs.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PEER_SECONDS = 3.0  # after a peer has failed: for the main thread to leave by itself, by the error of its collective
_STACK_LINES = 12
_installed: StopRequest | None = None


class StopRequest:
    """Turns the first SIGTERM or SIGINT into `requested`, for the time of a `with` block.

    Further signals change nothing: launchers and terminals repeat them. KeyboardInterrupt is not raised in the block.

    Outside the main thread handlers cannot be set: the block then does nothing and `requested` stays False.

    Args:
        grace_seconds: from the signal to the end of the process, should the block last that long. May be set later,
            also after the signal.
        announce: say on stderr that the signal has been seen, and until when the process will be gone. For a process
            that a user stops by hand; with many ranks the launcher says it once.
    """

    def __init__(self, grace_seconds: float = 120.0, *, announce: bool = False) -> None:
        self.grace_seconds = grace_seconds
        self.announce = announce
        self._signal: signal.Signals | None = None
        self._peer_failed_at: float | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._previous_fd = -1
        self._thread = threading.Thread(target=self._watch, name="stop-request", daemon=True)
        self._outer: StopRequest | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    @property
    def signal_name(self) -> str | None:
        """SIGTERM or SIGINT: the first that came."""
        return None if self._signal is None else self._signal.name

    def peer_failed(self) -> None:
        """Another rank has failed, so nothing that takes all ranks can end any more: once asked to stop, do not wait.

        The process then ends within seconds, in silence, since the rank that failed says why. From any thread.
        """
        if self._peer_failed_at is None:
            self._peer_failed_at = time.monotonic()

    def __enter__(self) -> StopRequest:
        global _installed
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._handlers = {signum: signal.getsignal(signum) for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN}
        for signum in self._handlers:
            signal.signal(signum, _wake)
        self._outer, _installed = _installed, self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _installed
        if self._pipe is None:
            return
        self._restore()
        _installed = self._outer
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for end in self._pipe:
            os.close(end)
        self._pipe = None

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)

    def _watch(self) -> None:
        """The thread: one byte a signal, and 0 at the end of the block."""
        assert self._pipe is not None
        reader, asked_at = self._pipe[0], 0.0
        poller = select.poll()
        poller.register(reader, select.POLLIN)
        while True:
            # The grace time may change and a peer may fail while it runs.
            ready = poller.poll(200 if self._signal is not None else None)
            numbers = os.read(reader, 1024) if ready else b""
            if 0 in numbers:
                return
            came = next((signum for signum in self._handlers if signum in numbers), None)
            if self._signal is None and came is not None:
                self._signal, asked_at = came, time.monotonic()
                if self.announce:
                    _say(f"{came.name}: stopping as soon as all is saved, within {self.grace_seconds:g} s")
            if self._signal is not None:
                self._end_if_late(self._signal, asked_at)

    def _end_if_late(self, signum: signal.Signals, asked_at: float) -> None:
        now = time.monotonic()
        if self._peer_failed_at is not None and now >= max(asked_at, self._peer_failed_at) + _PEER_SECONDS:
            os._exit(128 + signum)
        if now >= asked_at + self.grace_seconds:
            _say(
                f"{signum.name} came {now - asked_at:.0f} s ago and the process has not left by itself; it is ended, without a"
                f" checkpoint of this moment. Its main thread is here:\n{_main_thread_stack()}"
            )
            os._exit(128 + signum)


def _wake(signum: int, frame: FrameType | None) -> None:
    """The handler in Python: the byte in the pipe has said it all."""


def _say(text: str) -> None:
    """Straight to the file descriptor: the main thread may hold the lock of sys.stderr."""
    prefix = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    os.write(2, f"{prefix}{text}\n".encode(errors="replace"))


def _main_thread_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_STACK_LINES:]) if frame is not None else "(nowhere)"


def _forget_in_child() -> None:
    """A forked child shares the pipe: a signal to it must not stop its parent."""
    request = _installed
    while request is not None:
        request._restore()
        request._pipe = None
        request = request._outer


os.register_at_fork(after_in_child=_forget_in_child)
