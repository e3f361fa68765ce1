"""Checkpoints of a run on CUDA: what comes back is, to the bit, what was on the device; also of a save in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_moe.checkpoint.dcp import read_tensors
from nemo_moe.checkpoint.dcp_index import read_index, stored_tensors
from nemo_moe.checkpoint.shards import LocalShard
from nemo_moe.config import CheckpointConfig, Device, OptimizerConfig, Precision
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.finetune import finetune
from tiny_run import records, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _finetune(folder: str, checkpoint: dict[str, Any]) -> None:
    config = tiny_config(
        folder,
        max_steps=6,
        micro_batch_size=8,
        optimizer=OptimizerConfig(lr=1e-2),
        model={"attention_dropout": 0.1},
        checkpoint=CheckpointConfig(**checkpoint),
    )
    config.device, config.precision = Device.cuda, Precision.bf16
    finetune(config)


def run(folder: Path, **checkpoint: Any) -> None:
    run_distributed(_finetune, 1, str(folder), checkpoint, backend="nccl")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = read_index(folder)
    boxes = [
        LocalShard(name, torch.empty(entry.shape, dtype=entry.dtype), entry.shape, (0,) * len(entry.shape))
        for name, entry in stored_tensors(index).items()
    ]
    read_tensors(boxes, index, folder, None)
    return {box.name: box.tensor for box in boxes}


def test_a_run_on_cuda_goes_on_from_the_same_bits(tmp_path: Path) -> None:
    """Saved again right after it was restored, everything is the same, the device's random state included."""
    for name, in_background in (("plain", False), ("background", True)):
        run(tmp_path / name, every_steps=2, keep_last=9, async_save=in_background)
        saved = tmp_path / name / "checkpoints" / "step-00000004"
        run(tmp_path / f"{name}-on", every_steps=2, keep_last=9, resume=str(saved))
        first, second = records(tmp_path / name)[4], records(tmp_path / f"{name}-on")[0]
        assert first["step"] == second["step"] == 5 and first["loss"] == second["loss"] and first["lr"] == second["lr"]
    plain, background = (tensors(tmp_path / name / "checkpoints" / "step-00000002") for name in ("plain", "background"))
    assert plain.keys() == background.keys() and "random/cuda/0" in plain and any(name.endswith("exp_avg_sq") for name in plain)
    assert all(value.dtype == torch.float32 for name, value in plain.items() if not name.startswith("random/"))
