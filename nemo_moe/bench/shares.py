"""Where a step's time goes: the share of dispatch, permutation, wire, experts and combine, by torch's profiler.

The labels are the `record_function` ranges in the dispatch managers and the experts. Permutation and the wire lie inside
dispatch and combine (forward and backward), so the shares overlap and do not add up to one. On CUDA a range's time is that of
the kernels launched inside it; on the CPU it is the time spent in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from nemo_moe.bench.timing import synchronize

LABELS = {
    "dispatch": ("moe/dispatch", "moe/dispatch_backward"),
    "combine": ("moe/combine", "moe/combine_backward"),
    "permutation": ("moe/permute",),
    "wire": ("moe/all_to_all", "moe/all_reduce"),
    "experts forward": ("moe/experts",),
}


def shares(call: Callable[[], object], device: torch.device, calls: int = 3) -> dict[str, float]:
    """Fraction of the time of `call` spent in each part of this rank's MoE layers; backward included where it has a range."""
    call()
    synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler, torch.profiler.record_function("whole"):
        for _ in range(calls):
            call()
        synchronize(device)
    on_cuda = device.type == "cuda"
    times = {event.key: (event.device_time_total if on_cuda else event.cpu_time_total) for event in profiler.key_averages()}
    if on_cuda:
        # Ranges nest, so the whole is the device's busy time: the kernels' own times added up.
        whole = sum(event.self_device_time_total for event in profiler.key_averages())
    else:
        whole = times["whole"]
    return {name: sum(times.get(label, 0.0) for label in labels) / max(whole, 1e-9) for name, labels in LABELS.items()}
