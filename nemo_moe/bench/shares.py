"""Where the time goes: the share of dispatch, permutation, wire, experts and combine, by torch's profiler.

The labels are the `record_function` ranges in the dispatch managers and the experts. Permutation and the wire lie inside
dispatch and combine (forward and backward), so the shares overlap and do not add up to one.

On the CPU a part's time is the time spent in its ranges, and the whole is the time of the calls. On CUDA a part's time is
that of the kernels launched inside its ranges, and the whole is that of all kernels: kernels of several streams that run
at once count each, gaps between kernels count for nothing, and a collective's kernel counts while it waits for its peers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from nemo_moe.bench.timing import synchronize

LABELS = {
    "dispatch": {"moe/dispatch", "moe/dispatch_backward"},
    "combine": {"moe/combine", "moe/combine_backward"},
    "permutation": {"moe/permute"},
    "wire": {"moe/all_to_all", "moe/all_reduce"},
    "experts forward": {"moe/experts"},
}
WHOLE = "bench/whole"
_RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx, cudaMemcpyAsync, cudaGraphLaunch, ...


def shares(call: Callable[[], object], device: torch.device, calls: int = 3) -> dict[str, float]:
    """Fraction of the time of `call` spent in each part of this rank's MoE layers; backward included where it has a range.

    Collective where `call` is. `call` has run before, so that nothing is set up while it is looked at.
    """
    # The profiler's library announces every start and stop on stderr; 6 is above its highest level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler, record_function(WHOLE):
        for _ in range(calls):
            call()
        synchronize(device)
    return fractions(profiler.events(), on_cuda=device.type == "cuda")


def fractions(events: Iterable[Any] | None, *, on_cuda: bool) -> dict[str, float]:
    """The shares in a finished profile; empty where it holds no time.

    A profile on CUDA shows a range as an event on the host and as an annotation on the device, which lasts from its first
    kernel to its last with all gaps; only the kernels' own events tell when the device worked. A kernel belongs to the
    ranges around the runtime call that launched it, which has the kernel's id. (The totals that torch forms on the host
    count a kernel again where another event happens to have its operator's id, such as those of the profiler itself.)

    Args:
        events: torch's FunctionEvents, with parents linked.
    """
    on_host, kernels = [], []
    for event in events or ():
        if event.device_type == DeviceType.CPU:
            on_host.append(event)
        elif not event.is_user_annotation:
            kernels.append((event.id, event.time_range.elapsed_us()))
    parts = dict.fromkeys(LABELS, 0.0)
    if on_cuda:
        whole = sum(time for _, time in kernels)
        around = {event.id: _names_around(event) for event in on_host if _RUNTIME_CALL.match(event.name)}
        for part, labels in LABELS.items():
            parts[part] = sum(time for launch, time in kernels if labels & around.get(launch, set()))
    else:
        whole = sum(event.cpu_time_total for event in on_host if event.name == WHOLE)
        for part, labels in LABELS.items():
            ranges = (event for event in on_host if event.name in labels)
            parts[part] = sum(event.cpu_time_total for event in ranges if not labels & _names_around(event))
    return {part: time / whole for part, time in parts.items()} if whole else {}


def _names_around(event: Any) -> set[str]:
    """Of the ranges and operators that were open on the host's thread when the event began."""
    names = set()
    while (event := event.cpu_parent) is not None:
        names.add(event.name)
    return names
