"""A RunConfig that trains a tiny Qwen3-MoE for a few steps in about a second, for the tests of the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_moe.config import (
    BackendConfig,
    CheckpointConfig,
    DataConfig,
    Device,
    DistributedConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    RouterConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainConfig,
    ValidationConfig,
    WandbConfig,
    WandbMode,
)

MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "max_position_embeddings": 64,
    "router_aux_loss_coef": 0.0,
}


def tiny_config(
    folder: Path | str,
    *,
    model: dict[str, Any] | None = None,
    model_path: str | None = None,
    items: int = 40,
    max_length: int = 64,
    ep_size: int = 1,
    optimizer: OptimizerConfig | None = None,
    schedule: ScheduleConfig | None = None,
    router: RouterConfig | None = None,
    validation: ValidationConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    wandb_mode: WandbMode = WandbMode.disabled,
    task: TaskConfig | None = None,
    **train: Any,
) -> RunConfig:
    """A run in `folder`; `train` holds fields of TrainConfig."""
    return RunConfig(
        model=ModelConfig(path=model_path, config={} if model_path else {**MODEL, **(model or {})}),
        data=DataConfig(
            tasks=[task or TaskConfig(name="spell_backward", train_size=items, params={"min_word_len": 3, "max_word_len": 5})],
            held_out_per_task=6,
            max_length=max_length,
            length_group_batches=1,
        ),
        backend=BackendConfig(experts="loop"),
        distributed=DistributedConfig(ep_size=ep_size),
        router=router or RouterConfig(),
        optimizer=optimizer or OptimizerConfig(name="sgd", lr=0.5),
        schedule=schedule or ScheduleConfig(),
        train=TrainConfig(**{"max_steps": 5, "num_epochs": None, "global_batch_size": 8, "micro_batch_size": 4, **train}),
        validation=validation or ValidationConfig(),
        checkpoint=checkpoint or CheckpointConfig(),
        logging=LoggingConfig(every_steps=1, wandb=WandbConfig(mode=wandb_mode)),
        precision=Precision.fp32,
        device=Device.cpu,
        output_dir=str(folder),
    )


def records(folder: Path | str, name: str = "train") -> list[dict[str, Any]]:
    """The records of a run's JSONL file."""
    return [json.loads(line) for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]
