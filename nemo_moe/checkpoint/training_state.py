"""The tensors of a training run as named boxes: model, optimizer, random states.

    model/<parameter or buffer>            as `shards.local_shards` names and cuts them
    optimizer/<parameter>/<key>            what torch's optimizer keeps for it: cut like the parameter, or one number
    random/<cpu | cuda>/<rank>             uint8 generator states; used again where the number of ranks is the same

Restoring checks names, shapes and dtypes of all tensors against the model first, and makes the optimizer's states that
the checkpoint has. A parameter without any state (it never had a gradient) has none afterwards either, which is where
torch's optimizers begin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nemo_moe.checkpoint.dcp import read_tensors
from nemo_moe.checkpoint.dcp_index import StoredTensor, read_index, stored_tensors
from nemo_moe.checkpoint.shards import LocalShard, ShardedModel, local_shards
from nemo_moe.checks import listed


def training_boxes(model: nn.Module, optimizer: Optimizer, rank: int) -> list[LocalShard]:
    """All tensors to save, sharing memory with the run's. The random states are copies.

    Raises:
        ValueError: the optimizer keeps something that is neither like its parameter nor one number.
    """
    shards = _model_boxes(model)
    return [*shards.values(), *_optimizer_boxes(model, optimizer, shards), *_random_boxes(rank)]


class Restore:
    """Putting model, optimizer and, on the same number of ranks, the random generators where a checkpoint has them.

    Two steps, because they fail in two ways: building it looks at the folder and finds, on this rank alone, what does not
    fit; `read` is collective.

    Args:
        model: parallelized, with storage; an expert bias that only the checkpoint has is added to its gate. One that only
            the model has stays as it is in a new model, zero.
        optimizer: new, over the model's parameters.
        folder: of the checkpoint.
        rank, ranks: of this run. ranks_then: of the run that saved.

    Attributes:
        same_random: whether the random states will be those of the checkpoint.

    Raises:
        CheckpointReadError: the folder is damaged.
        ValueError: the checkpoint's tensors are not those of this model; names them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path, rank: int, ranks_then: int, ranks: int) -> None:
        self._optimizer, self._folder = optimizer, folder
        self._index = read_index(folder)
        stored = stored_tensors(self._index)
        add_expert_biases(model, stored)
        shards = {name: shard for name, shard in _model_boxes(model).items() if name in stored or not name.endswith(".expert_bias")}
        _check_model(stored, shards, folder)
        self._states = _new_optimizer_states(model, optimizer, stored, shards, folder)
        self._boxes = list(shards.values())
        self._boxes += [_state_box(name, key, value, parameter, shards[f"model/{name}"]) for name, parameter, key, value in self._states]
        random = _random_boxes(rank) if ranks_then == ranks else []
        self._random = [box for box in random if stored.get(box.name) == StoredTensor(box.global_shape, box.tensor.dtype)]
        self.same_random = bool(self._random)

    def read(self, group: dist.ProcessGroup | None) -> None:
        """Fill everything in place. Collective over `group` (gloo, all ranks; None is one process).

        Raises CheckpointReadError on all ranks where one could not read.
        """
        read_tensors([*self._boxes, *self._random], self._index, self._folder, group)
        for _, parameter, key, value in self._states:
            self._optimizer.state[parameter][key] = value
        for box in self._random:
            _set_random_state(box)


def _model_boxes(model: nn.Module) -> dict[str, LocalShard]:
    shards = local_shards(cast(ShardedModel, model))
    return {f"model/{shard.name}": dataclasses.replace(shard, name=f"model/{shard.name}") for shard in shards}


def _optimizer_boxes(model: nn.Module, optimizer: Optimizer, shards: Mapping[str, LocalShard]) -> Iterator[LocalShard]:
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if value is not None:  # momentum_buffer of an SGD without momentum
                yield _state_box(name, key, value, parameter, shards[f"model/{name}"])


def _state_box(name: str, key: str, value: Any, parameter: Tensor, shard: LocalShard) -> LocalShard:
    full = f"optimizer/{name}/{key}"
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        local = value.to_local() if isinstance(value, DTensor) else value
        return LocalShard(full, local.detach(), shard.global_shape, shard.offsets)
    if isinstance(value, Tensor) and value.dim() == 0 and not isinstance(value, DTensor):
        return LocalShard(full, value.detach(), (), ())
    raise ValueError(f"the optimizer keeps {key} of {name} in a form that checkpoints do not know: {type(value).__name__}")


def _new_optimizer_states(
    model: nn.Module, optimizer: Optimizer, stored: Mapping[str, StoredTensor], shards: Mapping[str, LocalShard], folder: Path
) -> list[tuple[str, nn.Parameter, str, Tensor]]:
    """(parameter's name, parameter, key, empty state) for every state that the checkpoint has."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in trained}
    # Where torch keeps the step count: beside the parameter for fused kernels, on the CPU else.
    on_device = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
    states, misfits = [], []
    for full, (shape, dtype) in stored.items():
        if not full.startswith("optimizer/"):
            continue
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            misfits.append(f"{full} (the parameter is not trained here)")
        elif shape == ():
            value = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
            states.append((name, parameter, key, value))
        elif shape == shards[f"model/{name}"].global_shape:
            states.append((name, parameter, key, torch.zeros_like(parameter, dtype=dtype, requires_grad=False)))
        else:
            misfits.append(f"{full} (shape {list(shape)}, the parameter's is {list(shards[f'model/{name}'].global_shape)})")
    if misfits:
        raise ValueError(f"{folder} does not fit the optimizer: {listed(misfits, separator='; ')}")
    return states


def _check_model(stored: Mapping[str, StoredTensor], shards: Mapping[str, LocalShard], folder: Path) -> None:
    there = {name for name in stored if name.startswith("model/")}
    problems = [
        *(f"missing {name}" for name in sorted(shards.keys() - there)),
        *(f"unexpected {name}" for name in sorted(there - shards.keys())),
    ]
    for name in sorted(there & shards.keys()):
        mine = StoredTensor(shards[name].global_shape, shards[name].tensor.dtype)
        if stored[name] != mine:
            problems.append(f"{name} is {_described(stored[name])} there and {_described(mine)} here")
    if problems:
        raise ValueError(f"{folder} does not fit the model: {listed(problems, separator='; ')}")


def _described(tensor: StoredTensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def add_expert_biases(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Give a gate the expert bias that it had when the checkpoint was made (it came from the folder that the run started from)."""
    names = {id(module): name for name, module in model.named_modules()}
    for moe in cast(Any, model).moe_layers():
        if moe.gate.expert_bias is None and f"model/{names[id(moe.gate)]}.expert_bias" in stored:
            moe.gate.expert_bias = torch.zeros(moe.experts.num_experts, dtype=torch.float32, device=moe.gate.weight.device)


def _random_boxes(rank: int) -> list[LocalShard]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return [LocalShard(f"random/{kind}/{rank}", state, tuple(state.shape), (0,)) for kind, state in states.items()]


def _set_random_state(box: LocalShard) -> None:
    set_state = torch.cuda.set_rng_state if box.name.startswith("random/cuda/") else torch.set_rng_state
    set_state(box.tensor)
