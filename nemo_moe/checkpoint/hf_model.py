"""What a model offers to be loaded from and saved as a Hugging Face folder, and how boxes of the two overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nemo_moe.checkpoint.shards import LocalShard, ShardedModel


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


class Whole(NamedTuple):
    """A parameter that is one tensor of the file; an `HFTensor`."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, key: str, shape: Sequence[int]) -> Whole:
        """Parameter of `shape`, stored as `key`."""
        return cls(key, tuple(shape), (0,) * len(shape))


class Box(NamedTuple):
    """A part of a tensor, as indices into this rank's local one and into the file's."""

    local: tuple[slice, ...]
    file: tuple[slice, ...]


def overlap(shard: LocalShard, piece: HFTensor) -> Box | None:
    """The part of a file's tensor that this rank holds; None where that is nothing."""
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
    return Box(tuple(local), tuple(file))


def within(shape: Sequence[int], piece: HFTensor) -> tuple[slice, ...]:
    """Where a file's tensor is in a whole parameter of `shape`."""
    sizes = (1,) * (len(shape) - len(piece.shape)) + piece.shape
    return tuple(slice(start, start + size) for start, size in zip(piece.offsets, sizes, strict=True))
