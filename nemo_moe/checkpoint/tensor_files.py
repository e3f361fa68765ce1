"""A folder of safetensors files as one table of tensors, of which boxes can be read into a model's memory.

Opening reads the headers alone. A box reads its own bytes and no other, straight into the target where dtype and device
allow it, else through one small buffer. Files are read, not mapped: no page of them counts as memory of the process, and
a file that shrinks or a disk that fails is an error with the file's name rather than a signal.

Left out: big-endian machines.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemo_moe.checkpoint.safetensors_header import DTYPES, StoredBytes, parse_json, read_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXTRA_FILE = "extra_tensors.safetensors"  # what the family's format has no place for: the router's expert biases
_CHUNK = 8 * 2**20  # bytes of one read: large for a disk, small beside a model, and it stays in a core's cache
_logger = logging.getLogger(__name__)


class TensorFiles:
    """The tensors of a folder: those of the files that model.safetensors.index.json names, else of model.safetensors.

    Attributes:
        folder: where they are.
        source: the file that lists them all: the index, or the one file.
        tensors: tensor name -> where it is.
        bytes_read: of tensors, so far.

    Raises ValueError naming the file that is missing, damaged, outside the folder, or at odds with another one.
    """

    def __init__(self, folder: Path) -> None:
        self._start(folder, WEIGHTS_FILE)
        index, single = (folder / name for name in (INDEX_FILE, WEIGHTS_FILE))
        if index.is_file():
            self.source = INDEX_FILE
            self.tensors.update(self._read_indexed(single.is_file()))
        elif single.is_file():
            self.tensors.update(read_header(single))
        else:
            found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
            raise ValueError(
                f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE} (found: {found}); weights are read from safetensors only"
            )

    @classmethod
    def single(cls, path: Path) -> TensorFiles:
        """The tensors of one file."""
        files = cls.__new__(cls)
        files._start(path.parent, path.name)
        files.tensors.update(read_header(path))
        return files

    def _start(self, folder: Path, source: str) -> None:
        self.folder, self.source = folder, source
        self.tensors: dict[str, StoredBytes] = {}
        self.bytes_read = 0
        self._open: tuple[str, int] | None = None
        self._buffer: Tensor | None = None

    def close(self) -> None:
        """Close the file that was read last. Reading opens it again."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor; it must be one of `safetensors_header.DTYPES`."""
        return DTYPES[self.tensors[key].dtype]

    def read_into(self, key: str, box: Sequence[slice], target: Tensor, on_read: Callable[[int], object] | None = None) -> None:
        """Copy a box of a tensor into `target`, converted to its dtype.

        Args:
            box: one slice a dimension of the file's tensor, with start and stop and without a step.
            target: as many elements as the box, in its order; on any device.
            on_read: told the bytes of each read.

        Raises:
            ValueError: the file cannot be read, or ends too early.

        Cost: one copy where the target is contiguous, on the CPU and of the file's dtype; else a buffer of 8 MiB more.
        """
        if not target.is_contiguous():
            packed = torch.empty_like(target, memory_format=torch.contiguous_format)
            self.read_into(key, box, packed, on_read)
            target.copy_(packed)
            return
        stored, dtype, flat = self.tensors[key], self.dtype(key), target.view(-1)
        direct = flat.device.type == "cpu" and flat.dtype == dtype
        position = 0
        for batch in _batches(_runs(stored.shape, box, dtype.itemsize)):
            size = sum(length for _, length in batch)
            part = flat[position : position + size // dtype.itemsize]
            staged = part if direct else self._staging(flat.device)[:size].view(dtype)
            memory = memory_of(staged)
            filled = 0
            for start, length in batch:
                self._fill(stored.file, stored.start + start, memory[filled : filled + length])
                filled += length
            if not direct:
                part.copy_(staged)
            position += part.numel()
            self.bytes_read += size
            if on_read is not None:
                on_read(size)
        assert position == flat.numel(), (key, position, flat.numel())

    def _staging(self, device: torch.device) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._buffer

    def _fill(self, name: str, start: int, memory: memoryview) -> None:
        path = self.folder / name
        try:
            if self._open is None or self._open[0] != name:
                self.close()
                self._open = (name, os.open(path, os.O_RDONLY))
            while memory:
                count = os.preadv(self._open[1], [memory], start)
                if count == 0:
                    raise ValueError(
                        f"{path} ends at byte {start}, before its tensors do: it has become shorter; copy or download it again"
                    )
                start, memory = start + count, memory[count:]
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def _read_indexed(self, single_there: bool) -> dict[str, StoredBytes]:
        """All tensors of the files that the index names. What it says of each tensor must be true."""
        weight_map = self._read_index()
        names = sorted(set(weight_map.values()))
        if single_there and WEIGHTS_FILE not in names:
            raise ValueError(
                f"{self.folder} has both {WEIGHTS_FILE} and {INDEX_FILE}, which names other files; programs differ in which of the two"
                " models they load: remove the one that is not meant"
            )
        tensors: dict[str, StoredBytes] = {}
        for name in names:
            if not (self.folder / name).is_file():
                raise ValueError(f"{self.folder / name} is missing, though {INDEX_FILE} names it")
            for key, stored in read_header(self.folder / name).items():
                if key in tensors:
                    raise ValueError(f"{self.folder}: {tensors[key].file} and {name} both hold {key}; keep the file that is meant")
                tensors[key] = stored
        for key, name in weight_map.items():
            if key not in tensors or tensors[key].file != name:
                where = f" ({tensors[key].file} does)" if key in tensors else ""
                raise ValueError(f"{self.folder / name} does not hold {key}, though {INDEX_FILE} says so{where}")
        if len(weight_map) < len(tensors):
            _logger.warning("%s leaves out %d tensors of its files", self.folder / INDEX_FILE, len(tensors) - len(weight_map))
        return tensors

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        try:
            weight_map = parse_json(path.read_bytes()).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"weight_map is {weight_map!r:.40}")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not an index of safetensors files: {error}") from error
        for key, name in weight_map.items():
            # A folder is not trusted with paths: its files are in it (a link there may lead elsewhere, as in the hub's cache).
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", "..") or "\0" in name:
                raise ValueError(f"{path}: {key} is said to be in {name!r}, which is no name of a file in the folder")
        return weight_map


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; the tensor must outlive it."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() if size else 1)).cast("B")


def _runs(shape: Sequence[int], box: Sequence[slice], itemsize: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of each stretch of a row-major tensor that a box is made of, in the box's order."""
    dim, inner = len(shape), itemsize
    while dim and box[dim - 1] == slice(0, shape[dim - 1]):
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield 0, inner
        return
    last = box[dim - 1]
    strides = [math.prod(shape[outer + 1 : dim]) * inner for outer in range(dim - 1)]
    for indices in itertools.product(*(range(part.start, part.stop) for part in box[: dim - 1])):
        start = sum(index * stride for index, stride in zip(indices, strides, strict=True))
        yield start + last.start * inner, (last.stop - last.start) * inner


def _batches(runs: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The runs, cut and grouped so that each group is _CHUNK bytes (the last one less)."""
    batch: list[tuple[int, int]] = []
    room = _CHUNK
    for start, size in runs:
        while size:
            part = min(size, room)
            batch.append((start, part))
            start, size, room = start + part, size - part, room - part
            if room == 0:
                yield batch
                batch, room = [], _CHUNK
    if batch:
        yield batch
