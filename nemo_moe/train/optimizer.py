"""AdamW or SGD from torch over the parameters of a parallelized model.

Parameters are grouped by two things: whether weight decay acts on them (matrices, embeddings included; not norms and
biases) and the mesh their shards live on, because torch's multi-tensor kernels refuse a list of DTensors from two
meshes, and expert shards live on another one than dense shards.

Left out on purpose: optimizers of our own, learning rates per group.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from nemo_moe.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer of a run.

    Args:
        model: already parallelized; its trainable parameters are updated in place by `step()`.
        config: name, learning rate and so on.

    Returns:
        torch's AdamW (one fused kernel a group) or SGD (torch has no fused SGD for DTensors, so foreach).

    Raises:
        ValueError: the model has no trainable parameter.
    """
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ValueError("the model has no trainable parameter: nothing to optimize")
    if config.name == "adamw":
        return AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)
    return SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters as optimizer groups: one per (decayed or not, mesh), in the model's own order.

    Shards with no elements on this rank stay in: their state exists on every rank, as a checkpoint needs.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return [{"params": params, "weight_decay": weight_decay if decayed else 0.0} for (decayed, _), params in groups.items()]
