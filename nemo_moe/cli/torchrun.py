"""torchrun, except that a signal asks the ranks to stop and the ranks decide what comes of it.

torch's torchrun takes SIGTERM and Ctrl-C for its own death: it passes the signal to every process of every rank, and
ends with a traceback and exit code 1 also where all ranks have saved and left with 0; a second signal cuts its wait
short, and a third leaves ranks behind. Here the first signal is passed on to the ranks, and torchrun goes on to watch
them: its exit code is 0 after a stop that they call clean, further signals change nothing, and the nodes of a job wait
for each other as at any other end. Ranks that are still there after the shutdown timeout are killed.

Needs /proc to find the ranks. Without it, or with --signals-to-handle, signals are left to torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

PATIENCE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch's: seconds, where --shutdown-timeout is not given
_DEFAULT_PATIENCE = 30
_TAKEN = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun's command line.

    Returns:
        The exit code: 0; 1 where a rank failed; 128 + the signal's number where ranks were ended by it.
    """
    signals = _Signals() if Path("/proc/self/stat").is_file() else None
    if signals is not None:
        signals.take()  # before the import, which takes seconds
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, parse_args, run

    arguments = parse_args(list(sys.argv[1:] if argv is None else argv))
    if signals is not None:
        if arguments.signals_to_handle != get_args_parser().get_default("signals_to_handle"):
            signals.give_back()
        else:
            arguments.signals_to_handle = "SIGHUP,SIGQUIT"
            given = getattr(arguments, "shutdown_timeout", None)  # torch 2.11 has no such option
            signals.patience = int(os.environ.get(PATIENCE_VARIABLE, _DEFAULT_PATIENCE)) if given is None else given
    try:
        run(arguments)
    except ChildFailedError as error:
        signum = None if signals is None else signals.first
        if signum is not None and all(failure.exitcode in (-signum, 128 + signum) for failure in error.failures.values()):
            return 128 + signum
        print(error, file=sys.stderr)
        return 1
    return 0


class _Signals:
    """SIGTERM and SIGINT of this process, for the time of a run.

    Attributes:
        first: the one that came.
        patience: seconds that the ranks have from then on.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.patience = _DEFAULT_PATIENCE

    def take(self) -> None:
        for signum in _TAKEN:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as for a shell's background job
                signal.signal(signum, self._pass_on)
        signal.signal(signal.SIGALRM, self._end)

    def give_back(self) -> None:
        for signum in _TAKEN:
            if signal.getsignal(signum) == self._pass_on:
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        if self.first is not None:
            return
        self.first = signal.Signals(signum)
        ranks = _ranks()
        if not ranks:
            raise SystemExit(128 + signum)  # on its way out torch ends what it may have begun
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signum)
        signal.alarm(max(1, self.patience))
        text = f"{self.first.name}: the ranks are asked to stop, within {self.patience} s\n"
        os.write(2, text.encode())  # print() would be an error where the signal interrupts another print()

    def _end(self, signum: int, frame: FrameType | None) -> None:
        os.write(2, f"the ranks have not stopped within {self.patience} s and are ended\n".encode())
        for pid in _ranks():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with what the rank has started
        raise SystemExit(128 + (self.first or signum))


def _ranks() -> list[int]:
    """The processes that torchrun has started: its children that lead a session of their own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        pid = int(stat.parent.name)
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z" and os.getsid(pid) == pid:
                found.append(pid)
        except OSError:
            continue  # it has ended
    return found


if __name__ == "__main__":
    sys.exit(main())
