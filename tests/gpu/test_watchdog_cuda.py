"""The watchdog where the host runs ahead of the device: the collective is read from NCCL's flight recorder."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.watchdog import Watchdog, main_thread_place

pytestmark = pytest.mark.gpu


def _wait_for_a_busy_device() -> tuple[list[str], str]:
    reports: list[str] = []
    values = torch.ones(4, device="cuda")
    dist.all_reduce(values)  # makes the communicator
    torch.cuda.synchronize()
    with Watchdog(None, 0, 1, 1.0, write=reports.append):
        torch.cuda._sleep(8_000_000_000)  # cycles: some seconds
        dist.all_reduce(values)
        dist.all_gather_into_tensor(torch.empty(4, device="cuda"), values)
        values.sum().item()
    torch.cuda.synchronize()
    for _ in range(50):  # NCCL's own thread takes finished ones off the list
        if "waits for the device" not in (place := main_thread_place()[0]):
            break
        torch.cuda._sleep(100_000_000)
        torch.cuda.synchronize()
    return reports, place


def test_the_first_collective_that_the_device_has_not_finished_is_named() -> None:
    ((reports, afterwards),) = run_distributed(_wait_for_a_busy_device, 1, backend="nccl")
    (text,) = reports
    assert "waits for the device in nccl:all_reduce number" in text and "values.sum().item()" in text
    assert "waits for the device" not in afterwards
