"""The same run on other numbers of ranks gives the same losses, and errors on one rank end all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_moe.config import OptimizerConfig, RouterConfig, ValidationConfig
from nemo_moe.data.loader import MicroBatch
from nemo_moe.resolve import resolve
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.assemble import assemble
from nemo_moe.train.finetune import finetune
from nemo_moe.train.runtime import StartError, agreed
from nemo_moe.train.step import train_step
from tiny_run import records, tiny_config


def _finetune(folder: str, ep_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    return finetune(tiny_config(folder, ep_size=ep_size, **settings))


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": OptimizerConfig(lr=2e-3, weight_decay=0.1), "micro_batch_size": 8},
    "accumulation": {"router": RouterConfig(aux_loss_coef=0.05, z_loss_coef=0.01, bias_update_rate=0.01), "micro_batch_size": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_ranks_train_like_one(tmp_path: Path, name: str, ep_size: int) -> None:
    """Losses, norms and auxiliary losses of every step within 1e-5; 20 samples make the last step of an epoch partial."""
    settings = {**SETTINGS[name], "items": 20, "max_steps": 6, "validation": ValidationConfig(every_steps=3, exact_match=True)}
    alone = run_distributed(_finetune, 1, str(tmp_path / "1"), 1, settings)[0]
    halves = {**settings, "micro_batch_size": settings["micro_batch_size"] // 2}
    together = run_distributed(_finetune, 2, str(tmp_path / "2"), ep_size, halves)
    one, two = records(tmp_path / "1"), records(tmp_path / "2")
    assert [record["label_tokens"] for record in one] == [record["label_tokens"] for record in two]
    assert len({record["label_tokens"] for record in one}) > 1
    compared = {"loss", "grad_norm", "load_balance_loss", "router_z_loss", "moe/imbalance", "lr", "tokens"} & one[0].keys()
    for mine, theirs in zip(two, one, strict=True):
        assert {key: mine[key] for key in compared} == pytest.approx({key: theirs[key] for key in compared}, rel=1e-5)
    validation = records(tmp_path / "1", "validation")
    for mine, theirs in zip(records(tmp_path / "2", "validation"), validation, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    timeless = [{key: value for key, value in result.items() if key != "seconds"} for result in (alone, *together)]
    assert timeless[1] == timeless[2] and timeless[1] == pytest.approx(timeless[0], rel=1e-5)


def _gradients(folder: str, settings: dict[str, Any], labels: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step over 4 rows of 30 tokens; row i has labels[i] labels. Rows are dealt in order."""
    config = tiny_config(folder, optimizer=OptimizerConfig(name="sgd", lr=1.0), max_grad_norm=None, **settings)
    run = assemble(config, resolve(config, dist.get_world_size(), local_world_size=1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(3, run.model_config.vocab_size, (4, 30), generator=torch.Generator().manual_seed(5))
    wanted = torch.full_like(ids, -100)
    for row, count in enumerate(labels):
        wanted[row, 30 - count :] = ids[row, 30 - count :]
    mine = torch.arange(4).chunk(ranks)[rank].split(config.train.micro_batch_size)
    batches = [MicroBatch(ids[rows], wanted[rows], torch.ones_like(ids[rows], dtype=torch.bool)) for rows in mine]
    result = train_step(run.model, run.optimizer, batches, run.meshes, run.coefficients, None, 1)
    return result.loss, {name: parameter.grad.full_tensor() for name, parameter in run.model.named_parameters()}


def test_every_label_token_weighs_the_same(tmp_path: Path) -> None:
    """case B51: accumulation 2 with 3 and 5 labels on one rank, 13 and 11 on the other, against all 32 at once."""
    labels = [3, 5, 13, 11]
    loss, expected = run_distributed(_gradients, 1, str(tmp_path), {"micro_batch_size": 4}, labels)[0]
    for found, gradients in run_distributed(_gradients, 2, str(tmp_path), {"micro_batch_size": 1}, labels):
        assert found == pytest.approx(loss, rel=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-6, msg=name)


def _router_gradient(folder: str, coefficient: float, micro_batch_size: int) -> list[float]:
    """Of one step whose main loss is masked: 4 equal rows, so every cut into micro-batches has the same statistics."""
    settings = {"router": RouterConfig(aux_loss_coef=coefficient), "micro_batch_size": micro_batch_size}
    config = tiny_config(folder, max_grad_norm=None, **settings)
    run = assemble(config, resolve(config, dist.get_world_size(), local_world_size=1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(3, run.model_config.vocab_size, (1, 30), generator=torch.Generator().manual_seed(5)).expand(4, -1)
    mine = ids.chunk(ranks)[rank].split(micro_batch_size)
    batches = [MicroBatch(rows, torch.full_like(rows, -100), torch.ones_like(rows, dtype=torch.bool)) for rows in mine]
    train_step(run.model, run.optimizer, batches, run.meshes, run.coefficients, None, 1)
    return [value for layer in run.model.moe_layers() for value in layer.gate.weight.grad.full_tensor().flatten().tolist()]


def test_the_balance_gradient_scales_with_its_coefficient_alone(tmp_path: Path) -> None:
    """case B23: doubles with the coefficient; the same on 1 and 2 ranks, and for accumulation 1 and 4."""
    folder = str(tmp_path)
    base = run_distributed(_router_gradient, 1, folder, 0.01, 4)[0]
    scale = max(abs(value) for value in base)
    assert scale > 1e-6
    close = {"rel": 1e-4, "abs": 1e-5 * scale}
    assert run_distributed(_router_gradient, 1, folder, 0.02, 4)[0] == pytest.approx([2 * value for value in base], **close)
    assert run_distributed(_router_gradient, 1, folder, 0.01, 1)[0] == pytest.approx(base, **close)
    for micro_batch_size in (2, 1):
        for found in run_distributed(_router_gradient, 2, folder, 0.01, micro_batch_size):
            assert found == pytest.approx(base, **close)


def _start_with_data_of_its_own(folder: str) -> str:
    """Each rank generates from another seed, which no recipe does; what a set's order does to some tasks is the same."""
    config = tiny_config(folder)
    config.seed = dist.get_rank()
    try:
        assemble(config, resolve(config, dist.get_world_size(), local_world_size=1))
    except StartError as error:
        return str(error)
    return "it started"


def test_ranks_with_different_data_do_not_start(tmp_path: Path) -> None:
    messages = run_distributed(_start_with_data_of_its_own, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert messages[0].startswith("the ranks made different data") and messages[0].endswith("(rank 1 of 2 against rank 0)")
    assert "PYTHONHASHSEED=0" in messages[0]


def _fails_on_rank_1() -> str:
    def action() -> str:
        if dist.get_rank() == 1:
            raise ValueError("tensor x is missing")
        return "fine"

    try:
        agreed(action)
    except StartError as error:
        return str(error)
    return "no error"


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    assert run_distributed(_fails_on_rank_1, 2) == ["tensor x is missing (rank 1)"] * 2
