"""Two GPUs over NCCL train like one process on the CPU."""

from __future__ import annotations

import pytest
import torch

from nemo_moe.testing.parity import Setting, check_outcome, reference_outcome, run_ranks_of_several
from nemo_moe.testing.run_distributed import run_distributed

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SETTINGS = [
    Setting(device="cuda", checkpointing="full"),
    Setting(device="cuda", batch="empty_rank", checkpointing="selective", accumulation=4),
    Setting(device="cuda", mesh=(2, 1, 1), accumulation=4),
    Setting(device="cuda", mesh=(1, 2, 1), routing="hot", top_k=1),
    Setting(device="cuda", routing="two", top_k=1, batch="equal"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_fp32_on_two_gpus_trains_like_one_process(setting: Setting) -> None:
    check_outcome(setting, run_distributed(run_ranks_of_several, 2, [setting], backend="nccl")[0][0], tolerance=1e-4)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_bf16_grouped_mm_on_two_gpus_stays_near_fp32(checkpointing: str) -> None:
    """Case B05: three steps, finite and near the exact run."""
    setting = Setting(device="cuda", experts="grouped_mm", precision="bf16", learning_rate=0.1, checkpointing=checkpointing)
    outcome = run_distributed(run_ranks_of_several, 2, [setting], backend="nccl")[0][0]
    expected = reference_outcome(setting.reference())
    assert outcome.losses == pytest.approx(expected.losses, rel=2e-2)
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-1)
