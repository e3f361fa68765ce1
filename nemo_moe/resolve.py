"""What will run here: the sizes, devices and backends that a config comes to on so many ranks, or why it cannot run.

One answer for the parent of a launch (before any rank exists), for every rank (before any process group exists) and for
a dry run. Nothing is replaced: what was asked for runs or is refused, and the one thing that does not run as written
(a dispatcher with `ep_size: 1`, where no token leaves its rank) is in the lines that rank 0 prints.

A dispatcher that tokens will travel by, and the experts, are asked for what they need of this machine (`check_available`),
too; so their files and libraries are imported here, and on every rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_moe.config import Device, ModelConfig, RouterConfig, RunConfig
from nemo_moe.distributed.mesh import MeshSizes
from nemo_moe.hf_folder import read_hf_config
from nemo_moe.registry import DISPATCHERS, EXPERTS, MODELS, PRECISIONS


@dataclass(frozen=True)
class Resolved:
    """What a config comes to.

    Attributes:
        sizes: of the mesh axes.
        device: "cpu" or "cuda".
        dist_backend: "gloo" or "nccl".
        lines: one per decision, with its reason, for the start of the log.
    """

    sizes: MeshSizes
    device: str
    dist_backend: str
    lines: list[str]


def resolve(config: RunConfig, world_size: int, *, device_count: int | None = None, local_world_size: int | None = None) -> Resolved:
    """What `config` comes to on `world_size` ranks.

    Args:
        config: a recipe.
        world_size: ranks over all nodes.
        device_count: CUDA devices of this node; None asks torch.
        local_world_size: ranks of this node; None is all of them.

    Raises:
        ValueError: the sizes do not fit together, or to the number of ranks, the model or this machine; or the dispatcher
            needs what this machine has not.
        ImportError: a backend's library is missing (names the extra to install), or its file cannot be loaded.
    """
    if device_count is None:
        device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = world_size if local_world_size is None else local_world_size
    device, device_line = choose_device(config.device, device_count, local)
    model = model_config(config.model)
    MODELS.load(config.model.family)
    sizes, mesh_line = _sizes(config, world_size, model)
    backends = ["dispatcher, experts: not used, the model has no experts"]
    if not _has_experts(model):
        _refuse_router_keys(config.router)
    else:
        backends = [_dispatcher_line(config, sizes, model, device), _experts_line(config, model, device)]
    return Resolved(
        sizes=sizes,
        device=device,
        dist_backend="nccl" if device == "cuda" else "gloo",
        lines=[
            device_line,
            f"precision: {config.precision.value} compute, fp32 master weights, gradients and optimizer (as configured)",
            mesh_line,
            *backends,
            _batch_line(config, sizes),
        ],
    )


def model_config(model: ModelConfig) -> Any:
    """The family's config of the model that a recipe names: the folder's config.json with the recipe's changes.

    Raises ValueError where the folder has no readable config.json or holds a model of another family, or where the family
    refuses a key or value.
    """
    family = MODELS.load_part(model.family, "config")
    folder: dict[str, Any] = {}
    if model.folder is not None:
        try:
            folder = read_hf_config(model.folder)
        except ValueError as error:
            raise ValueError(f"model.path: {error}") from error
        _refuse_other_family(model.family, model.folder, folder.get("model_type"))
    return family.from_hf(folder, model.config)


def _refuse_other_family(name: str, folder: Path, model_type: Any) -> None:
    """Raise ValueError where a folder's `model_type` is not the family's; names the family to write, if there is one."""
    if model_type in (None, MODELS.get(name).model_type):
        return
    fitting = [other for other in MODELS if MODELS.get(other).model_type == model_type]
    known = ", ".join(sorted(MODELS.get(other).model_type for other in MODELS))
    fix = f"set model.family to {fitting[0]}" if fitting else f"no family here reads that one (those that are read: {known})"
    raise ValueError(f"model.family is {name!r}, but the config.json of {folder} says model_type {model_type!r}; {fix}")


def choose_device(asked: Device, device_count: int, local_world_size: int) -> tuple[str, str]:
    """The device ("cpu" or "cuda"), and the line about it. Raises ValueError where the ranks of this node cannot have it."""
    if asked is Device.cuda and device_count == 0:
        raise ValueError("device is cuda, but torch sees no CUDA device here; set device to cpu (or auto)")
    device = "cuda" if device_count and asked is not Device.cpu else "cpu"
    if device == "cuda" and local_world_size > device_count:
        raise ValueError(
            f"{local_world_size} ranks on this node, but {device_count} CUDA device{'s' * (device_count > 1)}, and each rank needs its own;"
            f" start {device_count} (--nproc-per-node {device_count}) or set device to cpu"
        )
    found = f"{device_count} CUDA device{'s' * (device_count != 1)} here" if device_count else "no CUDA device here"
    reason = f"auto: {found}" if asked is Device.auto else "as configured"
    return device, f"device: {device} ({reason}), process group: {'nccl' if device == 'cuda' else 'gloo'} (follows from the device)"


def _has_experts(model: Any) -> bool:
    return any(model.is_moe_layer(index) for index in range(model.num_hidden_layers))


def _refuse_router_keys(router: RouterConfig) -> None:
    for key in ("aux_loss_coef", "z_loss_coef", "bias_update_rate", "fake_balanced"):
        value = getattr(router, key)
        if value:
            raise ValueError(
                f"router.{key} is {value}, but the model has no experts and so no router; leave it out, or give the model experts"
                " (num_experts, decoder_sparse_step and mlp_only_layers of model.config say which layers have them)"
            )


def _sizes(config: RunConfig, world_size: int, model: Any) -> tuple[MeshSizes, str]:
    asked = config.distributed
    if asked.tp_size > 1:
        raise ValueError(f"distributed.tp_size is {asked.tp_size}, but models are not split over tensor-parallel ranks yet; set it to 1")
    name = config.backend.dispatcher
    if asked.ep_size > 1 and DISPATCHERS.get(name).needs_shared_batch:
        raise ValueError(
            f"backend.dispatcher {name!r} needs expert-parallel ranks that share one batch, and the ranks of a run have a batch each"
            f" (tensor-parallel ranks would share one; there are none yet); choose {_other_dispatchers()}. {name!r} is for MoE layers"
            " that are built by hand (nemo_moe.MoE) on ranks that hold the same tokens"
        )
    needed = max(asked.ep_size, asked.dp_replicate_size * asked.tp_size * (asked.fsdp_size or 1))
    if world_size < needed:
        keys = ("ep_size", "dp_replicate_size", "fsdp_size")
        above_1 = [f"distributed.{key} (now {getattr(asked, key)})" for key in keys if (getattr(asked, key) or 1) > 1]
        raise ValueError(
            f"the distributed sizes need {needed} ranks or more, but there {'is' if world_size == 1 else 'are'} {world_size};"
            f" start more (--nproc-per-node {needed}) or lower {', '.join(above_1)}"
        )
    experts = model.num_experts if _has_experts(model) else None
    sizes = MeshSizes.from_config(asked, world_size, experts)
    line = f"ranks: {world_size} = dp_replicate {sizes.dp_replicate} x fsdp {sizes.fsdp} x tp {sizes.tp}"
    if experts is not None:
        line += f"; {experts} experts over ep {sizes.ep}, {experts // sizes.ep} a rank, each sharded over efsdp {sizes.efsdp}"
    return sizes, line


def _other_dispatchers() -> str:
    return " or ".join(repr(name) for name in DISPATCHERS if not DISPATCHERS.get(name).needs_shared_batch)


def _dispatcher_line(config: RunConfig, sizes: MeshSizes, model: Any, device: str) -> str:
    name = config.backend.dispatcher
    spec = DISPATCHERS.get(name)
    if sizes.ep == 1:
        return f"dispatcher: local permutation (ep_size is 1, so no token leaves its rank; {name} as configured is not used)"
    if model.hidden_size % spec.hidden_size_multiple_of:
        raise ValueError(
            f"backend.dispatcher {name!r} needs a hidden_size that is a multiple of {spec.hidden_size_multiple_of},"
            f" and the model's is {model.hidden_size}"
        )
    if device not in spec.devices:
        raise ValueError(
            f"backend.dispatcher {name!r} runs on {', '.join(spec.devices)} only, and this run's device is {device}; choose 'all_to_all'"
        )
    manager = DISPATCHERS.load(name)
    manager.check_available()  # after what its data already tells: this imports its library
    manager.check_sizes(model.hidden_size, model.num_experts, model.num_experts_per_tok, sizes.ep)
    manager.check_num_sms(config.backend.dispatcher_num_sms)
    return f"dispatcher: {name} (as configured): {spec.summary}"


def _experts_line(config: RunConfig, model: Any, device: str) -> str:
    name = config.backend.experts
    spec = EXPERTS.get(name)
    if device not in spec.devices:
        raise ValueError(
            f"backend.experts {name!r} runs on {', '.join(spec.devices)} only, and this run's device is {device};"
            " choose 'grouped_mm' or 'loop'"
        )
    EXPERTS.load(name).check_available(config.backend.experts_fp8)
    element_bytes: int = getattr(torch, PRECISIONS[config.precision.value]).itemsize
    for key in ("hidden_size", "moe_intermediate_size"):
        size = getattr(model, key)
        if size * element_bytes % spec.row_bytes_multiple_of:
            step = spec.row_bytes_multiple_of // element_bytes
            raise ValueError(
                f"backend.experts {name!r} in {config.precision.value} needs {key} to be a multiple of {step}, and the model's is {size};"
                " choose 'loop' for sizes of any kind"
            )
    fp8 = config.backend.experts_fp8
    for key in ("hidden_size", "moe_intermediate_size"):
        if fp8 is not None and getattr(model, key) % spec.fp8[fp8]:
            raise ValueError(
                f"backend.experts_fp8 {fp8!r} needs {key} to be a multiple of {spec.fp8[fp8]}, and the model's is {getattr(model, key)};"
                " choose another recipe, or null"
            )
    return f"experts: {name}{f', FP8 by {fp8}' if fp8 else ''} (as configured): {spec.summary}"


def _batch_line(config: RunConfig, sizes: MeshSizes) -> str:
    train = config.train
    together = train.micro_batch_size * sizes.dp_size
    if train.global_batch_size % together:
        raise ValueError(
            f"train.global_batch_size ({train.global_batch_size}) must be a multiple of train.micro_batch_size * data-parallel ranks"
            f" ({train.micro_batch_size} * {sizes.dp_size} = {together})"
        )
    steps = train.global_batch_size // together
    return (
        f"batch: {train.global_batch_size} sequences an optimizer step = {sizes.dp_size} ranks x {steps} micro-batches"
        f" x {train.micro_batch_size} sequences"
    )
