"""From a training checkpoint to a Hugging Face folder, in one process, without the recipe's data and without a GPU.

Weights go from the checkpoint's files to the folder's one file at a time, so memory holds one file's tensors, whatever
the model's size and the number of ranks that trained it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from nemo_moe.checkpoint.dcp import read_tensors
from nemo_moe.checkpoint.dcp_index import read_index, stored_tensors
from nemo_moe.checkpoint.hf import MAX_SHARD_BYTES, OnProgress, write_hf_folder
from nemo_moe.checkpoint.shards import LocalShard
from nemo_moe.checkpoint.step_folders import StepFolders
from nemo_moe.checkpoint.training_state import add_expert_biases
from nemo_moe.config import BackendConfig
from nemo_moe.hf_folder import read_hf_config
from nemo_moe.registry import MODELS
from nemo_moe.train.checkpoints import HF_FOLDER
from nemo_moe.train.resume import STATE_FILE, read_state


def export(
    checkpoint: Path,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: OnProgress | None = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, with its tokenizer and generation config.

    Args:
        checkpoint: its folder (`find_checkpoint`).
        folder: where to; made, or its weights replaced.
        dtype: of the weights; None is what the model's config says, else fp32, which the checkpoint has.
        max_shard_bytes, progress: see `checkpoint.hf.save_hf_folder`.

    Raises:
        ValueError: the checkpoint is damaged.
        SaveError: the folder cannot be written; an older one is as it was.
    """
    model = _model_of(checkpoint)
    links = [path for path in (checkpoint / HF_FOLDER).iterdir() if path.is_symlink()]
    if links:  # what it leads to would end up in a folder that may be given away
        raise ValueError(f"{links[0]} is a link; a checkpoint has none, and it is not followed")
    index = read_index(checkpoint)
    stored = stored_tensors(index)
    add_expert_biases(model, stored)

    def fetch(name: str, wanted: torch.dtype) -> Tensor:
        entry = stored.get(f"model/{name}")
        if entry is None:
            raise ValueError(f"{checkpoint} has no {name}, which its own config asks for; it is damaged")
        box = LocalShard(f"model/{name}", torch.empty(entry.shape, dtype=entry.dtype), entry.shape, (0,) * len(entry.shape))
        read_tensors([box], index, checkpoint, None)
        return box.tensor.to(wanted)

    write_hf_folder(model, fetch, folder, source=checkpoint / HF_FOLDER, dtype=dtype, max_shard_bytes=max_shard_bytes, progress=progress)


def find_checkpoint(run: Path, which: str) -> Path:
    """The checkpoint `which` ("latest", "best" or a step) of a run folder, or `run` itself where it is one.

    Raises ValueError that lists what there is.
    """
    if (run / STATE_FILE).is_file():
        return run
    folders = StepFolders(run / "checkpoints")
    steps = folders.steps()
    if not steps:
        raise ValueError(f"{run} has no checkpoint: neither {STATE_FILE} nor a complete folder in {folders.root}")
    if which in ("latest", "best"):
        found = folders.latest() if which == "latest" else folders.best()
    else:
        found = steps.get(int(which)) if which.isascii() and which.isdigit() else None
    if found is None:
        named = [name for name in ("latest", "best") if name == "latest" or folders.best() is not None]
        raise ValueError(f"{run} has no checkpoint {which!r} (there are: {', '.join([*named, *map(str, steps)])})")
    return found


def _model_of(checkpoint: Path) -> nn.Module:
    """The model of a checkpoint, without storage."""
    family = read_state(checkpoint)["config"]["model"]["family"]
    config = MODELS.load_part(family, "config").from_hf(read_hf_config(checkpoint / HF_FOLDER))
    with torch.device("meta"):
        model: nn.Module = MODELS.load(family)(config, BackendConfig(experts="loop"))
    return model
