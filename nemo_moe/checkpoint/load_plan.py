"""What of a Hugging Face folder goes where in a model, decided before the first weight is written.

The plan looks at whole tensors, not at this rank's part of them: all ranks find the same faults, and none is left waiting.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from nemo_moe.checkpoint.hf_model import HFModel, HFTensor, Whole, overlap
from nemo_moe.checkpoint.shards import LocalShard, local_shards
from nemo_moe.checkpoint.tensor_files import DTYPES, EXTRA_FILE, TensorFiles
from nemo_moe.checks import listed
from nemo_moe.hf_folder import read_hf_config

_logger = logging.getLogger(__name__)


class _Read(NamedTuple):
    """A parameter (or buffer) and the tensors that make it up."""

    shard: LocalShard
    pieces: Sequence[HFTensor]
    files: TensorFiles


class Transfer(NamedTuple):
    """One box of a file that this rank holds.

    Attributes:
        size: bytes in the file.
    """

    files: TensorFiles
    key: str
    box: tuple[slice, ...]
    target: Tensor
    size: int


class LoadPlan(NamedTuple):
    """What to do.

    Attributes:
        transfers: in the order of the files' bytes.
        biases: (gate, its expert bias) to put in place.
    """

    transfers: list[Transfer]
    biases: list[tuple[nn.Module, Tensor]]


def plan_load(model: HFModel, folder: Path) -> LoadPlan:
    """Raises ValueError with all that does not fit, and where the folder is damaged."""
    files = TensorFiles(folder)
    shards = local_shards(model)
    if any(shard.tensor.is_meta for shard in shards):
        raise ValueError("the model has no storage yet (meta device); call model.to_empty(device=...) and model.reset_buffers() first")
    reads, problems = _plan_weights(model, shards, files)
    biases = []
    if (folder / EXTRA_FILE).is_file():
        extra = TensorFiles(folder, EXTRA_FILE)
        biases = _biases_to_add(model, extra)
        problems += _plan_extra(extra, [*shards, *(shard for _, shard in biases)], reads)
    if problems:
        raise ValueError(f"{folder} does not fit the model:\n  " + "\n  ".join(problems))
    transfers = [transfer for read in reads for transfer in _transfers(read)]
    transfers.sort(key=lambda transfer: transfer.files.tensors[transfer.key][:2])
    return LoadPlan(transfers, [(gate, shard.tensor) for gate, shard in biases])


def _transfers(read: _Read) -> list[Transfer]:
    boxes = [(piece, overlap(read.shard, piece)) for piece in read.pieces]
    return [
        Transfer(read.files, piece.key, box.file, read.shard.tensor[box.local], read.files.size(piece.key, box.file))
        for piece, box in boxes
        if box is not None
    ]


def _plan_weights(model: HFModel, shards: Sequence[LocalShard], files: TensorFiles) -> tuple[list[_Read], list[str]]:
    """Which tensors of the files go where, and what is wrong."""
    reads: list[_Read] = []
    missing: list[str] = []
    wanted: list[tuple[str, tuple[int, ...]]] = []
    used: set[str] = set()
    for shard in shards:
        layouts = _layouts(model, shard)
        if not layouts:
            continue
        # The layout that the file comes closest to; an incomplete one is reported tensor by tensor.
        pieces = max(layouts, key=lambda layout: sum(piece.key in files.tensors for piece in layout) / len(layout))
        missing += [f"{piece.key} (for {shard.name})" for piece in pieces if piece.key not in files.tensors]
        there = [piece for piece in pieces if piece.key in files.tensors]
        used.update(piece.key for piece in there)
        wanted += [(piece.key, piece.shape) for piece in there]
        reads.append(_Read(shard, pieces, files))
    problems = _problem(f"missing from {files.source}", missing) + _misfits(files, wanted)
    unexpected = sorted(files.tensors.keys() - used)
    if not problems:  # what differs in an alias can be told only when its original is there
        unexpected = [key for key in unexpected if not _is_alias(model, key, reads)]
    unexpected = _without_dropped_layers(model, unexpected, files.folder)
    problems += _problem("unexpected", [f"{key} in {files.tensors[key].file}" for key in unexpected])
    return reads, problems


def _layouts(model: HFModel, shard: LocalShard) -> list[Sequence[HFTensor]]:
    """The known ones; an alias in place of its original is one more."""
    layouts = list(model.hf_layouts(shard.name, shard.global_shape))
    return layouts + [[Whole.of(alias, shard.global_shape)] for alias, name in model.hf_aliases().items() if name == shard.name]


def _misfits(files: TensorFiles, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[str]:
    """What keeps tensors (name, shape that the model has) from being used."""
    misshapen, not_usable = [], []
    for key, shape in wanted:
        stored = files.tensors[key]
        if stored.shape != shape:
            misshapen.append(f"{key} in {stored.file}: shape {list(stored.shape)}, the model's is {list(shape)}")
        elif stored.dtype not in DTYPES:
            not_usable.append(f"{key} in {stored.file}: type {stored.dtype}")
    return _problem("misshapen", misshapen) + _problem(f"of a type that no weight has (legal: {', '.join(DTYPES)})", not_usable)


def _problem(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"{len(names)} {kind}: {listed(names)}"]


def _is_alias(model: HFModel, key: str, reads: list[_Read]) -> bool:
    """Whether `key` is a second copy of a parameter's values; this rank's part of them is compared.

    Raises ValueError when the values differ: which of the two the model should have is not for us to guess.
    """
    name = model.hf_aliases().get(key)
    read = next((read for read in reads if read.shard.name == name), None)
    if read is None or len(read.pieces) != 1:
        return False
    original, files = read.pieces[0], read.files
    box = overlap(read.shard, original)
    if files.tensors[key].shape != original.shape or (box is not None and not _same(files, key, original.key, box.file)):
        raise ValueError(
            f"{key} in {files.folder / files.tensors[key].file} differs from {original.key}, but the config ties them"
            " (tie_word_embeddings: true); set it to false, or remove the tensor"
        )
    return True


def _same(files: TensorFiles, one: str, other: str, box: tuple[slice, ...]) -> bool:
    """Whether two tensors are equal in a box of theirs; neither is copied."""
    ours, theirs = files.read(one, box), files.read(other, box)
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


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


def _biases_to_add(model: HFModel, extra: TensorFiles) -> list[tuple[nn.Module, LocalShard]]:
    """(gate, its expert bias) for the biases in EXTRA_FILE whose gate has none; a zero tensor each, not in place yet."""
    names = {id(module): name for name, module in model.named_modules()}
    added: list[tuple[nn.Module, LocalShard]] = []
    for moe in model.moe_layers():
        gate, experts = cast(Any, moe).gate, cast(Any, moe).experts
        key = f"{names[id(gate)]}.expert_bias"
        if key in extra.tensors and gate.expert_bias is None:
            bias = torch.zeros(experts.num_experts, dtype=torch.float32, device=gate.weight.device)
            added.append((gate, LocalShard(key, bias, (experts.num_experts,), (0,))))
    return added


def _plan_extra(files: TensorFiles, shards: Sequence[LocalShard], reads: list[_Read]) -> list[str]:
    """Plan the reads of EXTRA_FILE (adds to `reads`); what is wrong with it."""
    planned = {read.shard.name for read in reads}
    wanted = {shard.name: shard for shard in shards if shard.name not in planned}
    there = {key: wanted[key] for key in files.tensors if key in wanted}
    problems = _misfits(files, [(key, shard.global_shape) for key, shard in there.items()])
    problems += _problem("unexpected", [f"{key} in {EXTRA_FILE}" for key in sorted(files.tensors.keys() - wanted.keys())])
    reads += [_Read(shard, [Whole.of(key, shard.global_shape)], files) for key, shard in there.items()]
    return problems
