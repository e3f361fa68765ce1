"""Which part of which global tensor this rank holds, whatever cut it: FSDP2, expert parallelism, both or neither.

A parameter's local tensor is a box in the global one: a shape and where it starts. Loaders read that box; savers send
boxes to the rank that writes. Nothing here knows a model or a mesh by name.

Left out on purpose: the strided placements of tensor parallelism with FSDP; they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard


class ShardedModel(Protocol):
    """What is read of a model."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def moe_layers(self) -> Sequence[nn.Module]:
        """Modules whose `experts` hold [L, ...] parameters: `expert_offset` of `num_experts` experts and on.

        Their `gate.expert_bias` is a buffer of shape [num_experts], or None.
        """
        ...


@dataclass(frozen=True, eq=False)
class LocalShard:
    """This rank's box of one stored tensor.

    Attributes:
        name: the tensor's name in the model.
        tensor: plain, shares memory with the parameter; may be empty.
        global_shape: over all ranks.
        offsets: where `tensor` starts in it, one number a dimension.
    """

    name: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def local_shards(model: ShardedModel) -> list[LocalShard]:
    """Every parameter and persistent buffer once, in the model's order; the same list of names on all ranks.

    Under FSDP2 these are the sharded master weights, also right after a forward: gathered copies, which are in the
    precision of compute and would be thrown away, are let go of first.

    Raises ValueError for a DTensor that is neither replicated nor plainly sharded on each of its mesh axes.
    """
    for _, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    experts: dict[int, Any] = {
        id(parameter): moe.experts for moe in model.moe_layers() for parameter in cast(nn.Module, moe.experts).parameters()
    }
    shards = []
    for name, tensor in (*model.named_parameters(), *_stored_buffers(model)):
        shape, offsets, local = _local_box(name, tensor.detach())
        owner = experts.get(id(tensor))
        if owner is not None:
            shape, offsets = (owner.num_experts, *shape[1:]), (offsets[0] + owner.expert_offset, *offsets[1:])
        shards.append(LocalShard(name, local, shape, offsets))
    return shards


def _stored_buffers(model: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _local_box(name: str, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return shape, (0,) * len(shape), tensor
    offsets, sizes = [0] * len(shape), list(shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            raise ValueError(f"{name} has the placement {placement}, which checkpoints in Hugging Face's format do not support")
        # The rule of torch.chunk: equal pieces rounded up, the last ones smaller or empty.
        piece = -(-sizes[placement.dim] // tensor.device_mesh.size(axis))
        start = min(piece * coordinate[axis], sizes[placement.dim])
        offsets[placement.dim] += start
        sizes[placement.dim] = min(piece, sizes[placement.dim] - start)
    local = tensor.to_local()
    assert list(local.shape) == sizes, (name, local.shape, sizes)
    return shape, tuple(offsets), local


class GatherToRankZero:
    """Collects one tensor at a time from whichever ranks hold its pieces. Without a process group there is one rank.

    Building it and calling it are collective: all ranks, same order. Each piece is sent once, by the lowest rank that
    holds it, over the default group.
    """

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._shards = shards
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self._distributed else 0
        boxes = [(shard.offsets, tuple(shard.tensor.shape)) for shard in shards]
        gathered: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [boxes]
        if self._distributed:
            gathered = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(gathered, boxes)
        # Box -> its lowest rank, per tensor; filled from the highest rank down.
        self._owners = [{column[index]: rank for rank, column in reversed(list(enumerate(gathered)))} for index in range(len(shards))]

    def __call__(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """Tensor `index`, whole, on the CPU, in `dtype` (converted before it is sent); None on all ranks but 0."""
        shard = self._shards[index]
        full = torch.empty(shard.global_shape, dtype=dtype) if self.rank == 0 else None
        converted = shard.tensor.to(dtype) if self.rank in self._owners[index].values() else shard.tensor
        for (offsets, sizes), owner in sorted(self._owners[index].items()):
            if 0 in sizes or self.rank not in (0, owner):
                continue
            piece = converted if self.rank == owner == 0 else self._transfer(converted, sizes, dtype, owner)
            if full is not None:
                full[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] = piece
        return full

    def _transfer(self, local: Tensor, sizes: tuple[int, ...], dtype: torch.dtype, owner: int) -> Tensor:
        """From the owner, who gives its `local`, to rank 0, which gets it. As bytes: not every backend sends every dtype."""
        device = local.device if "nccl" in dist.get_backend() else torch.device("cpu")
        if self.rank == owner:
            dist.send(local.to(device).contiguous().view(-1).view(torch.uint8), dst=0)
            return local
        received = torch.empty(math.prod(sizes) * dtype.itemsize, dtype=torch.uint8, device=device)
        dist.recv(received, src=owner)
        return received.view(dtype).view(sizes)
