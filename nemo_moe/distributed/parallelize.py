"""Make a model parallel: experts spread over ranks, activation checkpointing, FSDP2; one function each, in that order.

A model takes part by the protocol `moe.types.ParallelizableModel`, never by name. Afterwards its code, its module names
and its parameter names are what they were; parameters are FSDP2 DTensors, and expert parameters hold local experts.
`init_weights` then gives any mesh the same random start.

Every gradient reduction is a sum (the loss is divided once, by the label tokens of the whole step), so dense and expert
parameters follow one rule and no mesh changes the scale of a gradient.

Left out: tensor parallelism (refused) and torch.compile.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_moe.distributed.mesh import Meshes
from nemo_moe.moe.types import ParallelizableModel, route_log_contexts
from nemo_moe.registry import PRECISIONS


class TrainSection(Protocol):
    """What is read of `config.TrainConfig`."""

    @property
    def activation_checkpointing(self) -> str: ...


class ParallelizeConfig(Protocol):
    """What is read of `config.RunConfig`."""

    @property
    def precision(self) -> str: ...

    @property
    def train(self) -> TrainSection: ...


def parallelize(model: nn.Module, meshes: Meshes, config: ParallelizeConfig) -> None:
    """Spread `model` over the meshes, in place. Collective.

    Build the model under `torch.device("meta")`, call this, then `model.to_empty(device=...)`, `model.reset_buffers()`
    and `init_weights` or a checkpoint's loader: no rank ever holds the whole model. A model with real weights works too
    (each rank keeps its slice, so all ranks must have built the same ones).

    Args:
        model: obeys `moe.types.ParallelizableModel`; parameters in fp32, which stay the master weights.
        meshes: of `distributed.mesh.build_meshes`.
        config: a RunConfig; `precision` and `train.activation_checkpointing` are read.

    Raises:
        ValueError: tp above 1; ep does not divide the experts; expert matrices that cannot be sharded over efsdp ranks.
    """
    if meshes.sizes.tp > 1:
        raise ValueError(f"distributed.tp_size is {meshes.sizes.tp}, but tensor parallelism is not supported; set it to 1")
    apply_ep(model, meshes)
    apply_activation_checkpointing(model, config.train.activation_checkpointing)
    apply_fsdp(model, meshes, config.precision)


def apply_ep(model: nn.Module, meshes: Meshes) -> None:
    """Every MoE layer keeps its rank's experts and sends tokens over the EP group. With ep 1 nothing changes."""
    if meshes.ep_group is not None:
        for moe in _protocol(model).moe_layers():
            moe.shard_experts(meshes.ep_group)


def apply_activation_checkpointing(model: nn.Module, mode: str) -> None:
    """Compute each decoder layer again in backward, reusing the forward's routing decisions.

    Args:
        mode: "none"; "full" keeps a layer's input alone; "selective" also keeps the results of matmuls and attention.
    """
    if mode == "none":
        return
    contexts = {"full": route_log_contexts, "selective": _selective_contexts}[mode]
    for layer in _protocol(model).decoder_layers():
        # The forward is replaced rather than the module wrapped: names stay, and FSDP's hooks stay outside.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def apply_fsdp(model: nn.Module, meshes: Meshes, precision: str) -> None:
    """FSDP2 on all experts, all decoder layers, an untied head, and the root with all that is left.

    Args:
        precision: "fp32" or "bf16"; what parameters are gathered, and so what is computed, in. Gradients are reduced in
            fp32 in both.
    """
    # Inputs are not cast: routing weights that enter the experts must stay fp32, and activations follow from the
    # parameters anyway.
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, PRECISIONS[precision]), reduce_dtype=torch.float32, cast_forward_inputs=False)
    for moe in _protocol(model).moe_layers():
        efsdp = meshes.sizes.efsdp
        fully_shard(
            moe.experts, mesh=meshes.expert_shard_mesh, mp_policy=policy, shard_placement_fn=functools.partial(expert_shard, efsdp=efsdp)
        )
    wrap = functools.partial(fully_shard, mesh=meshes.dense_shard_mesh, mp_policy=policy)
    layers = _protocol(model).decoder_layers()
    for layer in layers:
        wrap(layer)
    for head in _heads(model, layers):
        wrap(head, reshard_after_forward=False)  # its backward follows at once
    wrap(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Without the second call the first makes gloo fail, which knows no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.register_forward_hook(_reshard_after_evaluation)


def reshard(model: nn.Module) -> None:
    """Let go of gathered copies: every parameter of the model is its fp32 shard again.

    After a forward whose backward has not run, the root and the head still show their gathered copies, in the precision
    of compute, to all who walk the parameters. No communication.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reshard_after_evaluation(model: nn.Module, _inputs: Any, _output: Any) -> None:
    # No backward will come that would do it. The next forward gathers the root and the head again, as it does all layers.
    if not torch.is_grad_enabled():
        reshard(model)


def expert_shard(parameter: nn.Parameter, efsdp: int) -> Shard:
    """The dim over which FSDP shards an expert parameter [L, ...]: the first that efsdp divides, else 0 if L >= efsdp.

    FSDP2 pads dim 0 only. With L < efsdp, sharding dim 0 would leave ranks without any of it.

    Raises:
        ValueError: no dim fits.
    """
    for dim, size in enumerate(parameter.shape):
        if size % efsdp == 0:
            return Shard(dim)
    if parameter.shape[0] >= efsdp:
        return Shard(0)
    raise ValueError(
        f"expert parameters of shape {list(parameter.shape)} (local experts first) cannot be sharded over"
        f" efsdp = fsdp * tp / ep = {efsdp} ranks: none of their sizes is a multiple of {efsdp}, and there are fewer local experts"
        " than ranks; raise distributed.ep_size, or lower fsdp_size and raise dp_replicate_size"
    )


def set_last_micro_batch(model: nn.Module, last_micro_batch: bool) -> None:
    """Call before each micro-batch of a step: what may wait for the last one does.

    Gradients are reduce-scattered after every backward, so that a rank never holds more than its shard of them (holding
    them whole until the last would need the memory of the unsharded model in fp32). The all-reduce over replicas, which
    costs no memory to put off, runs after the last backward only.
    """
    cast(FSDPModule, model).set_requires_all_reduce(last_micro_batch)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, initializer_range: float) -> None:
    """Start from random weights: bit for bit the same model on any mesh and any number of ranks.

    Matrices are normal with mean 0 and standard deviation `initializer_range`; vectors are ones (norms), biases and
    persistent buffers zeros. Every parameter has a generator of its own, seeded by (seed, name), and so has every
    expert, by (seed, name, global expert id); each rank draws what it holds a piece of and keeps its piece.

    No communication. Cost: drawing on the CPU, about 10 s for 10^9 parameters.

    Args:
        model: parallelized or not; its parameters have storage (not meta).
    """
    reshard(model)
    offsets = {
        id(parameter): cast(int, moe.experts.expert_offset)
        for moe in _protocol(model).moe_layers()
        for parameter in moe.experts.parameters()
    }
    for name, parameter in model.named_parameters():
        offset = offsets.get(id(parameter))
        draw = functools.partial(_initial_value, seed=seed, std=initializer_range)
        if offset is None:
            full = draw(name, parameter.shape)
        else:
            full = torch.stack([draw(f"{name}[{offset + local}]", parameter.shape[1:]) for local in range(parameter.shape[0])])
        full = full.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffer.zero_()


def _initial_value(name: str, shape: torch.Size, seed: int, std: float) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _protocol(model: nn.Module) -> ParallelizableModel:
    return cast(ParallelizableModel, model)


def _heads(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Linear modules outside the decoder layers, whose gradients can be reduced while the layers are in backward.

    Embeddings stay with the root: a tied output head reads them in the root's forward.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in inside]


# Results that selective checkpointing keeps: what costs most to compute for the memory it takes.
_KEPT_OPS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def _keep_policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    keep_forward, keep_recompute = create_selective_checkpoint_contexts(_keep_policy)
    routes_forward, routes_recompute = route_log_contexts()
    return _Both(routes_forward, keep_forward), _Both(routes_recompute, keep_recompute)


class _Both(AbstractContextManager[None]):
    """Two contexts as one, entered in order. A selective checkpoint's may be entered once: torch refuses a second backward."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._entered.__exit__(*exc_info)
