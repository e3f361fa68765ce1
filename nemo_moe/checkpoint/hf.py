"""Hugging Face folders in and out: config.json, safetensors (one file or shards with an index), tokenizer files.

Loading: each rank reads the slices that it holds, straight from the files, without communication; everything is checked
before the first weight is written. Saving: rank 0 writes, one file's tensors in its memory at a time, from wherever whole
parameters come: the ranks that hold their pieces, or a training checkpoint. How a family spells its parameters is the
model's to say (`hf_layouts`). The files themselves are the safetensors library's.

Left out on purpose, for now: writing by all ranks at once; quantised weights; pickled (.bin) weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from nemo_moe.checkpoint.folder_writer import FolderWriter, plan_files
from nemo_moe.checkpoint.hf_model import HFModel, HFTensor, within
from nemo_moe.checkpoint.load_plan import plan_load
from nemo_moe.checkpoint.shards import GatherToRankZero, local_shards
from nemo_moe.checkpoint.tensor_files import DTYPES

MAX_SHARD_BYTES = 5 * 10**9

# (bytes done, bytes in all)
OnProgress = Callable[[int, int], object]


@torch.no_grad()
def load_hf_folder(model: nn.Module, folder: str | Path, *, progress: OnProgress | None = None) -> None:
    """Fill a model's parameters from a folder, parallelized or not. Each rank reads its own slices; no communication.

    Values are converted to the parameters' dtype. Expert biases that the folder has are used also by a model that was
    built without: they choose experts as they did when it was trained, and nobody updates them. A folder of a deeper
    model loads into a shallower one (a changed `num_hidden_layers`): the layers that are not there are left out, with a
    line in the log.

    Args:
        model: obeys `hf_model.HFModel`; has storage (`to_empty` comes before, `reset_buffers` too).
        folder: its files must be readable on every rank.
        progress: called with (bytes read, bytes that this rank reads in all), first with 0 and then after each
            tensor of the files.

    Raises:
        ValueError: tensors that are missing, of another shape, not of a floating type, or not the model's, named with
            their files, all at once; a missing or damaged file, or two that disagree. The model is unchanged then. Also a
            file that was removed or replaced meanwhile, which is found out when part of the model is filled.

    Cost: the bytes of this rank's slices from the disk, in the order of the files. On the CPU no memory of the process's
    own beside the model, on a GPU one tensor of a file there; pages of one mapped file, which the system can take back.
    """
    plan = plan_load(cast(HFModel, model), Path(folder))
    total, done = sum(transfer.size for transfer in plan.transfers), 0
    if progress is not None:
        progress(0, total)
    for transfer in plan.transfers:
        # To the device first: it converts faster, and what goes there is what the file has.
        transfer.target.copy_(transfer.files.read(transfer.key, transfer.box).to(transfer.target.device))
        done += transfer.size
        if progress is not None:
            progress(done, total)
    for gate, bias in plan.biases:
        gate.expert_bias = bias


def save_hf_folder(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: OnProgress | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Write a folder that transformers loads, from a model however it is spread. Collective: every rank calls it alike.

    Rank 0 gathers one parameter at a time and writes each file when it has all of its tensors. The folder appears, or
    changes, only when all of it is on the disk: weights of an earlier save are replaced, other files there stay.

    Args:
        model: obeys `hf_model.HFModel`.
        tokenizer: written with its own `save_pretrained`; its special token ids complete the config where that has none.
        source: the folder that the model came from; its generation_config.json and, without `tokenizer`, its tokenizer
            files are copied.
        dtype: of the weights on disk and in config.json. None is what the model's config says (a folder that came in as
            bf16 goes out as bf16, whatever the master weights are), else the parameters' own.
        max_shard_bytes: of one weights file; a larger model gets several, and an index. Rank 0 holds that much in memory,
            and one parameter more.
        progress: called on rank 0 with (bytes written, bytes in all), first with 0 and then after each parameter.
        check: called on every rank before each parameter; what it raises (on all ranks) ends the save and leaves an older
            folder as it was.

    Raises:
        ValueError: max_shard_bytes is not positive, or dtype is not a floating type that the files can have.
        SaveError: rank 0 could not write; the same on all ranks, with the cause. An older folder is as it was.
    """
    shards = local_shards(cast(HFModel, model))
    gather = GatherToRankZero(shards)
    indices = {shard.name: index for index, shard in enumerate(shards)}

    def fetch(name: str, wanted: torch.dtype) -> Tensor | None:
        check()
        return gather(indices[name], wanted)

    write_hf_folder(
        model,
        fetch,
        folder,
        tokenizer,
        rank=gather.rank,
        source=source,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


class _Entry(NamedTuple):
    """One parameter or buffer: where it goes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[HFTensor]


@torch.no_grad()
def write_hf_folder(
    model: nn.Module,
    fetch: Callable[[str, torch.dtype], Tensor | None],
    folder: str | Path,
    tokenizer: Any = None,
    *,
    rank: int = 0,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: OnProgress | None = None,
) -> None:
    """What `save_hf_folder` does, with the values from anywhere. Collective where there is a process group.

    Args:
        model: tells names, global shapes and key table; no value of it is read, so it may be on the meta device (then
            not parallelized). Its parameters' own dtype counts where neither `dtype` nor its config says one.
        fetch: (name of a parameter or stored buffer, dtype) -> the whole of it, on the CPU, in that dtype; None on ranks
            other than 0. Called on every rank, once a name, in the model's order. What it gives must stay as it is until
            the end. What it raises goes through.
        rank: of this process; rank 0 writes.
        folder, tokenizer, source, dtype, max_shard_bytes, progress: see `save_hf_folder`.

    Raises:
        ValueError, SaveError: see `save_hf_folder`. ValueError also where `fetch` gives another shape or dtype.

    Cost: on rank 0 the tensors of one file (max_shard_bytes) and one parameter (a layer's stacked experts are one).
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be 1 or more, found {max_shard_bytes}")
    hf_model = cast(HFModel, model)
    shards = local_shards(hf_model)
    config = hf_model.config.to_hf()
    if dtype is None:
        dtype = getattr(torch, config["torch_dtype"]) if config.get("torch_dtype") else shards[0].tensor.dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"weights cannot be saved as {dtype}; choose torch.float32, torch.bfloat16 or torch.float16")
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    entries = []
    for shard in shards:
        layouts = hf_model.hf_layouts(shard.name, shard.global_shape)
        entries.append(_Entry(shard.name, shard.global_shape, dtype if layouts else shard.tensor.dtype, layouts[0] if layouts else ()))
    pieces = [piece for entry in entries for piece in entry.pieces]
    files = plan_files([(piece.key, math.prod(piece.shape) * dtype.itemsize) for piece in pieces], max_shard_bytes)
    total = sum(math.prod(piece.shape) for piece in pieces) * dtype.itemsize
    writer = FolderWriter(Path(folder), rank)
    try:
        extra = _write_weights(writer, entries, files, dtype, fetch, total, progress if rank == 0 else None)
        writer.finish(files, total, extra, config, tokenizer, None if source is None else Path(source))
    except BaseException:
        writer.abandon()
        raise


def _write_weights(
    writer: FolderWriter,
    entries: Sequence[_Entry],
    files: dict[str, str],
    dtype: torch.dtype,
    fetch: Callable[[str, torch.dtype], Tensor | None],
    total: int,
    progress: OnProgress | None,
) -> dict[str, Tensor]:
    """Write all files; what belongs in none of them (on rank 0)."""
    last = {name: key for key, name in files.items()}
    held: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    done = 0
    if progress is not None:
        progress(0, total)
    for entry, full in _fetched(entries, fetch):
        if not entry.pieces and full is not None:
            extra[entry.name] = full.contiguous()
        for piece in entry.pieces:
            if full is not None:
                held[piece.key] = full[within(entry.shape, piece)].reshape(piece.shape).contiguous()
            if piece.key == last[files[piece.key]]:
                writer.write_file(files[piece.key], held)
                held = {}
            done += math.prod(piece.shape) * dtype.itemsize
        if progress is not None and entry.pieces:
            progress(done, total)
    return extra


def _fetched(entries: Sequence[_Entry], fetch: Callable[[str, torch.dtype], Tensor | None]) -> Iterator[tuple[_Entry, Tensor | None]]:
    for entry in entries:
        full = fetch(entry.name, entry.dtype)
        if full is not None and (tuple(full.shape), full.dtype) != (entry.shape, entry.dtype):
            raise ValueError(f"{entry.name} is {list(full.shape)} {full.dtype}, where {list(entry.shape)} {entry.dtype} is to be written")
        yield entry, full
