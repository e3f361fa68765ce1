"""The index of a DCP checkpoint (`.metadata`), read with suspicion.

torch reads it by a bare pickle, which runs whatever the file says. Here the pickle builds throw-away stand-ins, made for
this one load, of the classes that an index is made of; any other name is refused. torch's own classes are filled from
them afterwards, field by field, and what they say is held against the files: every element of every tensor is in one
place, and every place is inside a file of this folder.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX_FILE = ".metadata"
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_CLASSES = {
    _METADATA: {"ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"},
    _FILES: {"_StorageInfo"},
}
# Called while unpickling, with what they say thrown away: where the folder was (by Python's version), a memory format.
_CALLS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
_CALLS |= {(_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")}
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
_MOST_PAIRS = 64  # of the chunks of one tensor: so many are compared with one another


class CheckpointReadError(ValueError):
    """A checkpoint folder is damaged, incomplete or not one."""


class StoredTensor(NamedTuple):
    """What the index says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint folder, and that its files are whole.

    Raises:
        CheckpointReadError: says what is wrong.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            index = _real(_IndexUnpickler(file).load())
    except OSError as error:
        raise CheckpointReadError(f"{path} cannot be read ({error.strerror or error}); {folder} is not a complete checkpoint") from error
    except Exception as error:  # whatever a damaged or hostile pickle raises
        raise CheckpointReadError(f"{path} is not the index of a checkpoint ({type(error).__name__}: {error})") from error
    _check_files(index, folder)
    return index


def stored_tensors(index: Metadata) -> dict[str, StoredTensor]:
    """Name -> shape and dtype."""
    entries: dict[str, Any] = index.state_dict_metadata
    return {name: StoredTensor(tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


class _IndexUnpickler(pickle.Unpickler):
    """Builds stand-ins; refuses any name that an index does not have."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._made:
            self._made[module, name] = self._make(module, name)
        return self._made[module, name]

    def _make(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return type(name, (), {"__setstate__": _set_state})
        if (module, name) in _CALLS:
            return lambda *arguments: None
        if (module, name) == ("torch", "Size"):
            return lambda *arguments: tuple(*arguments)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index does; the folder is not to be trusted")


def _set_state(stand_in: Any, state: Any) -> None:
    # TensorProperties is pickled as a tuple that begins with its dtype.
    vars(stand_in).update(state if isinstance(state, dict) else {"dtype": state[0]})


def _real(found: Any) -> Metadata:
    """torch's index from stand-ins. Raises ValueError, AttributeError or TypeError where it is none."""
    _require(type(found).__name__ == "Metadata", "it holds something else")
    tensors: dict[str, STORAGE_TYPES] = {name: _tensor(name, entry) for name, entry in _dictionary(found.state_dict_metadata).items()}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, place in _dictionary(found.storage_data).items():
        file, offset, length = place.relative_path, _count(place.offset), _count(place.length)
        _require(
            isinstance(file, str) and _DATA_FILE.fullmatch(file) is not None, f"it names the file {file!r}, which is none of a checkpoint's"
        )
        places[MetadataIndex(key.fqn, _sizes(key.offset))] = _StorageInfo(file, offset, length)
    for name, entry in tensors.items():
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            _require(MetadataIndex(name, chunk.offsets) in places, f"a part of {name} is in no file")
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _tensor(name: Any, entry: Any) -> TensorStorageMetadata:
    _require(isinstance(name, str) and type(entry).__name__ == "TensorStorageMetadata", f"{name} is no tensor; such values are not read")
    dtype, size = entry.properties.dtype, _sizes(entry.size)
    _require(isinstance(dtype, torch.dtype), f"{name} has no dtype")
    chunks = [ChunkStorageMetadata(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(size)
        inside = inside and all(start + length <= end for start, length, end in zip(chunk.offsets, chunk.sizes, size, strict=True))
        _require(inside, f"a part of {name} lies outside it")
    whole = sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(size)
    if whole and len(chunks) <= _MOST_PAIRS:
        whole = not any(_overlap(one, other) for one, other in itertools.combinations(chunks, 2))
    _require(whole, f"the parts of {name} do not make up the whole of it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(start < last + length and last < start + size for start, size, last, length in sides)


def _sizes(values: Any) -> torch.Size:
    _require(isinstance(values, tuple), f"{values!r} is no size")
    return torch.Size([_count(value) for value in values])


def _count(value: Any) -> int:
    _require(type(value) is int and 0 <= value < 2**63, f"{value!r} is no number of elements or bytes")
    return int(value)


def _dictionary(value: Any) -> dict[Any, Any]:
    _require(isinstance(value, dict), "it is empty")
    return dict(value)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_files(index: Metadata, folder: Path) -> None:
    """Raise CheckpointReadError unless the files are as long as the index says."""
    needed: dict[str, int] = {}
    for place in index.storage_data.values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for file, size in sorted(needed.items()):
        path = folder / file
        found = os.path.getsize(path) if path.is_file() else None
        if found is None:
            raise CheckpointReadError(f"{path} is missing; checkpoints need a folder that all nodes share")
        if found < size:
            raise CheckpointReadError(f"{path} is cut off: {found} bytes of {size}")
