"""How things are timed here, so that two figures can be compared.

Contenders take turns within one run, window by window, so that clocks and neighbours hit all alike. A window is a fixed
number of calls between two device synchronisations, by the host's clock, started together by a barrier; its time is that
of the slowest rank. Reported are the median, the smallest and the largest window. Figures are ratios within one run
first; absolute times belong to the machine that the report names.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Protocol:
    """How often and how long: `windows` of about `window_seconds` each, at least one call."""

    windows: int = 5
    window_seconds: float = 0.25


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over the windows of one contender."""

    median: float
    smallest: float
    largest: float

    def per(self, parts: int) -> Timing:
        """The same per part of a call."""
        return Timing(self.median / parts, self.smallest / parts, self.largest / parts)


def time_contenders(contenders: Mapping[str, Callable[[], object]], device: torch.device, protocol: Protocol) -> dict[str, Timing]:
    """Time callables against each other. Collective: every rank gives the same names in the same order.

    Args:
        contenders: name -> one call of the work; each is called three times first, to warm up and to see how many calls
            fill a window.
    """
    calls = {name: _calls_per_window(call, device, protocol.window_seconds) for name, call in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(protocol.windows):
        for name, call in contenders.items():
            samples[name].append(_window(call, calls[name], device))
    slowest = {name: _slowest_rank(times) for name, times in samples.items()}
    return {name: Timing(statistics.median(times), min(times), max(times)) for name, times in slowest.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _calls_per_window(call: Callable[[], object], device: torch.device, seconds: float) -> int:
    """How many calls fill a window; rank 0's answer, so that all ranks make the same collectives."""
    call()
    milliseconds = min(_window(call, 1, device) for _ in range(2))
    count = torch.tensor([max(1, min(1000, int(seconds * 1000 / max(milliseconds, 1e-3))))], device=device)
    dist.broadcast(count, src=0)
    return int(count.item())


def _window(call: Callable[[], object], calls: int, device: torch.device) -> float:
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) * 1000 / calls


def _slowest_rank(times: list[float]) -> list[float]:
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, times)
    return [max(window) for window in zip(*gathered, strict=True)]
