"""Tensors of a training checkpoint, through torch.distributed.checkpoint (DCP), on any mesh.

A tensor is stored by its name and global shape; each rank writes and reads its box of it (`shards.LocalShard`). So what
two expert-parallel ranks wrote one process can read, and DCP's own reading of DTensors, which does not know that local
experts are part of a larger tensor, is not used. Boxes that several ranks hold are written once.

Nothing that a checkpoint folder says is run: tensors are read with weights_only, and the index (`.metadata`), which
torch reads by a bare pickle, goes through an unpickler that knows the index's own classes and nothing else. Its file
names and ranges are checked against the files before anything is read.

Left out on purpose: values that are no tensors. DCP would pickle them; they belong in a JSON file beside.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_moe.checkpoint.shards import LocalShard
from nemo_moe.checkpoint.together import SaveError

INDEX_FILE = ".metadata"
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Where the folder was when it was written; of Python's versions.
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


class StoredTensor(NamedTuple):
    """What the index says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointReadError(ValueError):
    """A checkpoint folder is damaged, incomplete or not one."""


def write_tensors(boxes: Sequence[LocalShard], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write all ranks' boxes into `folder`, one file a rank, and an index. Collective; files are on the disk on return.

    Args:
        boxes: this rank's; a name has one global shape and dtype on all ranks. On any device; not changed. A name may be
            missing on ranks that hold nothing of it.
        folder: exists on every rank's machine: one that all nodes share.
        group: of gloo, the ranks that write; None is one process.

    Raises:
        SaveError: some rank could not write; on all ranks, the first failed rank's cause, with its rank.

    Cost: GPU tensors pass through CPU memory a few megabytes at a time.
    """
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True, overwrite=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=_BoxSavePlanner(boxes), process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise SaveError(_first_cause(error)) from error


def read_tensors(boxes: Sequence[LocalShard], index: Metadata, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's boxes, in place, from a folder that any number of ranks wrote. Collective.

    Args:
        boxes: names, shapes and dtypes must be those of `index` (`stored_tensors`).
        index: of `read_index`.

    Raises:
        CheckpointReadError: some rank could not read; on all ranks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            reader, planner = _CheckedReader(folder, index), _BoxLoadPlanner(boxes)
            dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise CheckpointReadError(f"{folder} cannot be read: {_first_cause(error)}; resume from another checkpoint") from error


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint folder, checked: it runs no code, names files of this folder, and they are whole.

    Raises:
        CheckpointReadError: says what is wrong.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            index: Metadata = _IndexUnpickler(file).load()
    except OSError as error:
        raise CheckpointReadError(f"{path} cannot be read ({error.strerror or error}); {folder} is not a complete checkpoint") from error
    except Exception as error:  # whatever a damaged or hostile pickle raises
        raise CheckpointReadError(f"{path} is not the index of a checkpoint ({type(error).__name__}: {error})") from error
    _check_index(index, folder)
    return index


def stored_tensors(index: Metadata) -> dict[str, StoredTensor]:
    """Name -> shape and dtype."""
    entries: dict[str, Any] = index.state_dict_metadata
    return {name: StoredTensor(tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"{type(cause).__name__}: {cause} (rank {rank})"


class _Writer(FileSystemWriter):
    """Fails with what a failure began with: after a file was too large, torch complains of its own position in it."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            first: BaseException = error
            while not isinstance(first, OSError) and first.__context__ is not None:
                first = first.__context__
            cause = first if isinstance(first, OSError) else error
        raise cause


class _BoxSavePlanner(DefaultSavePlanner):
    """Plans to write boxes. Merging the ranks' plans, and writing a box once, is DCP's."""

    def __init__(self, boxes: Sequence[LocalShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {box.name: box for box in boxes}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(box) for box in self._boxes.values() if box.tensor.numel()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._boxes[index.fqn].tensor


def _write_item(box: LocalShard) -> WriteItem:
    offsets = torch.Size(box.offsets)
    return WriteItem(
        index=MetadataIndex(box.name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=box.tensor.size()),
            properties=TensorProperties(dtype=box.tensor.dtype),
            size=torch.Size(box.global_shape),
        ),
    )


class _BoxLoadPlanner(DefaultLoadPlanner):
    """Plans to read boxes from whatever boxes were written."""

    def __init__(self, boxes: Sequence[LocalShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {box.name: box for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for box in self._boxes.values():
            if box.tensor.numel():
                chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=box.tensor.size())
                entry = self.metadata.state_dict_metadata[box.name]
                assert isinstance(entry, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(box.name, entry, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._boxes[index.fqn].tensor


class _CheckedReader(FileSystemReader):
    """Reads by an index that was read and checked before."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _IndexUnpickler(pickle.Unpickler):
    """Builds the classes of an index; refuses any other name, so a pickle that would call something is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch":
            value = getattr(torch, name, None)
            if value is torch.Size or isinstance(value, torch.dtype):
                return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index does; the folder is not to be trusted")


def _layout(name: str) -> torch.layout:
    """What torch pickles a layout as a call of."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"a tensor has the layout {name}; only torch.strided is read")
    return torch.strided


def _check_index(index: Any, folder: Path) -> None:
    """Raise CheckpointReadError unless the index is made of what an index is made of and the files are as it says."""
    tensors, places = getattr(index, "state_dict_metadata", None), getattr(index, "storage_data", None)
    if not isinstance(index, Metadata) or not isinstance(tensors, dict) or not isinstance(places, dict):
        raise CheckpointReadError(f"{folder / INDEX_FILE} is not the index of a checkpoint")
    for name, entry in tensors.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointReadError(f"{folder / INDEX_FILE}: {name} is no tensor; such values are not read")
        missing = [chunk for chunk in entry.chunks if MetadataIndex(name, chunk.offsets) not in places]
        if missing:
            raise CheckpointReadError(f"{folder / INDEX_FILE}: a part of {name} is in no file")
    needed: dict[str, int] = {}
    for place in places.values():
        file, end = place.relative_path, place.offset + place.length
        if not _DATA_FILE.fullmatch(file) or place.offset < 0 or place.length < 0:
            raise CheckpointReadError(f"{folder / INDEX_FILE} names the file {file!r}, which is none of a checkpoint's")
        needed[file] = max(needed.get(file, 0), end)
    for file, size in sorted(needed.items()):
        path = folder / file
        found = os.path.getsize(path) if path.is_file() else None
        if found is None:
            raise CheckpointReadError(f"{path} is missing; checkpoints need a folder that all nodes share")
        if found < size:
            raise CheckpointReadError(f"{path} is cut off: {found} bytes of {size}")
