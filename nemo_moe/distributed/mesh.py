"""The sizes of the parallel axes, the rules they obey, and the two meshes that all ranks build from them.

The same ranks are seen twice. Dense parameters live on (dp_replicate, fsdp, tp), expert parameters on
(dp_replicate, efsdp, ep): inside each block of fsdp * tp ranks the experts are first spread over `ep` neighbouring ranks
and each rank's share is then sharded over the `efsdp = fsdp * tp / ep` ranks that hold the same experts. EP ranks are
neighbours, so that tokens travel inside a node as long as possible.

    8 ranks, fsdp 8, ep 4:   dense fsdp [0 1 2 3 4 5 6 7]    ep groups [0 1 2 3] [4 5 6 7]    efsdp groups [0 4] [1 5] [2 6] [3 7]

Ranks of one tp group share a batch; all others hold batches of their own. The rules are those of transformers.
Left out on purpose: pipeline and context axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class DistributedSizes(Protocol):
    """The fields of `config.DistributedConfig` that are read here; `fsdp_size` None takes all ranks that are left."""

    @property
    def fsdp_size(self) -> int | None: ...

    @property
    def dp_replicate_size(self) -> int: ...

    @property
    def tp_size(self) -> int: ...

    @property
    def ep_size(self) -> int: ...


@dataclass(frozen=True)
class MeshSizes:
    """Sizes that fit together (checked when built).

    Raises:
        ValueError: a size below 1, ep no multiple of tp, or ep not dividing fsdp * tp.
    """

    dp_replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "fsdp", "tp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"distributed.{name}_size must be 1 or more, found {getattr(self, name)}")
        if self.ep > 1 and self.ep % self.tp:
            raise ValueError(
                f"distributed.ep_size ({self.ep}) must be a multiple of distributed.tp_size ({self.tp});"
                " change one of the two, or set ep_size to 1"
            )
        if (self.fsdp * self.tp) % self.ep:
            raise ValueError(
                f"distributed.ep_size ({self.ep}) must divide fsdp_size * tp_size ({self.fsdp} * {self.tp} = {self.fsdp * self.tp});"
                f" legal here: {_divisors(self.fsdp * self.tp, multiple_of=self.tp)}"
            )

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts within one replica, and shard them."""
        return self.fsdp * self.tp // self.ep

    @property
    def dp_size(self) -> int:
        """Ranks with distinct batches."""
        return self.dp_replicate * self.fsdp

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.fsdp * self.tp

    @classmethod
    def from_config(cls, config: DistributedSizes, world_size: int, num_experts: int | None = None) -> MeshSizes:
        """The sizes of a run on `world_size` ranks. Needs no process group.

        Args:
            config: the recipe's `distributed` section.
            world_size: ranks there are.
            num_experts: E of the model; None for a model without experts.

        Raises:
            ValueError: the sizes do not multiply to world_size, break a rule above, or ep_size does not divide
                num_experts; the message names both numbers.
        """
        others = config.dp_replicate_size * config.tp_size
        fsdp = config.fsdp_size
        if fsdp is None:
            if world_size % others:
                raise ValueError(
                    f"distributed.dp_replicate_size * tp_size ({config.dp_replicate_size} * {config.tp_size} = {others})"
                    f" must divide the number of ranks ({world_size})"
                )
            fsdp = world_size // others
        if others * fsdp != world_size:
            raise ValueError(
                "distributed.dp_replicate_size * fsdp_size * tp_size is"
                f" {config.dp_replicate_size} * {fsdp} * {config.tp_size} = {others * fsdp}, but there are {world_size} ranks;"
                " set fsdp_size to null to take all ranks that the others leave"
            )
        if config.ep_size > 1 and num_experts is None:
            raise ValueError(f"distributed.ep_size is {config.ep_size}, but the model has no experts; set it to 1")
        if num_experts is not None and num_experts % config.ep_size:
            raise ValueError(
                f"distributed.ep_size ({config.ep_size}) must divide the number of experts ({num_experts});"
                f" legal here: {_divisors(num_experts)}"
            )
        return cls(dp_replicate=config.dp_replicate_size, fsdp=fsdp, tp=config.tp_size, ep=config.ep_size)


@dataclass(frozen=True, eq=False)
class Meshes:
    """The two meshes over all ranks, and what this rank is in them.

    Attributes:
        sizes: of the axes.
        device_type: "cpu" or "cuda".
        dense: axes (dp_replicate, fsdp, tp).
        expert: axes (dp_replicate, efsdp, ep).
        ep_group: this rank's EP group; None where ep is 1: no token leaves its rank.
        tp_group: the ranks that share this rank's batch; None where tp is 1.
        dp_group: the ranks that hold distinct batches, one of each tp group; the whole world where tp is 1.
        dp_rank: this rank's place in it, 0 <= dp_rank < sizes.dp_size: which slice of the data is its own.
    """

    sizes: MeshSizes
    device_type: str
    dense: DeviceMesh
    expert: DeviceMesh
    ep_group: dist.ProcessGroup | None
    tp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup
    dp_rank: int

    @property
    def device(self) -> torch.device:
        """This rank's device; with CUDA the current one."""
        return torch.device(self.device_type, torch.cuda.current_device()) if self.device_type == "cuda" else torch.device(self.device_type)

    @property
    def ep_rank(self) -> int:
        return self.expert.get_local_rank("ep")

    @property
    def dense_shard_mesh(self) -> DeviceMesh:
        """What FSDP shards (and, with two axes, replicates) dense parameters over."""
        return self.dense["dp_replicate", "fsdp"] if self.sizes.dp_replicate > 1 else self.dense["fsdp"]

    @property
    def expert_shard_mesh(self) -> DeviceMesh:
        """The same for expert parameters."""
        return self.expert["dp_replicate", "efsdp"] if self.sizes.dp_replicate > 1 else self.expert["efsdp"]


def build_meshes(sizes: MeshSizes, device_type: str) -> Meshes:
    """Build the process groups of all axes. Collective: every rank calls it with the same sizes.

    Args:
        sizes: must multiply to the size of the default process group, which must be initialised.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: sizes.world_size is not the number of ranks.
    """
    world_size = dist.get_world_size()
    if sizes.world_size != world_size:
        raise ValueError(f"the mesh sizes {sizes} make {sizes.world_size} ranks, but there are {world_size}")
    dense = init_device_mesh(device_type, (sizes.dp_replicate, sizes.fsdp, sizes.tp), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
    expert = init_device_mesh(device_type, (sizes.dp_replicate, sizes.efsdp, sizes.ep), mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    return Meshes(
        sizes=sizes,
        device_type=device_type,
        dense=dense,
        expert=expert,
        ep_group=expert.get_group("ep") if sizes.ep > 1 else None,
        tp_group=dense.get_group("tp") if sizes.tp > 1 else None,
        dp_group=_build_dp_group(sizes),
        dp_rank=dist.get_rank() // sizes.tp,
    )


def _build_dp_group(sizes: MeshSizes) -> dist.ProcessGroup:
    if sizes.tp == 1:
        world = dist.group.WORLD
        assert world is not None
        return world
    ranks = torch.arange(sizes.world_size).view(-1, sizes.tp)
    group, _ = dist.new_subgroups_by_enumeration([ranks[:, tp_rank].tolist() for tp_rank in range(sizes.tp)])
    assert group is not None
    return group


def _divisors(number: int, multiple_of: int = 1) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0 and (n == 1 or n % multiple_of == 0))
