"""From a config to the parts of a run: data, parallel model, optimizer, schedule. What can fail here a user can fix.

The model is built without storage, made parallel, and only then given memory, so no rank ever holds all of it; random
weights are the same for any number of ranks, and a checkpoint's tensors are read by the ranks that need them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nemo_moe.checkpoint.hf import load_hf_folder
from nemo_moe.config import ModelConfig, RunConfig
from nemo_moe.data import IGNORE_INDEX
from nemo_moe.data.build import DataBundle, build_data, digest
from nemo_moe.data.loader import StepLoader
from nemo_moe.distributed.mesh import Meshes, build_meshes
from nemo_moe.distributed.parallelize import init_weights, parallelize
from nemo_moe.hf_folder import read_hf_config
from nemo_moe.models.decoder import DecoderForCausalLM
from nemo_moe.models.hf_config import standard_names
from nemo_moe.registry import MODELS
from nemo_moe.resolve import Resolved, model_config
from nemo_moe.train.optimizer import build_optimizer
from nemo_moe.train.progress import TransferDisplay
from nemo_moe.train.resume import Resume, check_same_run
from nemo_moe.train.runtime import agreed, require_same_on_all_ranks
from nemo_moe.train.schedule import build_schedule, total_steps
from nemo_moe.train.step import LossCoefficients

_DATA_DIFFERS = (
    "the ranks made different data from the same recipe: a task of data.tasks iterates over sets, whose order follows"
    " PYTHONHASHSEED, or the ranks have different versions of python or reasoning-gym; start all ranks with"
    " PYTHONHASHSEED=0 in their environment"
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Run:
    """The parts of a run.

    Attributes:
        config: as given.
        model: parallelized, on its device.
        model_config: the family's config, as the saved folder will have it.
        data_digest: see `data.build.digest`.
        loader, validation_loader: of training and of held-out samples.
        steps: optimizer steps of the run.
    """

    config: RunConfig
    data: DataBundle
    data_digest: str
    model: DecoderForCausalLM
    model_config: Any
    meshes: Meshes
    optimizer: Optimizer
    schedule: LambdaLR
    coefficients: LossCoefficients
    loader: StepLoader
    validation_loader: StepLoader
    steps: int


def assemble(config: RunConfig, resolved: Resolved, resume: Resume | None = None) -> Run:
    """Build everything. Collective.

    Args:
        resume: the checkpoint that the run will be put to; its weights need not come from anywhere else then.

    Raises:
        StartError: on all ranks, when one of them found something a user has to change.
    """
    data, family_config = agreed(lambda: data_and_model_config(config))
    data_digest = digest(data)
    require_same_on_all_ranks(data_digest, _DATA_DIFFERS)
    if resume is not None:
        agreed(lambda: check_same_run(resume, family_config.to_hf(), data_digest))
    meshes = build_meshes(resolved.sizes, resolved.device)
    model = agreed(lambda: build_model(config, family_config, meshes, with_weights=resume is None))
    optimizer = build_optimizer(model, config.optimizer)
    loader, validation_loader = agreed(lambda: _loaders(config, data, meshes))
    steps = total_steps(config.train, len(loader))
    return Run(
        config=config,
        data=data,
        data_digest=data_digest,
        model=model,
        model_config=family_config,
        meshes=meshes,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.schedule, steps),
        coefficients=loss_coefficients(config, family_config),
        loader=loader,
        validation_loader=validation_loader,
        steps=steps,
    )


def loss_coefficients(config: RunConfig, family_config: Any) -> LossCoefficients:
    """The recipe's coefficients; for the load-balance loss, the model config's where the recipe says null."""
    asked = config.router.aux_loss_coef
    return LossCoefficients(load_balance=family_config.router_aux_loss_coef if asked is None else asked, router_z=config.router.z_loss_coef)


def warnings_of(run: Run) -> list[str]:
    """What is legal and yet probably not meant."""
    lines = list(run.data.warnings)
    config, coefficients = run.config, run.coefficients
    always_one = run.model_config.num_experts_per_tok == 1 and run.model_config.norm_topk_prob
    if run.model.moe_layers() and always_one:
        source = "from the auxiliary losses only"
        if not (coefficients.load_balance or coefficients.router_z):
            source = "nothing, because the auxiliary losses are off too"
        lines.append(
            "num_experts_per_tok is 1 and norm_topk_prob is true: a routing weight is always 1, so the main loss gives the"
            f" router no gradient and it learns {source}; set norm_topk_prob to false (where the family has it), or"
            " num_experts_per_tok to 2 or more"
        )
    longest = max(len(sample.input_ids) for sample in (*run.data.train, *run.data.held_out_samples))
    if longest > run.model_config.max_position_embeddings:
        lines.append(
            f"the longest sample has {longest} tokens, but max_position_embeddings of the model's config is"
            f" {run.model_config.max_position_embeddings}: the model was not made for later positions; lower data.max_length, or raise it"
        )
    if config.schedule.warmup_steps >= run.steps:
        lines.append(
            f"schedule.warmup_steps ({config.schedule.warmup_steps}) is not below the {run.steps} steps of this run: it is all warm-up"
        )
    return lines


def data_and_model_config(config: RunConfig) -> tuple[DataBundle, Any]:
    """The data and the family's config, whose vocabulary is the tokenizer's where a recipe from random weights names none.

    Raises ValueError where nothing is left to learn or the model's vocabulary is too small for the tokenizer, and what making
    the two raises.
    """
    data = build_data(config.data, config.seed, tokenizer=_tokenizer_of(config.model.folder))
    # The first token is never predicted.
    if all(label == IGNORE_INDEX for sample in data.train for label in sample.labels[1:]):
        raise ValueError(
            f"none of the {len(data.train)} training samples has an answer token left to learn, so training would change nothing;"
            f" data.max_length is {config.data.max_length}: raise it"
        )
    family_config = model_config(config.model)
    if config.model.folder is None and "vocab_size" not in config.model.config:
        family_config = dataclasses.replace(family_config, vocab_size=len(data.tokenizer))
    if family_config.vocab_size < len(data.tokenizer):
        raise ValueError(
            f"the model's vocab_size is {family_config.vocab_size}, but the tokenizer has {len(data.tokenizer)} entries;"
            f" set model.config.vocab_size to {len(data.tokenizer)} or more, or leave it out"
        )
    return data, family_config


def _tokenizer_of(folder: Path | None) -> PreTrainedTokenizerFast | None:
    """The tokenizer in a model folder; None without a folder, which leaves it to the data to train one."""
    if folder is None:
        return None
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"model.path: {folder} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}), and a new one would give tokens other ids"
            " than the weights were trained with; copy the tokenizer's files from where the model comes from into the folder"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any kind, from the libraries that read the files
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model.path: transformers cannot read the tokenizer in {folder} ({type(error).__name__}: {reason}); repair"
            f" {', '.join(_TOKENIZER_FILES)} or config.json, or copy them anew from where the model comes from"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"model.path: the tokenizer in {folder} is no fast one ({type(tokenizer).__name__}); convert it to a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path: the tokenizer in {folder} names no end token; set eos_token in its tokenizer_config.json")
    return tokenizer


def build_model(config: RunConfig, family_config: Any, meshes: Meshes, *, with_weights: bool = True) -> DecoderForCausalLM:
    """The parallel model; without weights its parameters are uninitialised memory."""
    with torch.device("meta"):
        model: DecoderForCausalLM = MODELS.load(config.model.family)(family_config, config.backend, config.router)
    parallelize(model, meshes, config)
    model.to_empty(device=meshes.device)
    model.reset_buffers()
    if not with_weights:
        return model
    if config.model.folder is None:
        init_weights(model, config.seed, family_config.initializer_range)
    else:
        with TransferDisplay(f"loading {config.model.folder} (rank 0)", active=dist.get_rank() == 0) as display:
            try:
                load_hf_folder(model, config.model.folder, progress=display.update)
            except ValueError as error:
                raise ValueError(f"{error}{_about_changes(config.model, config.model.folder)}") from error
    return model


def _about_changes(model: ModelConfig, folder: Path) -> str:
    """The keys of model.config that are not what the folder's config says: the likely cause where its weights do not fit."""
    there = standard_names(read_hf_config(folder))
    changed = {key: value for key, value in standard_names(model.config).items() if key in there and there[key] != value}
    if not changed:
        return ""
    listed = ", ".join(f"{key} {there[key]} -> {value}" for key, value in changed.items())
    return f"\nmodel.config changes what the folder's config.json says ({listed}); remove from model.config what you do not mean to change"


def _loaders(config: RunConfig, data: DataBundle, meshes: Meshes) -> tuple[StepLoader, StepLoader]:
    pad_id = data.tokenizer.pad_token_id
    shared: dict[str, Any] = {
        "micro_batch_size": config.train.micro_batch_size,
        "dp_rank": meshes.dp_rank,
        "dp_size": meshes.sizes.dp_size,
        "pad_id": 0 if pad_id is None else pad_id,
    }
    train = StepLoader(
        data.train,
        global_batch_size=config.train.global_batch_size,
        seed=config.seed,
        length_group_batches=config.data.length_group_batches,
        **shared,
    )
    # One pass over everything, sorted by length: as little padding as can be.
    together = meshes.sizes.dp_size * config.train.micro_batch_size
    held_out = StepLoader(data.held_out_samples, global_batch_size=together, length_group_batches=len(data.held_out_samples), **shared)
    return train, held_out
