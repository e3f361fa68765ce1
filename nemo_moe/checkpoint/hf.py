"""Hugging Face folders in and out: config.json, safetensors (one file or shards with an index), tokenizer files.

Loading: each rank reads the slices that it holds, straight from the files, without communication; everything is checked
before the first weight is written. Saving: rank 0 writes, collecting one parameter at a time. How a family spells its
parameters is the model's to say (`hf_layouts`).

Left out on purpose, for now: writing by all ranks at once; quantised weights; pickled (.bin) weights.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from nemo_moe.checkpoint.folder_writer import FolderWriter, plan_files
from nemo_moe.checkpoint.shards import GatherToRankZero, LocalShard, ShardedModel, local_shards
from nemo_moe.checkpoint.tensor_files import EXTRA_FILE, TensorFiles
from nemo_moe.hf_folder import read_hf_config

_MAX_LISTED = 8
_logger = logging.getLogger(__name__)


class HFTensor(Protocol):
    """Where one tensor of a file belongs in a parameter (`models.decoder.HFTensor`)."""

    @property
    def key(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...


class HFConfig(Protocol):
    """A model's config."""

    def to_hf(self) -> dict[str, Any]: ...


class HFModel(ShardedModel, Protocol):
    """What a model offers to be loaded and saved."""

    @property
    def config(self) -> HFConfig: ...

    def hf_layouts(self, name: str, shape: Sequence[int]) -> Sequence[Sequence[HFTensor]]:
        """The tensors of a file that make up parameter `name`, one sequence per known layout, the one to write first."""
        ...

    def hf_aliases(self) -> Mapping[str, str]:
        """Further names that a file may store a parameter under: name in the file -> parameter, whose values it must equal."""
        ...


class _Read(NamedTuple):
    shard: LocalShard
    pieces: Sequence[HFTensor]
    files: TensorFiles


@torch.no_grad()
def load_hf_folder(model: nn.Module, folder: str | Path) -> None:
    """Fill a model's parameters from a folder, parallelized or not. Each rank reads its own slices; no communication.

    Values are converted to the parameters' dtype. Expert biases that the folder has are used also by a model that was
    built without: they choose experts as they did when it was trained, and nobody updates them. A folder of a deeper
    model loads into a shallower one (a changed `num_hidden_layers`): the layers that are not there are left out, with a
    line in the log.

    Args:
        model: obeys `HFModel`; has storage (`to_empty` comes before, `reset_buffers` too).
        folder: its files must be readable on every rank.

    Raises:
        ValueError: tensors that are missing, of another shape, not of a floating type, or not the model's, named with
            their files, all at once; a missing or damaged file. The model is unchanged then.
    """
    folder, hf_model = Path(folder), cast(HFModel, model)
    files = TensorFiles(folder)
    shards = local_shards(hf_model)
    if any(shard.tensor.is_meta for shard in shards):
        raise ValueError("the model has no storage yet (meta device); call model.to_empty(device=...) and model.reset_buffers() first")
    reads, problems = _plan(hf_model, shards, files)
    biases = _biases_to_add(hf_model, folder)
    problems += _extra_problems(folder, [*shards, *(shard for _, shard in biases)], reads)
    if problems:
        raise ValueError(f"{folder} does not fit the model:\n  " + "\n  ".join(problems))
    for gate, shard in biases:
        gate.expert_bias = shard.tensor
    for read in reads:
        for piece in read.pieces:
            box = _overlap(read.shard, piece)
            if box is not None:
                target = read.shard.tensor[box.local]
                target.copy_(read.files.read(piece.key, box.file).view(target.shape))


def _plan(model: HFModel, shards: Sequence[LocalShard], files: TensorFiles) -> tuple[list[_Read], list[str]]:
    """Which tensors of the files go where, and what is wrong. Looks at whole tensors, so all ranks find the same."""
    reads: list[_Read] = []
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for shard in shards:
        layouts = model.hf_layouts(shard.name, shard.global_shape)
        if not layouts:
            continue
        # The layout that the file comes closest to; an incomplete one is reported tensor by tensor.
        pieces = max(layouts, key=lambda layout: sum(piece.key in files.files for piece in layout) / len(layout))
        for piece in pieces:
            if piece.key not in files.files:
                missing.append(f"{piece.key} (for {shard.name})")
                continue
            used.add(piece.key)
            files.dtype(piece.key)
            if files.shape(piece.key) != piece.shape:
                where = files.files[piece.key]
                misshapen.append(f"{piece.key} in {where}: shape {list(files.shape(piece.key))}, the model's is {list(piece.shape)}")
        reads.append(_Read(shard, pieces, files))
    problems = [*_listed("missing", missing), *_listed("misshapen", misshapen)]
    unexpected = sorted(files.files.keys() - used)
    if not problems:  # what differs in an alias can be told only when its original is there
        unexpected = [key for key in unexpected if not _is_alias(model, key, reads)]
    unexpected = _without_dropped_layers(model, unexpected, files.folder)
    problems += _listed("unexpected", [f"{key} in {files.files[key]}" for key in unexpected])
    return reads, problems


def _listed(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return [f"{len(names)} {kind}: {', '.join(names[:_MAX_LISTED])}{more}"]


def _is_alias(model: HFModel, key: str, reads: list[_Read]) -> bool:
    """Whether `key` is a second copy of a parameter's values; this rank's part of them is compared.

    Raises ValueError when the values differ: which of the two the model should have is not for us to guess.
    """
    name = model.hf_aliases().get(key)
    read = next((read for read in reads if read.shard.name == name), None)
    if read is None or len(read.pieces) != 1:
        return False
    original, files = read.pieces[0], read.files
    box = _overlap(read.shard, original)
    if files.shape(key) != original.shape or (
        box is not None and not torch.equal(files.read(key, box.file), files.read(original.key, box.file))
    ):
        raise ValueError(
            f"{key} in {files.folder / files.files[key]} differs from {original.key}, but the config ties them"
            " (tie_word_embeddings: true); set it to false, or remove the tensor"
        )
    return True


def _without_dropped_layers(model: HFModel, keys: list[str], folder: Path) -> list[str]:
    """Without the keys of layers past the model's last, where the folder's own config has more layers than the model."""
    try:
        there = read_hf_config(folder).get("num_hidden_layers")
    except ValueError:
        return keys
    here = model.config.to_hf().get("num_hidden_layers")
    if not isinstance(there, int) or not isinstance(here, int) or there <= here:
        return keys
    kept = [key for key in keys if (match := re.search(r"(?:^|\.)layers\.(\d+)\.", key)) is None or not here <= int(match[1]) < there]
    if len(kept) < len(keys):
        _logger.warning("%s has %d layers, the model %d: tensors of layers %d to %d are left out", folder, there, here, here, there - 1)
    return kept


def _biases_to_add(model: HFModel, folder: Path) -> list[tuple[nn.Module, LocalShard]]:
    """(gate, its expert bias) for the biases in EXTRA_FILE whose gate has none; a zero tensor each, not in place yet."""
    if not (folder / EXTRA_FILE).is_file():
        return []
    stored = TensorFiles.single(folder / EXTRA_FILE).files
    names = {id(module): name for name, module in model.named_modules()}
    added: list[tuple[nn.Module, LocalShard]] = []
    for moe in model.moe_layers():
        gate, experts = cast(Any, moe).gate, cast(Any, moe).experts
        key = f"{names[id(gate)]}.expert_bias"
        if key in stored and gate.expert_bias is None:
            bias = torch.zeros(experts.num_experts, dtype=torch.float32, device=gate.weight.device)
            added.append((gate, LocalShard(key, bias, (experts.num_experts,), (0,))))
    return added


def _extra_problems(folder: Path, shards: Sequence[LocalShard], reads: list[_Read]) -> list[str]:
    """Plan the reads of EXTRA_FILE (adds to `reads`); what is wrong with it."""
    if not (folder / EXTRA_FILE).is_file():
        return []
    files = TensorFiles.single(folder / EXTRA_FILE)
    planned = {read.shard.name for read in reads}
    wanted = {shard.name: shard for shard in shards if shard.name not in planned}
    problems = _listed(
        "misshapen", [f"{key} in {EXTRA_FILE}" for key in files.files if key in wanted and files.shape(key) != wanted[key].global_shape]
    )
    problems += _listed("unexpected", [f"{key} in {EXTRA_FILE}" for key in sorted(files.files.keys() - wanted.keys())])
    reads += [
        _Read(shard, [_Whole(name, shard.global_shape, (0,) * len(shard.global_shape))], files)
        for name, shard in wanted.items()
        if name in files.files
    ]
    return problems


class _Whole(NamedTuple):
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class _Box(NamedTuple):
    local: tuple[slice, ...]
    file: tuple[slice, ...]


def _overlap(shard: LocalShard, piece: HFTensor) -> _Box | None:
    """The part of a file's tensor that this rank holds, as indices into the local tensor and into the file's."""
    leading = len(shard.global_shape) - len(piece.shape)
    local, file = [], []
    for dim, (size, offset) in enumerate(zip((1,) * leading + piece.shape, piece.offsets, strict=True)):
        start = max(offset, shard.offsets[dim])
        stop = min(offset + size, shard.offsets[dim] + shard.tensor.shape[dim])
        if start >= stop:
            return None
        local.append(slice(start - shard.offsets[dim], stop - shard.offsets[dim]))
        if dim >= leading:
            file.append(slice(start - offset, stop - offset))
    return _Box(tuple(local), tuple(file))


@torch.no_grad()
def save_hf_folder(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder that transformers loads, from a model however it is spread. Collective: every rank calls it alike.

    Rank 0 gathers one parameter at a time and writes it; it holds one file's tensors at most. The folder appears, or
    changes, only when all of it is written: weights of an earlier save are replaced, other files there stay.

    Args:
        model: obeys `HFModel`.
        tokenizer: written with its own `save_pretrained`; its special token ids complete the config where that has none.
        source: the folder that the model came from; its generation_config.json and, without `tokenizer`, its tokenizer
            files are copied.
        dtype: of the weights on disk and in config.json. None is what the model's config says (a folder that came in as
            bf16 goes out as bf16, whatever the master weights are), else the parameters' own.
        max_shard_bytes: of one weights file; a larger model gets several, and an index.

    Raises:
        ValueError: max_shard_bytes is not positive, or dtype is not a floating type.
        SaveError: rank 0 could not write; the same on all ranks, with the cause. An older folder is as it was.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be 1 or more, found {max_shard_bytes}")
    hf_model = cast(HFModel, model)
    shards = local_shards(hf_model)
    config = hf_model.config.to_hf()
    if dtype is None:
        dtype = getattr(torch, config["torch_dtype"]) if config.get("torch_dtype") else shards[0].tensor.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"weights cannot be saved as {dtype}; choose torch.float32, torch.bfloat16 or torch.float16")
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    layouts = [hf_model.hf_layouts(shard.name, shard.global_shape) for shard in shards]
    pieces = [piece for layout in layouts if layout for piece in layout[0]]
    files = plan_files([(piece.key, math.prod(piece.shape) * dtype.itemsize) for piece in pieces], max_shard_bytes)
    last_of_file = {name: key for key, name in files.items()}
    gather = GatherToRankZero(shards)
    writer = FolderWriter(Path(folder), gather.rank)
    for index, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
        full = gather(index, dtype if layout else shard.tensor.dtype)
        for piece in layout[0] if layout else ():
            if full is not None:
                # A copy: safetensors refuses tensors that share memory.
                writer.add(piece.key, full[_within(shard.global_shape, piece)].reshape(piece.shape).clone())
            if last_of_file[files[piece.key]] == piece.key:
                writer.write_tensors(files[piece.key])
        if not layout and full is not None:
            writer.add_extra(shard.name, full)
    sizes = {"total_size": sum(math.prod(piece.shape) for piece in pieces) * dtype.itemsize}
    writer.finish(files, sizes, config, tokenizer, None if source is None else Path(source))


def _within(shape: tuple[int, ...], piece: HFTensor) -> tuple[slice, ...]:
    sizes = (1,) * (len(shape) - len(piece.shape)) + piece.shape
    return tuple(slice(start, start + size) for start, size in zip(piece.offsets, sizes, strict=True))
