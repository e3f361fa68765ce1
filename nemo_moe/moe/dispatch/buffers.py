"""The cache of communication buffers: one per process group and shape class, shared by all layers, grown by all ranks together.

A library's buffer is memory that the ranks of a group have mapped into each other, so building, growing and freeing one
is collective. The rules:

- A buffer is built on first use. When a batch outgrows it, it is replaced by a larger one. The size that is asked for is
  the same on all ranks (they agree on it first), so all of them do this at the same call.
- A handle of a forward whose backward is still to come keeps the buffer that it was made with; a replaced buffer is freed
  at the next growth or release at which no rank has such a handle. It is never freed by the garbage collector, which runs
  at another time on each rank.
- Nothing is allocated while a CUDA graph is captured or torch.compile traces: that raises.
- `destroy_buffers` frees all, on all ranks, before the process groups are destroyed.

Layers share memory here, never state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SMALLEST = 512  # tokens; below that a buffer costs next to nothing, and growing costs seconds


class CommBuffer:
    """One buffer of a library, and what it was built for.

    Attributes:
        kind: the dispatcher's name. group: the ranks that have it mapped. shape: its shape class.
        size: what it was built for, in the unit of its kind (tokens a rank, or bytes).
        most_on_device, most_tokens: [1] int64, the most tokens that a rank has sent, and its copy for the host; kept where
            the size does not tell.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup, shape: tuple[Any, ...], size: int, library: Any, device: torch.device) -> None:
        self.kind, self.group, self.shape, self.size, self.device = kind, group, shape, size, device
        self.most_on_device: Tensor | None = None
        self.most_tokens: Tensor | None = None
        self._library: Any = library
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def library(self) -> Any:
        """The library's object. Raises ValueError where the buffer has been freed."""
        if self._library is None:
            raise ValueError(
                f"the {self.kind} buffer of this handle has been freed: call destroy_deepep_buffers() or reset_hybrid_ep_buffer() only"
                " when no backward is still to come"
            )
        return self._library

    def keep_for(self, handle: Any) -> None:
        """Do not free this buffer while `handle` lives."""
        self._users.add(handle)

    @property
    def in_use(self) -> bool:
        return len(self._users) > 0

    def destroy(self) -> None:
        """Free it. Collective, as the library's own release is."""
        library, self._library = self._library, None
        release = getattr(library, "destroy", None)
        if release is not None:
            release()


_buffers: dict[tuple[Any, ...], CommBuffer] = {}
built = "0"  # how many have been built; text, so that torch.compile takes it for a constant and compiles again when it changes
_replaced: list[CommBuffer] = []


def get_buffer(
    kind: str,
    group: dist.ProcessGroup,
    shape: tuple[Any, ...],
    size: int,
    build: Callable[[int], Any],
    device: torch.device,
) -> CommBuffer:
    """The buffer of a group and shape class, of at least `size`. Collective where it is built or grown.

    Args:
        kind: the dispatcher's name.
        shape: what tells apart buffers that cannot serve each other's calls.
        size: the same on all ranks of `group`.
        build: makes the library's buffer of that size; collective.
        device: of the tensors that it will move.

    Raises:
        ValueError: there is none of that size and a CUDA graph is being captured, or torch.compile traces.
    """
    key = (kind, group, *shape)
    found = _buffers.get(key)
    if found is not None and found.size >= size:
        return found
    refuse_while_capturing(kind, f"has a buffer for {found.size}, and needs one for {size}" if found else "has no buffer yet")
    _settle(device)
    if found is not None:
        _replaced.append(_buffers.pop(key))
    _free_replaced(group, device)
    buffer = CommBuffer(kind, group, shape, size, build(size), device)
    _buffers[key] = buffer
    global built
    built = str(int(built) + 1)
    return buffer


def find_buffer(kind: str, group: dist.ProcessGroup, shape: tuple[Any, ...]) -> CommBuffer:
    """The buffer that an eager call has built. Raises ValueError, which asks for that call, where there is none."""
    found = _buffers.get((kind, group, *shape))
    if found is None:
        refuse_while_capturing(kind, "has no buffer yet", always=True)
    assert found is not None
    return found


def refuse_while_capturing(kind: str, problem: str, *, always: bool = False) -> None:
    """Raise ValueError where no buffer may be allocated now; `always` where the caller knows that none may."""
    if always or is_sync_free():
        raise ValueError(
            f"backend.dispatcher {kind!r} {problem}, and none can be allocated while a CUDA graph is captured or under torch.compile;"
            " run the layer once before, eagerly, on all ranks, with as many tokens a rank as will be captured"
        )


def is_sync_free() -> bool:
    """Whether the host may not wait for the device now: a CUDA graph is being captured, or torch.compile is at work."""
    return torch.compiler.is_compiling() or is_capturing()


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def agree_on_most(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest `number` of the ranks. Collective; one host synchronisation."""
    most = torch.full((1,), number, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most)


def rounded_capacity(num_tokens: int) -> int:
    """Tokens a rank to build a buffer for, so that batches that vary a little do not rebuild it: at most a quarter more.

    A multiple of 128, at least 512, in steps of a quarter of a power of two.
    """
    if num_tokens <= _SMALLEST:
        return _SMALLEST
    step = max(128, 2 ** ((num_tokens - 1).bit_length() - 3))
    return -(-num_tokens // step) * step


def destroy_buffers(kind: str) -> None:
    """Free all buffers of a kind, in the order in which they were built. Collective over the ranks of each buffer's group."""
    refuse_while_capturing(kind, "is asked to free its buffers")
    mine = [buffer for buffer in (*_replaced, *_buffers.values()) if buffer.kind == kind]
    for buffer in mine:
        _settle(buffer.device)
        dist.barrier(buffer.group)
        buffer.destroy()
    _replaced[:] = [buffer for buffer in _replaced if buffer.kind != kind]
    for key in [key for key, buffer in _buffers.items() if buffer.kind == kind]:
        del _buffers[key]


def destroy_deepep_buffers() -> None:
    """Free all DeepEP buffers. Call it on every rank, when no backward is still to come and before process groups end."""
    destroy_buffers("deepep")


def reset_hybrid_ep_buffer() -> None:
    """Free all HybridEP buffers. Call it on every rank, when no backward is still to come and before process groups end."""
    destroy_buffers("hybridep")


def destroy_all_buffers() -> None:
    """Free the buffers of all dispatchers; collective. A run does this before it ends its process group."""
    for kind in sorted({buffer.kind for buffer in (*_replaced, *_buffers.values())}):
        destroy_buffers(kind)


def buffer_count(kind: str) -> int:
    """How many buffers of a kind are allocated here, replaced ones that await their handles included."""
    return sum(buffer.kind == kind for buffer in (*_replaced, *_buffers.values()))


def require_same_on_all_ranks(group: dist.ProcessGroup, found: str) -> None:
    """Raise ValueError on all ranks where they came to different kernels, which could only hang. Collective."""
    answers: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, found, group=group)
    different = [rank for rank, answer in enumerate(answers) if answer != answers[0]]
    if different:
        raise ValueError(
            f"the ranks of an expert-parallel group came to different kernels: rank 0 to {answers[0]}, rank {different[0]} to"
            f" {answers[different[0]]}; install the same on all nodes"
        )


def _free_replaced(group: dist.ProcessGroup, device: torch.device) -> None:
    """Free the replaced buffers of `group` that no rank has a handle of. Collective."""
    mine = [buffer for buffer in _replaced if buffer.group is group]
    if not mine:
        return
    in_use = torch.tensor([int(buffer.in_use) for buffer in mine], dtype=torch.int32).to(device)
    dist.all_reduce(in_use, op=dist.ReduceOp.MAX, group=group)
    for buffer, used in zip(mine, in_use.tolist(), strict=True):
        if not used:
            buffer.destroy()
            _replaced.remove(buffer)


def _settle(device: torch.device) -> None:
    """Wait for kernels that may still work in a buffer."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
