"""How much memory one contender takes: the most that is in use while it is built and run, alone, over what was before.

On CUDA that is torch's allocator; memory that a communication library takes by itself is not in it. On the CPU it is the
resident memory of the process, where Linux lets a process reset its own peak: freed memory is given back to the system
first, yet what the allocator keeps of it can hide a part of what the next contender needs. Nothing is reported elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from nemo_moe.bench.timing import synchronize

T = TypeVar("T")


def peak_increase(action: Callable[[], T], device: torch.device) -> tuple[T, float | None]:
    """Run `action`; its result, and the peak over the memory in use before it, in MiB, of the rank with the largest.

    None where this machine does not tell. What an earlier action left behind and nobody holds is freed first. Collective.
    """
    free_what_nobody_holds()
    synchronize(device)
    before = _start_new_peak(device)
    result = action()
    synchronize(device)
    return result, _largest(None if before is None else _peak(device) - before)


def free_what_nobody_holds() -> None:
    gc.collect()  # modules with hooks are cycles
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _start_new_peak(device: torch.device) -> float | None:
    """Bytes in use now, from where a new peak is counted; None where there is no way to."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    try:
        Path("/proc/self/clear_refs").write_text("5")
        now, peak = status_bytes("VmRSS"), status_bytes("VmHWM")
    except OSError:
        return None
    # Some sandboxes accept the reset and do nothing.
    return now if peak - now < 2**20 else None


def _peak(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else status_bytes("VmHWM")


def status_bytes(key: str) -> float:
    """Bytes that /proc/self/status says. Raises OSError where it does not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return float(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _largest(value: float | None) -> float | None:
    gathered: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    known = [entry / 2**20 for entry in gathered if entry is not None]
    return max(known) if len(known) == len(gathered) else None
