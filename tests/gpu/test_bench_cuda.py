"""The benchmark's figures that come from the device itself: shares of kernel time, and peak memory. One GPU is enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from nemo_moe.bench.memory import peak_increase
from nemo_moe.bench.shares import shares

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first GPU, in a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


def test_shares_are_those_of_kernel_time(device: torch.device, capfd: pytest.CaptureFixture[str]) -> None:
    """Six equal matmuls: two in dispatch (one of them on the wire), one in experts, its backward and two more outside.

    A wait of the host inside a range, and the gap that it leaves on the device, count for nothing.
    """
    matrix = torch.randn(4096, 4096, device=device, requires_grad=True)

    def call() -> None:
        with record_function("moe/dispatch"):
            torch.mm(matrix.detach(), matrix.detach())
            torch.cuda.synchronize(device)
            with record_function("moe/all_to_all"):
                torch.mm(matrix.detach(), matrix.detach())
        with record_function("moe/experts"):
            product = torch.mm(matrix, matrix.detach())
        product.backward(matrix.detach())
        matrix.grad = None
        torch.mm(matrix.detach(), matrix.detach())
        torch.mm(matrix.detach(), matrix.detach())

    call()
    found = shares(call, device)
    expected = {"dispatch": 2 / 6, "combine": 0.0, "permutation": 0.0, "wire": 1 / 6, "experts forward": 1 / 6}
    assert found == pytest.approx(expected, abs=0.03)
    assert "profiler_start" not in capfd.readouterr().err


def test_peak_memory_is_what_a_contender_adds(device: torch.device) -> None:
    resident = torch.ones(2**24, device=device)
    _, large = peak_increase(lambda: torch.ones(2**24, device=device).sum().item(), device)
    _, small = peak_increase(lambda: resident[:8].sum().item(), device)
    assert large == pytest.approx(64, abs=1) and small is not None and small < 1
