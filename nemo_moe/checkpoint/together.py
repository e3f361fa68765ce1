"""Writing that only rank 0 does, that is on the disk when it is done, and whose failure every rank learns of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


class SaveError(RuntimeError):
    """Something could not be written, for a reason that all ranks know; one message is enough."""


def on_rank_zero(action: Callable[[], object], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on rank 0 while the others wait. Collective over `group` (None: the default group, or one process).

    Args:
        what: what is being done, for the message: "saving FOLDER".

    Raises:
        SaveError: it raised an Exception; on all ranks, with the cause.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    error: Exception | None = None
    if not several or dist.get_rank() == 0:
        try:
            action()
        except Exception as caught:
            error = caught
    message = [None if error is None else f"{type(error).__name__}: {error}"]
    if several:
        dist.broadcast_object_list(message, src=0, group=group)
    if message[0] is not None:
        raise SaveError(f"{what} failed: {message[0]}") from error


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's entries, on the disk. A folder only where the system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync a folder, and have no need to
            raise
    finally:
        os.close(descriptor)
