"""The process a rank runs in: process group, device, threads, seeds, and agreement on errors.

Ranks are started by torchrun (or anything that sets its environment variables); without them the run has one process
and still gets a process group, so that the code below knows one case only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nemo_moe.moe.dispatch.buffers import destroy_all_buffers

T = TypeVar("T")


class StartError(ValueError):
    """The run cannot start, for a reason that all ranks know; one message is enough."""


def world_size() -> int:
    """Ranks of this run: of the process group if there is one, else what torchrun says, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Ranks of this run on this node, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_device(kind: str) -> torch.device:
    """This rank's device: cuda:LOCAL_RANK (made current) or the CPU, whose cores the local ranks share out."""
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    # torchrun gives every process one thread, torch alone gives every process all cores; both waste a CPU.
    torch.set_num_threads(max(1, _available_cores() // local_world_size()))
    return torch.device(kind)


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def process_group(backend: str, timeout_minutes: float, device: torch.device) -> Iterator[dist.Store | None]:
    """The default process group for the time of a run. One that exists already is used and left alone.

    Yields the store it was made with, which all ranks can reach; None for a group that existed.

    Args:
        backend: "gloo" or "nccl".
        timeout_minutes: how long a collective may wait before the job is ended.
        device: this rank's.

    Raises:
        StartError: ranks came with different backends; on all ranks, before any of them waits for the others' group.
    """
    if dist.is_initialized():
        yield None
        return
    timeout = timedelta(minutes=timeout_minutes)
    bound = device if device.type == "cuda" else None
    if "RANK" in os.environ:
        store, rank, ranks = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        _require_one_backend(store, rank, ranks, backend)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=bound)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound)
    alone = dist.get_world_size() == 1
    try:
        yield store
    except BaseException:
        # After a failure the other ranks may be inside a collective, and taking the group down could wait for them.
        if alone:
            dist.destroy_process_group()
        raise
    destroy_all_buffers()
    dist.destroy_process_group()


def _require_one_backend(store: dist.Store, rank: int, ranks: int, backend: str) -> None:
    """Raise StartError on all ranks where they came with different backends: each resolves `device: auto` by itself."""
    store.set(f"nemo_moe/backend/{rank}", f"{backend} {socket.gethostname()}")
    if rank == 0:
        found = [text.decode().split(" ", 1) for text in store.multi_get([f"nemo_moe/backend/{other}" for other in range(ranks)])]
        store.set("nemo_moe/backends", _about_backends(found))
    message = store.get("nemo_moe/backends").decode()
    if message:
        raise StartError(message)


def _about_backends(found: list[list[str]]) -> str:
    """What is wrong with the (backend, host) of each rank; nothing where the backends are one."""
    by_backend: dict[str, list[int]] = {}
    for rank, (backend, _) in enumerate(found):
        by_backend.setdefault(backend, []).append(rank)
    if len(by_backend) == 1:
        return ""
    places = {backend: sorted({found[rank][1] for rank in members}) for backend, members in by_backend.items()}
    kinds = {"gloo": "the CPU", "nccl": "CUDA"}
    described = " and ".join(
        f"{kinds.get(backend, backend)} on {len(members)} ranks (the first is rank {members[0]}; on {', '.join(places[backend][:4])}"
        f"{' and more' if len(places[backend]) > 4 else ''})"
        for backend, members in by_backend.items()
    )
    return (
        f"device: the ranks did not come to the same one: {described}. Repair the CUDA driver or torch of the machines that see no"
        " CUDA device, or set device to cpu for all"
    )


def require_same_on_all_ranks(value: str, message: str) -> None:
    """Raise StartError(message, and the ranks that differ from rank 0) on all ranks where `value` is not one. Collective."""
    values: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        listed = ", ".join(map(str, different[:8])) + (" and more" if len(different) > 8 else "")
        raise StartError(f"{message} (rank{'s' * (len(different) > 1)} {listed} of {len(values)} against rank 0)")


def agreed(action: Callable[[], T]) -> T:
    """Run `action` on all ranks; where it fails on any, fail on all with the first rank's message. Collective.

    For the part of a run that may fail for reasons a user can fix, on one rank only: a folder that only rank 0 writes,
    a tensor that only one rank's experts miss. Without this the other ranks would wait for a collective.

    Args:
        action: not collective itself: where it fails on one rank, the others would wait inside it.

    Raises:
        StartError: `action` raised ValueError, OSError or ImportError on some rank.
    """
    result: T | None = None
    message: str | None = None
    cause: Exception | None = None
    try:
        result = action()
    except (ValueError, OSError, ImportError) as error:
        message, cause = str(error), error
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    failed = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    if failed:
        rank, text = failed[0]
        where = "" if len(failed) == len(messages) else f" (rank {rank})"
        raise StartError(f"{text}{where}") from cause
    return result  # type: ignore[return-value]


def decided_by_rank_zero(action: Callable[[], T]) -> T:
    """The picklable result of `action`, which rank 0 alone runs. Collective.

    For what ranks could see differently, such as which files are there: on a network file system one may still see what
    another has just replaced.

    Raises StartError on all ranks where it raised ValueError, OSError or ImportError.
    """
    result = [agreed(lambda: action() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(result, src=0)
    return result[0]  # type: ignore[return-value]
