"""What was saved on some ranks is, to the bit, what others read; and what does not fit is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.checkpoint.dcp import write_tensors
from nemo_moe.checkpoint.training_state import Restore, training_boxes
from nemo_moe.config import DistributedConfig, OptimizerConfig, RouterConfig
from nemo_moe.resolve import resolve
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.assemble import Run, assemble
from nemo_moe.train.step import train_step
from tiny_run import tiny_config

# ranks -> (dp_replicate, ep)
MESHES = {"1": (1, 1, 1), "2ep2": (2, 1, 2), "2ep1": (2, 1, 1), "4ep4": (4, 1, 4), "4ep2": (4, 1, 2), "4hsdp": (4, 2, 2)}


def _assembled(mesh: str, optimizer: OptimizerConfig | None = None, **model: Any) -> Run:
    ranks, replicas, ep = MESHES[mesh]
    config = tiny_config("unused", model=model, optimizer=optimizer or OptimizerConfig(lr=1e-2, weight_decay=0.1), micro_batch_size=1)
    config.distributed = DistributedConfig(ep_size=ep, dp_replicate_size=replicas)
    config.router = RouterConfig(bias_update_rate=0.01)
    return assemble(config, resolve(config, ranks, local_world_size=1))


def _train(run: Run, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step, micro_batches in zip(range(start + 1, start + steps + 1), run.loader, strict=False):
        losses.append(train_step(run.model, run.optimizer, micro_batches, run.meshes, run.coefficients, 1.0, step).loss)
    return losses


def _whole(run: Run) -> dict[str, Tensor]:
    """Every saved tensor of all ranks, put together by a plain gather; random states left out."""
    boxes = [box for box in training_boxes(run.model, run.optimizer, dist.get_rank()) if not box.name.startswith("random/")]
    mine = [(box.name, box.global_shape, box.offsets, box.tensor.clone()) for box in boxes]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, Tensor] = {}
    for name, shape, offsets, tensor in (box for of_rank in everyone for box in of_rank):
        full = whole.setdefault(name, torch.full(shape, float("nan")))
        full[tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))] = tensor
    return whole


def _save(folder: str, mesh: str, steps: int, more: int) -> tuple[dict[str, Tensor], list[float]]:
    run = _assembled(mesh)
    _train(run, steps)
    group = dist.new_group(backend="gloo")
    write_tensors(training_boxes(run.model, run.optimizer, dist.get_rank()), Path(folder), group)
    return _whole(run), _train(run, more, steps)


def _restore(run: Run, folder: str, ranks_then: int, group: dist.ProcessGroup) -> bool:
    restore = Restore(run.model, run.optimizer, Path(folder), dist.get_rank(), ranks_then, dist.get_world_size())
    restore.read(group)
    return restore.same_random


def _load(folder: str, mesh: str, ranks_then: int, steps: int, more: int, into: str) -> tuple[dict[str, Tensor], list[float], bool]:
    run = _assembled(mesh)
    for parameter in run.model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    same_random = _restore(run, folder, ranks_then, group)
    run.loader.step = steps
    if into:
        write_tensors(training_boxes(run.model, run.optimizer, rank), Path(into), group)
    return _whole(run), _train(run, more, steps), same_random


@pytest.mark.parametrize(
    "route",
    [
        ["2ep2", "4ep2", "1"],
        pytest.param(["2ep2", "4ep4", "2ep1"], marks=pytest.mark.slow),
        ["4hsdp", "2ep2", "4ep2"],
        pytest.param(["1", "2ep2", "4ep4"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_state_is_bit_equal_on_other_ranks_and_training_goes_on_alike(tmp_path: Path, route: list[str]) -> None:
    """cases B37, B44: weights, moments and expert biases of every expert, over two resumes, and the next 5 losses within 1e-5."""
    paths = [tmp_path / str(number) for number in range(len(route))]
    for path in paths:
        path.mkdir()
    saved, losses = run_distributed(_save, MESHES[route[0]][0], str(paths[0]), route[0], 3, 2)[0]
    assert not any(value.isnan().any() for value in saved.values())
    assert len({name for name in saved if name.endswith("exp_avg_sq")}) > 10
    all_losses = [losses]
    for place, (before, mesh) in enumerate(itertools.pairwise(route)):
        more = 2 if place == 0 else 5
        into = str(paths[1]) if place == 0 else ""
        results = run_distributed(_load, MESHES[mesh][0], str(paths[place]), mesh, MESHES[before][0], 3, more, into)
        for found, losses, same_random in results:
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved)
            assert same_random == (MESHES[before][0] == MESHES[mesh][0])
            all_losses.append(losses)
    for losses in all_losses:
        assert losses == pytest.approx(all_losses[-1][: len(losses)], rel=1e-5)


def _constants(folder: str, mesh: str, save: bool) -> list[list[float]]:
    run = _assembled(mesh)
    group = dist.new_group(backend="gloo")
    for layer in run.model.moe_layers():
        for parameter in layer.experts.parameters():
            local = parameter.to_local()
            for row in range(layer.experts.num_local_experts if save else 0):
                local[row] = layer.experts.expert_offset + row + 1 if local.shape[0] == layer.experts.num_local_experts else float("nan")
    if save:
        write_tensors(training_boxes(run.model, run.optimizer, dist.get_rank()), Path(folder), group)
    else:
        _restore(run, folder, 2, group)
    return [[float(value) for value in full.flatten(1)[:, [0, -1]].flatten()] for name, full in _whole(run).items() if ".experts." in name]


@pytest.mark.parametrize("mesh", ["1", "2ep2", "2ep1", "4ep4"])
def test_constants_come_back_in_the_order_of_the_experts(tmp_path: Path, mesh: str) -> None:
    """case B37: E=4 filled with 1, 2, 3, 4 at EP=2."""
    torch.set_grad_enabled(True)
    run_distributed(_no_grad, 2, "save", str(tmp_path), "2ep2")
    for found in run_distributed(_no_grad, MESHES[mesh][0], "load", str(tmp_path), mesh)[0]:
        assert found == [1, 1, 2, 2, 3, 3, 4, 4]


def _no_grad(what: str, folder: str, mesh: str) -> list[list[float]]:
    with torch.no_grad():
        return _constants(folder, mesh, what == "save")


def _partly_stateful(folder: str, load: bool) -> tuple[set[str], list[float]]:
    """A frozen router: it has no optimizer state."""
    run = _assembled("2ep2")
    for layer in run.model.moe_layers():
        layer.gate.weight.requires_grad_(False)
    group = dist.new_group(backend="gloo")
    if load:
        _restore(run, folder, 2, group)
        run.loader.step = 1
    else:
        _train(run, 1)
        write_tensors(training_boxes(run.model, run.optimizer, dist.get_rank()), Path(folder), group)
    return {name for name in _whole(run) if name.startswith("optimizer/")}, _train(run, 2, 1)


def test_parameters_without_optimizer_state_resume_without_it(tmp_path: Path) -> None:
    """case B45: a frozen router has no state in the checkpoint; going on works and gives the same losses."""
    saved, losses = run_distributed(_partly_stateful, 2, str(tmp_path), False)[0]
    names, resumed = run_distributed(_partly_stateful, 2, str(tmp_path), True)[0]
    assert names == saved and not any(".gate.weight/" in name for name in names) and resumed == losses


def _misfit(folder: str, model: dict[str, Any], sgd: bool) -> str:
    run = _assembled("2ep2", OptimizerConfig(name="sgd", momentum=0.9) if sgd else None, **model)
    group = dist.new_group(backend="gloo")
    try:
        _restore(run, folder, 2, group)
    except ValueError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_model_is_refused_naming_tensors(tmp_path: Path) -> None:
    run_distributed(_save, 2, str(tmp_path), "2ep2", 1, 0)
    messages = run_distributed(_misfit, 2, str(tmp_path), {"moe_intermediate_size": 32}, False)
    assert messages[0] == messages[1]
    assert "layers.0.mlp.experts.down_proj is [4, 32, 16] float32 there and [4, 32, 32] float32 here" in messages[0]
    message = run_distributed(_misfit, 2, str(tmp_path), {"num_hidden_layers": 1}, False)[0]
    assert "unexpected model/model.layers.1." in message and "and 4 more" in message
    message = run_distributed(_misfit, 2, str(tmp_path), {"num_hidden_layers": 3}, False)[0]
    assert "missing model/model.layers.2." in message
