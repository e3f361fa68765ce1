"""What a person sees while a run trains: a live bar on a terminal, one line per logged step elsewhere.

The bar shows loss, learning rate, tokens/s, expert imbalance and the time left. A log file or a pipe gets plain lines
with the same figures, so nothing is lost when the output is not a terminal.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

_LINE_SECONDS = 10.0


class _TimeLeftColumn(ProgressColumn):
    """Time left at the mean speed so far: rich's own column follows the last seconds and jumps at each validation."""

    max_refresh = 1.0

    def render(self, task: Task) -> Text:
        before = task.fields["done_before"]
        return Text(f"{_time_left(task.completed - before, (task.total or 0) - before, task.elapsed or 0.0)} left")


class ProgressDisplay:
    """The console of rank 0.

    Args:
        progress_bar: show the live bar where stdout is a terminal.
    """

    def __init__(self, progress_bar: bool = True) -> None:
        # highlight and markup stay off: texts are data (answers, paths), not markup.
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._live = progress_bar and self._console.is_terminal
        self._progress: Progress | None = None
        self._total, self._done_before, self._started = 0, 0, time.monotonic()

    @property
    def live(self) -> bool:
        """Whether a bar is drawn; lines are printed otherwise."""
        return self._live

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text)
        sys.stdout.flush()

    def start(self, total_steps: int, done: int = 0) -> None:
        """Begin to show progress from `done` towards `total_steps`."""
        self._total, self._done_before, self._started = total_steps, done, time.monotonic()
        if self._live:
            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"), _TimeLeftColumn())
            # Two redraws a second: the thread that draws shares a core with the training on small machines.
            self._progress = Progress(*columns, console=self._console, refresh_per_second=2, expand=True)
            self._progress.add_task("training", total=total_steps, completed=done, figures="", done_before=done)
            self._progress.start()

    def update(self, step: int, figures: list[str], line: bool) -> None:
        """Show that `step` is done.

        Args:
            figures: formatted, like "loss 1.2345".
            line: whether a line is due where there is no bar.
        """
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, figures=escape(" ".join(figures)))
        elif line:
            before = self._done_before
            left = _time_left(step - before, self._total - before, time.monotonic() - self._started)
            self.note("  ".join([f"step {step}/{self._total}", *figures, f"{left} left"]))

    def stop(self) -> None:
        """Leave the bar as it stands."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _time_left(done: float, total: float, elapsed: float) -> str:
    if done <= 0:
        return "-:--:--"
    return str(timedelta(seconds=round(elapsed / done * (total - done))))


class TransferDisplay:
    """Progress of bytes that are read or written: a bar on a terminal, else a line every ten seconds; how fast at the end.

    Args:
        what: "loading FOLDER".
        active: False shows nothing; for other ranks than 0.
    """

    def __init__(self, what: str, *, active: bool = True) -> None:
        self._what, self._active = what, active
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._began = self._told = time.monotonic()
        self._total = 0

    def __enter__(self) -> TransferDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._active and kind is None and self._total:
            self._console.print(f"{self._what}: {transfer_text(self._total, time.monotonic() - self._began)}")

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes have been moved."""
        self._total = total
        if not self._active:
            return
        if self._console.is_terminal:
            if self._progress is None:
                columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
                self._progress = Progress(*columns, console=self._console, refresh_per_second=4, transient=True)
                self._progress.add_task(self._what, total=total)
                self._progress.start()
            self._progress.update(self._progress.task_ids[0], completed=done, total=total)
        elif time.monotonic() - self._told > _LINE_SECONDS:
            self._told = time.monotonic()
            self._console.print(f"{self._what}: {done / max(1, total):.0%} of {transfer_text(total)}")


def transfer_text(size: int, seconds: float | None = None) -> str:
    """Bytes moved, and how fast: "61.1 GB in 45.2 s (1.35 GB/s)"."""
    text = _size_text(size)
    return text if seconds is None else f"{text} in {seconds:.1f} s ({_size_text(size / max(1e-9, seconds))}/s)"


def _size_text(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB" if size < 999.5 else f"{size:,.0f} GB"
