"""The folder `checkpoints` of a run: which steps are there, which is the latest and which the best.

    step-00000120/   a checkpoint that all ranks have written and that was looked at: the name is given last
    .step-00000130.partial/    one that is being written, or was when the job died; never read, removed by the next save
    .step-00000120.replaced/   a whole one that another of the same step is about to replace; put back where that did not happen
    .step-00000110.removed/    one that is being removed
    latest, best     text files that hold a folder's name, replaced in one move

So what has a step's name is always whole, and at every moment the newest complete checkpoint is there. What cannot be
removed stays and is tried again; it never fails a save. Only rank 0 calls what changes something here.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from nemo_moe.checkpoint.together import sync

_logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")


class StepFolders:
    """The checkpoints of one run.

    Args:
        root: output_dir/checkpoints; made when the first checkpoint is begun.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> dict[int, Path]:
        """Step -> folder, in ascending order, of all that are complete."""
        if not self.root.is_dir():
            return {}
        found = {int(match[1]): path for path in self.root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()}
        return dict(sorted(found.items()))

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.root / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Where it is being written."""
        return self.root / f".step-{step:08d}.partial"

    def latest(self) -> Path | None:
        """The newest checkpoint, by the file `latest`; by number where that is missing, since all that have a name are whole."""
        return self._named("latest") or next(reversed(self.steps().values()), None)

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss."""
        return self._named("best")

    def recover(self) -> None:
        """Put back what a process was replacing when it died, and remove what it left half-written or half-removed."""
        for path in self.root.glob(".step-*"):
            folder = self.root / path.name.removeprefix(".").partition(".")[0]
            if path.suffix == ".replaced" and not folder.exists():
                path.rename(folder)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.recover()
        partial = self.partial(step)
        partial.mkdir()
        return partial

    def publish(self, step: int, *, is_best: bool, keep_last: int) -> Path:
        """Give what was written its name, make it the latest, and remove what is neither among the newest nor the best."""
        folder = self.folder(step)
        for path in (*self.partial(step).rglob("*"), self.partial(step)):
            sync(path)
        if folder.exists():  # the same step again, after going on from an older one
            folder.rename(folder.with_name(f".{folder.name}.replaced"))
        self.partial(step).rename(folder)
        self._point("latest", folder)
        if is_best:
            self._point("best", folder)
        self.recover()
        best = self.best()
        for path in list(self.steps().values())[:-keep_last]:
            if path not in (folder, best):
                self._remove(path)
        return folder

    def abandon(self, step: int) -> None:
        """Remove what a failed save left."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, and the pointers and the folder of all where it was the last one."""
        self._remove(self.folder(step))
        if self.steps():
            return
        for name in ("latest", "best"):
            (self.root / name).unlink(missing_ok=True)
        if self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()

    def _named(self, pointer: str) -> Path | None:
        path = self.root / pointer
        if not path.is_file():
            return None
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        # Only a step's name counts: the file may not lead anywhere else.
        return self.root / name if _STEP.fullmatch(name) and (self.root / name).is_dir() else None

    def _point(self, pointer: str, folder: Path) -> None:
        partial = self.root / f".{pointer}.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.write(folder.name + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.root / pointer)
        sync(self.root)

    def _remove(self, folder: Path) -> None:
        hidden = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            folder.rename(hidden)
        except OSError as error:
            _logger.warning("%s cannot be removed (%s)", folder, error.strerror or error)
            return
        shutil.rmtree(hidden, ignore_errors=True)
