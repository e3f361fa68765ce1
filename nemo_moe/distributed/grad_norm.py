"""One global gradient norm over parameters that live on different meshes, and clipping by it.

torch's own `clip_grad_norm_` stacks the norms of all parameters and refuses where they belong to different meshes, as
dense and expert parameters do. Here each rank squares what it holds, divides by the number of ranks that hold the same
piece, and one all-reduce over the world makes the sum. Every rank gets the same number and scales by the same factor.

Left out on purpose: other norms than the 2-norm.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from nemo_moe.distributed.mesh import Meshes
from nemo_moe.moe.types import ParallelizableModel


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, meshes: Meshes, max_norm: float | None) -> Tensor:
    """The 2-norm of all gradients, each parameter counted once; gradients are scaled down where it exceeds max_norm.

    Collective over all ranks, also for a rank without any gradient (it joins with 0). Handles sharded parameters on any
    mesh and plain tensors (a plain tensor counts as replicated: over the world, or, in an `experts` module, over the
    ranks that hold the same experts). Replicas must hold equal gradients.

    Args:
        model: obeys `moe.types.ParallelizableModel`; its gradients are scaled in place.
        max_norm: None measures without scaling.

    Returns:
        [] fp32 on the mesh's device, the norm before scaling, equal on all ranks. No host synchronisation. NaN or
        infinity where a gradient holds one; scaling by it ruins the gradients, so look at it before stepping.

    Cost: one all-reduce of one number.
    """
    by_replicas: dict[int, list[Tensor]] = {}
    for parameter, in_experts in _parameters(model):
        if parameter.grad is not None and (local := _local(parameter.grad)).numel():
            replicas = meshes.sizes.world_size // _distinct_shards(parameter.grad, meshes, in_experts)
            by_replicas.setdefault(replicas, []).append(local)
    total = torch.zeros((), dtype=torch.float64, device=meshes.device)
    # torch's multi-tensor calls: a call for each of many small gradients costs more than the sums.
    for replicas, gradients in by_replicas.items():
        norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
        # fp64: squaring a large but finite norm must not overflow.
        total += norms.double().square().sum() / replicas
    dist.all_reduce(total)
    norm = total.sqrt().float()
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradients in by_replicas.values():
            torch._foreach_mul_(gradients, factor)
    return norm


def _parameters(model: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """Every parameter once, and whether it belongs to local experts."""
    moe_layers = cast(ParallelizableModel, model).moe_layers()
    of_experts = {id(parameter) for moe in moe_layers for parameter in moe.experts.parameters()}
    return [(parameter, id(parameter) in of_experts) for parameter in model.parameters()]


def _local(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    assert not any(isinstance(placement, Partial) for placement in gradient.placements), "a gradient that is still to be summed"
    return gradient.to_local()


def _distinct_shards(gradient: Tensor, meshes: Meshes, in_experts: bool) -> int:
    """Ranks that hold different pieces of this parameter; the rest of the world holds copies of them."""
    shards = meshes.sizes.ep if in_experts else 1
    if isinstance(gradient, DTensor):
        for axis, placement in enumerate(gradient.placements):
            if not placement.is_replicate():
                shards *= gradient.device_mesh.size(axis)
    return shards
