"""A folder of safetensors files as one table of tensors, of which slices can be read.

Opening reads the headers alone; a slice reads its own bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXTRA_FILE = "extra_tensors.safetensors"  # what the family's format has no place for: the router's expert biases
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class TensorFiles:
    """The tensors of a folder: those of model.safetensors.index.json, else of model.safetensors.

    Attributes:
        folder: where they are.
        files: tensor name -> file name.

    Raises ValueError naming the file that is missing, unreadable or does not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        if (folder / INDEX_FILE).is_file():
            self.files = self._read_index()
        elif (folder / WEIGHTS_FILE).is_file():
            self.files = dict.fromkeys(self._open(WEIGHTS_FILE).keys(), WEIGHTS_FILE)
        else:
            found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
            raise ValueError(
                f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE} (found: {found}); weights are read from safetensors only"
            )

    @classmethod
    def single(cls, path: Path) -> TensorFiles:
        """The tensors of one file."""
        files = cls.__new__(cls)
        files.folder, files._handles = path.parent, {}
        files.files = dict.fromkeys(files._open(path.name).keys(), path.name)
        return files

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        """Raises ValueError unless it is a floating type that weights can have."""
        name = self._slice(key).get_dtype()
        if name not in _DTYPES:
            raise ValueError(f"{key} in {self.folder / self.files[key]} is of type {name}; legal: {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def read(self, key: str, index: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, on the CPU, in the file's dtype."""
        tensor: Tensor = self._slice(key)[index]
        return tensor

    def _slice(self, key: str) -> Any:
        return self._open(self.files[key]).get_slice(key)

    def _open(self, name: str) -> Any:
        if name not in self._handles:
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing, though {INDEX_FILE} names it")
            try:
                self._handles[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is not a readable safetensors file ({error}); copy or download it again") from error
        return self._handles[name]

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        try:
            weight_map: dict[str, str] = json.loads(path.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not an index of safetensors files: {error!r}") from error
        held = {name: set(self._open(name).keys()) for name in sorted(set(weight_map.values()))}
        for key, name in weight_map.items():
            if key not in held[name]:
                raise ValueError(f"{self.folder / name} does not hold {key}, though {INDEX_FILE} says so")
        return weight_map
