"""The shares of a profile: on hand-made events, on a profile recorded on a GPU, and on a real one of the CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import record_function

from nemo_moe.bench.shares import WHOLE, fractions, shares


def event(name: str, start: float, end: float, parent: FunctionEvent | None = None, number: int = 0, **more: Any) -> FunctionEvent:
    made = FunctionEvent(id=number, name=name, thread=1, start_us=start, end_us=end, use_device="cuda", **more)
    if parent is not None:
        parent.append_cpu_child(made)
        made.set_cpu_parent(parent)
    return made


def launch(number: int, parent: FunctionEvent, kernel: str, start: float, end: float) -> list[FunctionEvent]:
    """An operator that launches a kernel: two events on the host, and the kernel's on the device with the launch's id."""
    operator = event(f"aten::{kernel}", parent.time_range.start, parent.time_range.start + 2, parent, number + 100)
    operator.append_kernel(kernel, 0, end - start)
    call = event("cudaLaunchKernel", parent.time_range.start + 1, parent.time_range.start + 2, operator, number)
    return [operator, call, event(kernel, start, end, number=number, device_type=DeviceType.CUDA)]


def cuda_profile() -> list[FunctionEvent]:
    """100 us of kernels: 40 in dispatch (25 of them on the wire, 10 permuting), 30 in experts, 30 in nothing of ours.

    As a recorded profile has them: annotations on the device last from a range's first kernel to its last, with the gaps,
    and bear the range's name; ids of operators and of the profiler's own events collide with those of launches.
    """
    whole = event(WHOLE, 0, 900, number=1, is_user_annotation=True)
    dispatch = event("moe/dispatch", 0, 300, whole, 2, is_user_annotation=True)
    permute = event("moe/permute", 0, 50, dispatch, 3, is_user_annotation=True)
    wire = event("moe/all_to_all", 60, 250, dispatch, 4, is_user_annotation=True)
    experts = event("moe/experts", 310, 400, whole, 5, is_user_annotation=True)
    overhead = event("Activity Buffer Request", 310, 311, experts, 101)
    overhead.append_kernel("index", 0, 10)
    return [
        whole,
        dispatch,
        permute,
        wire,
        experts,
        overhead,
        *launch(1, permute, "index", 100, 110),
        *launch(2, wire, "ncclDevKernel", 200, 225),
        *launch(3, dispatch, "cumsum", 300, 305),
        *launch(4, experts, "gemm", 400, 430),
        *launch(5, whole, "adam", 500, 530),
        event("moe/dispatch", 100, 305, number=2, device_type=DeviceType.CUDA, is_user_annotation=True),
        event("moe/all_to_all", 150, 225, number=4, device_type=DeviceType.CUDA, is_user_annotation=True),
        event(WHOLE, 100, 530, number=1, device_type=DeviceType.CUDA, is_user_annotation=True),
    ]


def test_on_cuda_a_share_is_that_of_the_kernels_launched_inside() -> None:
    found = fractions(cuda_profile(), on_cuda=True)
    expected = {"dispatch": 0.40, "combine": 0.0, "permutation": 0.10, "wire": 0.25, "experts forward": 0.30}
    assert found == pytest.approx(expected)


def recorded_profile() -> EventList:
    """The file's events, with parents as torch finds them: by threads and times."""
    events = EventList(use_device="cuda")
    for line in (Path(__file__).parent / "h200_profile.txt").read_text().splitlines():
        if not line.startswith("#"):
            number, thread, device, annotation, start, end, name = line.split(" ", 6)
            made = event(name, float(start), float(end), number=int(number), is_user_annotation=annotation == "1")
            made.thread, made.device_type = int(thread), getattr(DeviceType, device)
            events.append(made)
    events._build_tree()
    return events


def test_a_profile_recorded_on_a_gpu() -> None:
    found = fractions(recorded_profile(), on_cuda=True)
    expected = {"dispatch": 2 / 6, "combine": 0.0, "permutation": 0.0, "wire": 1 / 6, "experts forward": 1 / 6}
    assert found == pytest.approx(expected, abs=0.003)


def test_the_order_of_the_events_does_not_matter() -> None:
    """The same name stands for a range on the host and for its annotation on the device; neither replaces the other."""
    events = cuda_profile()
    assert fractions(events[::-1], on_cuda=True) == fractions(events, on_cuda=True)


def test_on_the_cpu_a_share_is_time_in_the_range() -> None:
    expected = {"dispatch": 300 / 900, "combine": 0.0, "permutation": 50 / 900, "wire": 190 / 900, "experts forward": 90 / 900}
    assert fractions([item for item in cuda_profile() if item.device_type == DeviceType.CPU], on_cuda=False) == pytest.approx(expected)


def test_a_range_inside_one_of_the_same_part_counts_once() -> None:
    whole = event(WHOLE, 0, 100)
    outer = event("moe/permute", 0, 60, whole)
    between = event("aten::something", 10, 50, outer)
    assert fractions([whole, outer, between, event("moe/permute", 20, 40, between)], on_cuda=False)["permutation"] == pytest.approx(0.6)


def test_all_kernels_of_one_launch_count() -> None:
    """A captured graph is launched by one call, whose id all its kernels bear; a kernel without a launch is in no part."""
    experts = event("moe/experts", 0, 10)
    call = event("cudaGraphLaunch", 1, 2, experts, 7)
    kernels = [
        event("gemm", start, start + 20, number=number, device_type=DeviceType.CUDA) for start, number in ((20, 7), (40, 7), (60, 8))
    ]
    assert fractions([experts, call, *kernels], on_cuda=True)["experts forward"] == pytest.approx(2 / 3)


def test_an_empty_profile_has_no_shares() -> None:
    assert fractions([], on_cuda=True) == {} and fractions(None, on_cuda=False) == {}


def test_a_real_profile_on_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    """40 ms of 50 in dispatch, 20 of them on the wire; a busy machine makes sleeps longer, not parts larger than wholes."""

    def call() -> None:
        with record_function("moe/dispatch"):
            time.sleep(0.02)
            with record_function("moe/all_to_all"):
                time.sleep(0.02)
        time.sleep(0.01)

    found = shares(call, torch.device("cpu"))
    assert found["dispatch"] == pytest.approx(0.8, abs=0.12) and found["wire"] == pytest.approx(0.4, abs=0.12)
    assert found["combine"] == 0.0 and found["permutation"] == 0.0
    assert "profiler_start" not in capfd.readouterr().err
