"""Dispatchers on CUDA: the conformance suite over NCCL for every pair, and what must not wait for the device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from nemo_moe.config import BackendConfig, MoEConfig
from nemo_moe.moe.layer import MoE
from nemo_moe.moe.permute import reference_sum_slots, sum_slots
from nemo_moe.registry import DISPATCHERS, EXPERTS
from nemo_moe.testing.conformance import CASES, Case, check_case
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import relative_difference

BF16 = 1.5e-2
BY_NAME = {case.name: case for case in CASES}
WITHOUT_LIBRARIES = [name for name in sorted(DISPATCHERS) if not DISPATCHERS.get(name).requires]  # the others: test_deepep_cuda.py


def need(dispatcher: str, experts: str, precision: str) -> None:
    """Skip what this machine, or the pair, cannot do."""
    for registry, name in ((DISPATCHERS, dispatcher), (EXPERTS, experts)):
        if precision not in registry.get(name).precisions:
            pytest.skip(f"{name} does not compute in {precision}")
        try:
            registry.load(name).check_available()
        except ImportError as error:
            pytest.skip(str(error))


def _check(name: str, dispatcher: str, experts: str, dtype: torch.dtype, recompute: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check_case(
        BY_NAME[name],
        BackendConfig(dispatcher=dispatcher, experts=experts),
        dist.group.WORLD,
        device=torch.device("cuda", dist.get_rank()),
        dtype=dtype,
        tolerance=BF16 if dtype is torch.bfloat16 else 1e-4,
        steps=3,
        recompute=recompute,
        poison=True,
    )


@pytest.mark.gpu2
@pytest.mark.parametrize("experts", sorted(EXPERTS))
@pytest.mark.parametrize("dispatcher", WITHOUT_LIBRARIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_pair_equals_the_reference_over_nccl(case: Case, dispatcher: str, experts: str) -> None:
    """case B05 among others: three steps over poisoned memory, so rows that nobody wrote would show."""
    need(dispatcher, experts, "bf16")
    run_distributed(_check, 2, case.name, dispatcher, experts, torch.bfloat16, False, backend="nccl")


@pytest.mark.gpu2
@pytest.mark.parametrize("dispatcher", WITHOUT_LIBRARIES)
def test_fp32_and_recomputation_over_nccl(dispatcher: str) -> None:
    need(dispatcher, "loop", "fp32")
    for name in ("random", "uneven", "dropped_slots"):
        run_distributed(_check, 2, name, dispatcher, "loop", torch.float32, True, backend="nccl")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_summing_slots_on_cuda_equals_the_reference_and_reads_named_rows_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(900, 64).to(dtype)
    rows[700:] = float("nan")
    slot_rows = torch.randperm(700).repeat(2)[:1200].view(300, 4).where(torch.rand(300, 4) < 0.6, -1)
    total = sum_slots(rows.cuda(), slot_rows.cuda()).cpu()
    assert relative_difference(total, reference_sum_slots(rows, slot_rows)) <= (1e-6 if dtype is torch.float32 else 4e-3)


def _without_sync(dispatcher: str) -> None:
    """One layer, forward and backward, where anything that synchronises with the host raises."""
    device = torch.device("cuda", dist.get_rank())
    moe = MoE(
        MoEConfig(num_experts=8, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=128), BackendConfig(dispatcher=dispatcher)
    )
    moe.to(device, torch.bfloat16).shard_experts(dist.group.WORLD)
    torch.manual_seed(0)
    tokens = torch.randn(64, 256, device=device, dtype=torch.bfloat16).requires_grad_()
    for mode in ("default", "error"):  # the first pass sets libraries and communicators up
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            moe(tokens)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert tokens.grad is not None
    assert tokens.grad.isfinite().all()


@pytest.mark.gpu2
@pytest.mark.parametrize("dispatcher", [name for name in DISPATCHERS if DISPATCHERS.get(name).sync_free])
def test_a_sync_free_dispatcher_does_not_wait_for_the_device(dispatcher: str) -> None:
    """With `grouped_mm`, which takes its counts on the device."""
    run_distributed(_without_sync, 2, dispatcher, backend="nccl")


@pytest.mark.gpu
def test_an_id_out_of_range_trips_a_device_side_check_in_debug_mode() -> None:
    """In a process of its own: a device-side assertion ends the CUDA context."""
    program = (
        "import torch; from nemo_moe import BackendConfig\n"
        "from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher\n"
        "dispatcher = MoEFlexTokenDispatcher(BackendConfig(), 4, None)\n"
        "dispatcher.dispatch(torch.randn(1, 8).cuda(), torch.tensor([[0, 7]]).cuda(), torch.ones(1, 2).cuda())\n"
        "torch.cuda.synchronize()"
    )
    for switch, expected in (("0", 0), ("1", 1)):
        environment = {**os.environ, "NEMO_MOE_DEBUG": switch}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert (result.returncode != 0) == bool(expected), result.stderr
        assert ("assert" in result.stderr.lower()) == bool(expected), result.stderr
