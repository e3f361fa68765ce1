"""Tensors of a training checkpoint, through torch.distributed.checkpoint (DCP), on any mesh.

A tensor is stored by its name and global shape; each rank writes and reads its box of it (`shards.LocalShard`). So what
two expert-parallel ranks wrote one process can read, and DCP's own reading of DTensors, which does not know that local
experts are part of a larger tensor, is not used. Boxes that several ranks hold are written once.

Nothing that a checkpoint folder says is run: tensors are read with weights_only, and the index by `dcp_index`.

Left out on purpose: values that are no tensors. DCP would pickle them; they belong in a JSON file beside.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

from nemo_moe.checkpoint.dcp_index import CheckpointReadError
from nemo_moe.checkpoint.shards import LocalShard
from nemo_moe.checkpoint.together import SaveError


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
        boxes: names, shapes and dtypes must be those of `index` (`dcp_index.stored_tensors`).
        index: of `dcp_index.read_index`.

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
