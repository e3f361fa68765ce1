"""How things are timed here, so that two figures can be compared.

Contenders take turns within one run, window by window, so that clocks and neighbours hit all alike. A window is a fixed
number of calls between two device synchronisations, started together by a barrier; its time is that of the slowest
rank. Reported are the median, the smallest and the largest window. Figures are ratios within one run first; absolute
times belong to the machine that the report names.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

WINDOWS = 5
WINDOW_SECONDS = 0.25


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over the windows of one contender, and the peak memory of its rank with most, in MiB."""

    median: float
    smallest: float
    largest: float
    peak_mib: float | None


def time_contenders(contenders: Mapping[str, Callable[[], object]], device: torch.device, *, windows: int = WINDOWS) -> dict[str, Timing]:
    """Time callables against each other. Collective: every rank gives the same names in the same order.

    Args:
        contenders: name -> one call of the work; each is called a few times first to warm up.
    """
    iterations, peaks = {}, {}
    for name, call in contenders.items():
        call()
        reset_peak_memory(device)
        iterations[name] = _iterations(call, device)
        peaks[name] = _largest(peak_memory_mib(device))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(windows):
        for name, call in contenders.items():
            samples[name].append(_window(call, iterations[name], device))
    slowest = {name: _slowest_rank(times) for name, times in samples.items()}
    return {name: Timing(statistics.median(times), min(times), max(times), peaks[name]) for name, times in slowest.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak: of the CUDA allocator, or of this process's resident memory where Linux lets us."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak since `reset_peak_memory`, in MiB; None where this machine does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return None


def _iterations(call: Callable[[], object], device: torch.device) -> int:
    """How many calls fill a window; rank 0's answer, so that all ranks make the same collectives."""
    milliseconds = min(_window(call, 1, device) for _ in range(2))
    count = torch.tensor([max(1, min(1000, int(WINDOW_SECONDS * 1000 / max(milliseconds, 1e-3))))], device=device)
    dist.broadcast(count, src=0)
    return int(count.item())


def _window(call: Callable[[], object], iterations: int, device: torch.device) -> float:
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    synchronize(device)
    return (time.perf_counter() - start) * 1000 / iterations


def _slowest_rank(times: list[float]) -> list[float]:
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, times)
    return [max(window) for window in zip(*gathered, strict=True)]


def _largest(value: float | None) -> float | None:
    gathered: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    known = [entry for entry in gathered if entry is not None]
    return max(known) if known else None
