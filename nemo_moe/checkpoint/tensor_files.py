"""A folder of safetensors files as one table of tensors, of which boxes can be read.

The safetensors library reads the files, and refuses those whose header lies about them. It maps them: a box is a view of
the file's pages, which count as memory that the system can take back, until it is copied. Which files of a folder are to
be believed is decided here.

Left out: a file that is cut short while it is read. The system then ends the process with SIGBUS, as it does for every
mapped file; whoever replaces weights moves new files into place, which does not touch a reader.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXTRA_FILE = "extra_tensors.safetensors"  # what the family's format has no place for: the router's expert biases
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # that weights can have
_logger = logging.getLogger(__name__)


class StoredTensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        file: the file's name.
        position: how many tensors of the file lie before it.
        dtype: the format's name for it; a key of DTYPES or something that is no weight.
        shape: as the header says.
    """

    file: str
    position: int
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """The tensors of a folder: those of the files that model.safetensors.index.json names, else of model.safetensors.

    Attributes:
        folder: where they are.
        source: the file that lists them all: the index, or the one file.
        tensors: tensor name -> where it is.

    Raises ValueError naming the file that is missing, damaged, outside the folder, or at odds with another one.
    """

    def __init__(self, folder: Path, single: str | None = None) -> None:
        """`single` is the one file to read, whatever else there is."""
        self.folder = folder
        self._open: tuple[str, Any] = ("", None)
        if single is None and (folder / INDEX_FILE).is_file():
            self.source = INDEX_FILE
            self.tensors = self._read_indexed()
            return
        self.source = single or WEIGHTS_FILE
        if not (folder / self.source).is_file():
            found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
            raise ValueError(
                f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE} (found: {found}); weights are read from safetensors only"
            )
        self.tensors = self._read_header(self.source)

    def read(self, key: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor: a view of the file's pages, not to be written to. A file is opened where its tensors begin.

        Args:
            box: one slice a dimension of the file's tensor.

        Raises:
            ValueError: the file has been removed, cut short or replaced since it was looked at.
        """
        name = self.tensors[key].file
        try:
            if self._open[0] != name:
                self._open = (name, safe_open(self.folder / name, framework="pt"))
            part: Tensor = self._open[1].get_slice(key)[box]
        except (SafetensorError, OSError) as error:
            raise self._unreadable(name, error) from error
        return part

    def size(self, key: str, box: tuple[slice, ...]) -> int:
        """Bytes of a box of a tensor of a type in DTYPES."""
        return math.prod(part.stop - part.start for part in box) * DTYPES[self.tensors[key].dtype].itemsize

    def _unreadable(self, name: str, error: Exception) -> ValueError:
        return ValueError(f"{self.folder / name} is not a readable safetensors file ({error}); copy or download it again")

    def _read_header(self, name: str) -> dict[str, StoredTensor]:
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.offset_keys()}
        except (SafetensorError, OSError) as error:
            raise self._unreadable(name, error) from error
        header = enumerate(slices.items())
        return {key: StoredTensor(name, position, part.get_dtype(), tuple(part.get_shape())) for position, (key, part) in header}

    def _read_indexed(self) -> dict[str, StoredTensor]:
        """All tensors of the files that the index names. What it says of each tensor must be true."""
        weight_map = self._read_index()
        names = sorted(set(weight_map.values()))
        if (self.folder / WEIGHTS_FILE).is_file() and WEIGHTS_FILE not in names:
            raise ValueError(
                f"{self.folder} has both {WEIGHTS_FILE} and {INDEX_FILE}, which names other files; programs differ in which of the two"
                " models they load: remove the one that is not meant"
            )
        tensors: dict[str, StoredTensor] = {}
        for name in names:
            if not (self.folder / name).is_file():
                raise ValueError(f"{self.folder / name} is missing, though {INDEX_FILE} names it")
            for key, stored in self._read_header(name).items():
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
            index = json.loads(path.read_text(encoding="utf-8"))
            weight_map = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(weight_map, dict):
                raise ValueError(f"a JSON object with a weight_map is expected, found {index!r:.40}")
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not an index of safetensors files: {error}") from error
        for key, name in weight_map.items():
            # A folder is not trusted with paths: its files are in it (a link there may lead elsewhere, as in the hub's cache).
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", "..") or "\0" in name:
                raise ValueError(f"{path}: {key} is said to be in {name!r}, which is no name of a file in the folder")
        return weight_map
