"""The header of a safetensors file, read with suspicion and written by the same rules.

A file is 8 bytes (little-endian length of the header), the header (a JSON object: tensor -> dtype, shape, data_offsets)
and the tensors' bytes, one after the other without a gap. A header that says anything else is refused: files come from
anywhere, and one that was cut off in a download must not fill a model with what happens to be there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit
_METADATA = "__metadata__"


class StoredBytes(NamedTuple):
    """One tensor of a file.

    Attributes:
        file: the file's name.
        dtype: the format's name for it; a key of DTYPES or something that is no weight.
        shape: as the header says.
        start: byte of the file where it begins.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> dict[str, StoredBytes]:
    """The tensors of a file. Reads the header alone.

    Raises ValueError naming the file where it is missing, cannot be read, or is not what a safetensors file must be.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing (or no file)")
    try:
        with path.open("rb", buffering=0) as file:  # a buffer would read on into the first tensor
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ValueError(f"its {size} bytes begin with a header length of {length}")
            header = parse_json(file.read(length))
        return _checked(header, path.name, 8 + length, size)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); copy or download it again") from error


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError where it is none, or says the same key twice."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is expected, found {type(value).__name__}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _checked(header: dict[str, Any], file: str, data_start: int, size: int) -> dict[str, StoredBytes]:
    tensors: list[tuple[int, int, str, StoredBytes]] = []
    for key, entry in header.items():
        if key == _METADATA:
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise ValueError(f"{key} has no dtype, shape and data_offsets")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"{key} has the shape {shape!r} and the data_offsets {offsets!r}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is not None and math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
            needed = math.prod(shape) * dtype.itemsize
            raise ValueError(f"{key} of shape {shape} needs {needed} bytes, and has {offsets[1] - offsets[0]}")
        tensors.append((offsets[0], offsets[1], key, StoredBytes(file, entry["dtype"], tuple(shape), data_start + offsets[0])))
    end = 0
    for start, stop, key, _ in sorted(tensors):
        if start != end or stop < start:
            raise ValueError(f"{key} is at bytes {start} to {stop}, but the tensor before it ends at {end}")
        end = stop
    if data_start + end != size:
        raise ValueError(f"its tensors end at byte {data_start + end}, and it has {size}")
    return {key: stored for _, _, key, stored in tensors}


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def make_header(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> bytes:
    """What a file begins with that holds these (name, shape, dtype) in this order; 8 * n bytes, so that tensors are aligned."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, shape, dtype in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
