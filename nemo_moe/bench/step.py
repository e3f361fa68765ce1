"""A whole training step (forward, backward, gradient norm, optimizer) of a recipe's model, pair against pair.

The model with its vocabulary, the meshes, the micro-batches and the step are those of `nemo-moe finetune`; the tokens are
random, without padding. The learning rate is 0: the optimizer does all its work and the weights stay what they are, so
every call computes the same, however many were made. All pairs start from the same weights and see the same tokens, so
loss and gradient norm of each must be those of all_to_all + loop before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nemo_moe.bench.layer import WrongResult
from nemo_moe.bench.memory import peak_increase
from nemo_moe.bench.pairs import ORACLE, pair_name
from nemo_moe.bench.report import Row
from nemo_moe.bench.shares import shares
from nemo_moe.bench.timing import Protocol, time_contenders
from nemo_moe.compose import load_recipe
from nemo_moe.config import BackendConfig, Device, RunConfig
from nemo_moe.data.loader import MicroBatch
from nemo_moe.distributed.mesh import Meshes, build_meshes
from nemo_moe.resolve import Resolved, model_config
from nemo_moe.train.assemble import build_model, data_and_model_config, loss_coefficients
from nemo_moe.train.optimizer import build_optimizer
from nemo_moe.train.runtime import agreed
from nemo_moe.train.step import StepResult, train_step

# Relative, of loss and gradient norm.
TOLERANCE = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, 5e-2)}


def load_step_recipe(recipe: str, overrides: Sequence[str], device: str | None) -> RunConfig:
    """The recipe to take the step from.

    Args:
        device: what the option --device says; None leaves the recipe's.

    Raises:
        ValueError: the recipe or an override cannot be used; an override names the backend, or the device a second time; the
            model has no experts.
    """
    for text in overrides:
        key = text.partition("=")[0].strip().lstrip("+~")
        if key == "backend" or key.startswith("backend."):
            raise ValueError(
                f"override {text!r}: the benchmark takes dispatchers and experts from --dispatchers and --experts, and the other keys of"
                " backend from the recipe's file"
            )
        if key == "device" and device is not None:
            raise ValueError(f"override {text!r} and --device {device}: give one of the two")
    config = load_recipe(recipe, overrides)
    model = model_config(config.model)
    if not any(model.is_moe_layer(index) for index in range(model.num_hidden_layers)):
        raise ValueError("the recipe's model has no experts, so there are no pairs to compare")
    return config if device is None else dataclasses.replace(config, device=Device(device))


def with_backend(config: RunConfig, backend: BackendConfig) -> RunConfig:
    """The recipe with another pair. Raises ValueError where its precision is none of the pair's."""
    return dataclasses.replace(config, backend=backend)


def benchmark_step(
    config: RunConfig,
    resolved: Resolved,
    backends: Mapping[str, BackendConfig],
    sequence_length: int,
    device: torch.device,
    protocol: Protocol,
) -> tuple[dict[str, Row], Any]:
    """Check and time one optimizer step of the recipe for each pair. Collective.

    Returns:
        A row per pair, and the model family's config.

    Raises:
        StartError: the recipe or a pair cannot run here; on all ranks.
        WrongResult: loss or gradient norm of a pair differ from the reference's; on all ranks.
    """
    _, family_config = agreed(lambda: data_and_model_config(config))
    meshes = build_meshes(resolved.sizes, device.type)
    build = functools.partial(_build, config, family_config, meshes, sequence_length)
    expected = build(ORACLE)()
    peaks, differences = {}, {}
    for name, backend in backends.items():
        result, peaks[name] = peak_increase(functools.partial(_second_call, build, backend), device)
        differences[name] = _compare(name, result, expected, TOLERANCE[config.precision.value], pair_name(ORACLE, resolved.sizes.ep))
    calls = {name: build(backend) for name, backend in backends.items()}
    timings = time_contenders(calls, device, protocol)
    return {
        name: Row(timings[name], differences[name], peaks[name], shares(call, device, calls=1)) for name, call in calls.items()
    }, family_config


def _build(config: RunConfig, family_config: Any, meshes: Meshes, sequence_length: int, backend: BackendConfig) -> Callable[[], StepResult]:
    """A model of its own, and a call of one step on this rank's micro-batches."""
    config = with_backend(config, backend)
    model = agreed(lambda: build_model(config, family_config, meshes))
    optimizer = build_optimizer(model, config.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    rows, generator = config.train.micro_batch_size, torch.Generator().manual_seed(config.seed + meshes.dp_rank)
    batches = []
    for _ in range(config.train.global_batch_size // (rows * meshes.sizes.dp_size)):
        input_ids = torch.randint(family_config.vocab_size, (rows, sequence_length), generator=generator)
        batches.append(MicroBatch(input_ids=input_ids, labels=input_ids, token_mask=torch.ones_like(input_ids, dtype=torch.bool)))
    coefficients = loss_coefficients(config, family_config)
    return functools.partial(train_step, model, optimizer, batches, meshes, coefficients, config.train.max_grad_norm, step=0)


def _second_call(build: Callable[[BackendConfig], Callable[[], StepResult]], backend: BackendConfig) -> StepResult:
    """The optimizer's states are there from the second call on."""
    call = build(backend)
    call()
    return call()


def _compare(name: str, found: StepResult, expected: StepResult, tolerances: tuple[float, float], reference: str) -> float:
    """The larger relative difference of loss and gradient norm; all ranks hold the same values, so all raise or none."""
    differences = []
    for what, tolerance in zip(("loss", "grad_norm"), tolerances, strict=True):
        actual, wanted = getattr(found, what), getattr(expected, what)
        differences.append(abs(actual - wanted) / abs(wanted))
        if not differences[-1] <= tolerance:
            raise WrongResult(f"{name}: {what} is {actual:.8g}, and {reference} comes to {wanted:.8g} (allowed: {tolerance:.0e} of it)")
    return max(differences)
