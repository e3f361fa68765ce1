"""A whole training step (forward, backward, gradient norm, optimizer) of a recipe's model, pair against pair.

The model, the meshes and the step are those of `nemo-moe finetune`; only the tokens are random. All pairs start from the
same weights and see the same tokens, so the loss of their first step must agree before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from nemo_moe.bench.layer import pair_name
from nemo_moe.bench.report import table
from nemo_moe.bench.shares import shares
from nemo_moe.bench.timing import time_contenders
from nemo_moe.compose import load_recipe
from nemo_moe.config import BackendConfig, RunConfig
from nemo_moe.data.loader import MicroBatch
from nemo_moe.distributed.mesh import build_meshes
from nemo_moe.resolve import model_config, resolve
from nemo_moe.train.assemble import build_model, loss_coefficients
from nemo_moe.train.optimizer import build_optimizer
from nemo_moe.train.step import StepResult, train_step

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


def benchmark_step(
    recipe: str, overrides: Sequence[str], backends: list[BackendConfig], sequence_length: int, device: torch.device
) -> list[str]:
    """Time one optimizer step of one micro-batch per rank for each pair; collective.

    Returns:
        The lines of the report; tokens per second are those of all ranks together.

    Raises:
        ValueError, ImportError: the recipe or a pair cannot run here.
        AssertionError: a pair's first loss differs from the first pair's.
    """
    config = load_recipe(recipe, overrides)
    calls: dict[str, Callable[[], StepResult]] = {}
    losses: dict[str, float] = {}
    for backend in backends:
        name = pair_name(backend)
        calls[name] = _step_of(dataclasses.replace(config, backend=backend), sequence_length, device)
        losses[name] = calls[name]().loss
    reference = next(iter(calls))
    for name, loss in losses.items():
        difference = abs(loss - losses[reference]) / abs(losses[reference])
        assert difference <= LOSS_TOLERANCE[config.precision.value], f"{name}: first loss {loss} is not {reference}'s {losses[reference]}"
    timings = time_contenders(calls, device)
    tokens = config.train.micro_batch_size * sequence_length * dist.get_world_size()
    lines = [
        f"step of {recipe}: {config.train.micro_batch_size} sequences of {sequence_length} tokens a rank, {config.precision.value},"
        f" ep_size {config.distributed.ep_size}; x ref: {reference}",
        *table(timings, reference, {name: shares(call, device) for name, call in calls.items()}),
    ]
    return [*lines, *(f"{name}: {tokens / timing.median * 1000:,.0f} tokens/s" for name, timing in timings.items())]


def _step_of(config: RunConfig, sequence_length: int, device: torch.device) -> Callable[[], StepResult]:
    resolved = resolve(config, dist.get_world_size())
    family_config = model_config(config.model)
    meshes = build_meshes(resolved.sizes, device.type)
    model = build_model(config, family_config, meshes)
    optimizer = build_optimizer(model, config.optimizer)
    generator = torch.Generator().manual_seed(config.seed + dist.get_rank())
    input_ids = torch.randint(family_config.vocab_size, (config.train.micro_batch_size, sequence_length), generator=generator)
    batch = MicroBatch(input_ids=input_ids, labels=input_ids, token_mask=torch.ones_like(input_ids, dtype=torch.bool))
    coefficients = loss_coefficients(config, family_config)
    return functools.partial(train_step, model, optimizer, [batch], meshes, coefficients, config.train.max_grad_norm, step=0)
