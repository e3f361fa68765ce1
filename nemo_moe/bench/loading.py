"""How long and how much memory a Hugging Face folder takes to load, beside a plain read of the same files.

Rank 0 writes a random Qwen3-MoE folder (bf16) into a temporary folder; the ranks load it with fsdp and ep of as many as
they are, and then each reads its share of the files' bytes in order, into one small buffer, and throws them away: the
floor that no loader gets below. The two take turns, with the files in the page cache and without. A third figure is what
the system takes to hand out as much new memory as the parameters need, which no loader can save either: the first write to
each page of a new model can cost more than reading a cached file.

Memory is measured in a load of its own, since looking takes time. Anonymous memory (the process's own) is told apart from
pages of files that it has mapped, which the system can take back: only the kernel's RssAnon and RssFile tell the two
apart, and they keep no maximum, so they are looked at every 2 ms.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.bench.layer import WrongResult
from nemo_moe.bench.memory import free_what_nobody_holds, status_bytes
from nemo_moe.bench.timing import synchronize
from nemo_moe.checkpoint.hf import load_hf_folder, write_hf_folder
from nemo_moe.checkpoint.shards import local_shards
from nemo_moe.checkpoint.together import SaveError
from nemo_moe.config import BackendConfig
from nemo_moe.distributed.mesh import MeshSizes, build_meshes
from nemo_moe.distributed.parallelize import parallelize
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from nemo_moe.train.runtime import StartError, agreed

_MIB = 2**20
_CHUNK = 8 * _MIB
_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Measured:
    """One rank. None where the machine does not tell.

    Attributes:
        held: bytes of its parameters. read: bytes of files that fill them.
        anon, file_pages: the most anonymous memory, and pages of mapped files, above what was there before the load.
        peak: the most resident memory of any kind above that, by the kernel's own maximum.
        seconds: (load, plain read, filling new memory) of every turn, by "warm" or "cold".
    """

    held: int
    read: int
    anon: float | None
    file_pages: float | None
    peak: float | None
    seconds: dict[str, list[tuple[float, float, float]]]


def benchmark_loading(
    *, gigabytes: float, parent: str | None, dtype: torch.dtype, repeats: int, max_shard_bytes: int, device: torch.device
) -> list[str]:
    """Write, load, report. Collective.

    Args:
        gigabytes: of weights in the folder, about (10^9 bytes).
        parent: where the temporary folder is made; None is the system's place. All ranks must see it.
        dtype: of the parameters: torch.float32 as in training, torch.bfloat16 as in the files.
        repeats: turns, warm and cold each.

    Returns:
        The lines of the report; the same on all ranks.

    Raises:
        StartError: the folder cannot be written or read. WrongResult: a parameter is not what was written.
    """
    config = _config(gigabytes, dist.get_world_size())
    with _temporary_folder(parent) as folder:
        _write(config, folder, max_shard_bytes)
        paths = sorted(folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in paths)
        model, measured = _measure_memory(config, folder, dtype, device)
        _check_values(model)
        del model
        cached: dict[str, list[float | None]] = {"warm": [], "cold": []}
        for _ in range(repeats):
            for state in ("warm", "cold"):
                turn = []
                for action in (lambda: _timed_load(config, folder, dtype, device), lambda: _timed_read(paths, size)):
                    cached[state].append(_prepare_cache(paths, size, drop=state == "cold"))
                    turn.append(action())
                measured.seconds[state].append((turn[0], turn[1], _timed_fill(measured.held, device)))
    ranks: list[Measured] = [measured] * dist.get_world_size()
    dist.all_gather_object(ranks, measured)
    return _report(config, ranks, len(paths), size, cached, dtype)


def _config(gigabytes: float, ranks: int) -> Qwen3MoeConfig:
    """Layers enough for the size; experts that every number of ranks divides."""
    hidden = 1024 if gigabytes >= 0.3 else 128
    experts = -(-16 // ranks) * ranks
    vocabulary = 8 * hidden
    layer = hidden * (2 * hidden + 2 * hidden // 4 + experts * 3 * hidden // 2)
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocabulary * hidden) / layer))
    return Qwen3MoeConfig.from_hf(
        {
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": hidden,
            "moe_intermediate_size": hidden // 2,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": hidden // 16,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "torch_dtype": "bfloat16",
        }
    )


@contextmanager
def _temporary_folder(parent: str | None) -> Iterator[Path]:
    """Made and removed by rank 0."""
    made: list[str | None] = [None]

    def make() -> None:
        if dist.get_rank() == 0:
            made[0] = tempfile.mkdtemp(prefix="nemo-moe-loading-", dir=parent)

    agreed(make)
    dist.broadcast_object_list(made, src=0)
    folder = Path(str(made[0]))
    try:
        yield folder
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _write(config: Qwen3MoeConfig, folder: Path, max_shard_bytes: int) -> None:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config, BackendConfig())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def fetch(name: str, dtype: torch.dtype) -> Tensor | None:
        return _values(name, shapes[name]).to(dtype) if dist.get_rank() == 0 else None

    try:
        write_hf_folder(model, fetch, folder, rank=dist.get_rank(), max_shard_bytes=max_shard_bytes)
    except SaveError as error:
        raise StartError(f"{error}; give a folder with room by --folder") from error


def _values(name: str, shape: torch.Size) -> Tensor:
    """fp32, exact in bf16, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.empty(shape).random_(-128, 128, generator=torch.Generator().manual_seed(seed)).div_(64)


def _new_model(config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device) -> Qwen3MoeForCausalLM:
    ranks = dist.get_world_size()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config, BackendConfig()).to(dtype)
    train = SimpleNamespace(activation_checkpointing="none")
    meshes = build_meshes(MeshSizes(dp_replicate=1, fsdp=ranks, ep=ranks), device.type)
    parallelize(model, meshes, SimpleNamespace(precision="fp32", train=train))
    model.to_empty(device=device)
    model.reset_buffers()
    return model


def _measure_memory(config: Qwen3MoeConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Qwen3MoeForCausalLM, Measured]:
    """A load that is looked at."""
    model = _new_model(config, dtype, device)
    read = 0

    def progress(_done: int, total: int) -> None:
        nonlocal read
        read = total

    free_what_nobody_holds()
    before = _resident()
    maximum = _resets_maximum()
    with _watching() as most:
        agreed(lambda: load_hf_folder(model, folder, progress=progress))
    peak = status_bytes("VmHWM") - before["VmRSS"] if maximum and before is not None else None
    increases = {key: most[key] - before[key] for key in ("RssAnon", "RssFile")} if before is not None else {}
    held = sum(shard.tensor.nbytes for shard in local_shards(model))
    return model, Measured(held, read, increases.get("RssAnon"), increases.get("RssFile"), peak, {"warm": [], "cold": []})


def _resident() -> Any:
    """Bytes by kind; None where the system does not tell."""
    try:
        return {key: status_bytes(key) for key in ("RssAnon", "RssFile", "VmRSS")}
    except OSError:
        return None


def _resets_maximum() -> bool:
    """Begin a new maximum of resident memory. Some sandboxes accept that and do nothing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return status_bytes("VmHWM") - status_bytes("VmRSS") < _MIB
    except OSError:
        return False


@contextmanager
def _watching() -> Iterator[dict[str, float]]:
    """The most memory of each kind while the block runs, by a thread that looks."""
    most: dict[str, float] = {}
    over = threading.Event()

    def look() -> None:
        while True:
            ended = over.wait(_LOOK_SECONDS)
            now = _resident()
            if now is not None:
                most.update({key: max(value, most.get(key, 0.0)) for key, value in now.items()})
            if ended:
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def _check_values(model: Qwen3MoeForCausalLM) -> None:
    """First and last parameters, and the last layer's experts, are what was written; on all ranks or none."""

    def check() -> None:
        shards = local_shards(model)
        experts = [shard for shard in shards if ".experts." in shard.name][-2:]
        for shard in (shards[0], *experts, shards[-1]):
            box = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.tensor.shape, strict=True))
            if not torch.equal(shard.tensor.cpu().float(), _values(shard.name, torch.Size(shard.global_shape))[box]):
                raise ValueError(f"{shard.name} was not loaded as it was written")

    try:
        agreed(check)
    except StartError as error:
        raise WrongResult(str(error)) from error


def _timed_load(config: Qwen3MoeConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> float:
    """Into memory that is new, as in a start; building the model is not counted."""
    free_what_nobody_holds()
    model = _new_model(config, dtype, device)
    return _seconds(lambda: load_hf_folder(model, folder), device)


def _timed_fill(size: int, device: torch.device) -> float:
    free_what_nobody_holds()
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return _seconds(memory.zero_, device)


def _timed_read(paths: list[Path], size: int) -> float:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    first, last = size * rank // ranks, size * (rank + 1) // ranks
    return _seconds(lambda: _read_range(paths, first, last), torch.device("cpu"))


def _read_range(paths: list[Path], first: int, last: int) -> None:
    """Bytes [first, last) of the files laid end to end."""
    buffer = memoryview(bytearray(_CHUNK))
    begin = 0
    for path in paths:
        size = path.stat().st_size
        position, stop = max(first - begin, 0), min(last - begin, size)
        begin += size
        if position >= stop:
            continue
        with path.open("rb", buffering=0) as file:
            file.seek(position)
            while position < stop:
                position += file.readinto(buffer[: min(_CHUNK, stop - position)]) or stop


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def _prepare_cache(paths: list[Path], size: int, *, drop: bool) -> float | None:
    """Bring the files into the page cache, or ask for them to be dropped; what share of them is in it then. Collective."""
    dist.barrier()
    if int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0:
        for path in paths:
            with path.open("rb") as file:
                if drop and hasattr(os, "posix_fadvise"):
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not drop:
            _read_range(paths, 0, size)
    dist.barrier()
    shares = [_cached_share(path) for path in paths]
    if any(share is None for share in shares):
        return None
    return sum((share or 0.0) * path.stat().st_size for share, path in zip(shares, paths, strict=True)) / size


def _cached_share(path: Path) -> float | None:
    """The share of a file's pages that are in the page cache; None where the system does not tell."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            found = (ctypes.c_ubyte * pages)()
            anchor = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), found)
            del anchor
    except (OSError, AttributeError):
        return None
    return None if failed else sum(page & 1 for page in found) / pages


def _report(
    config: Qwen3MoeConfig, ranks: list[Measured], files: int, size: int, cached: dict[str, list[float | None]], dtype: torch.dtype
) -> list[str]:
    states = ("warm", "cold")
    heads = "".join(f"{f'{state} s':>9}{'GB/s':>7}" for state in states)
    lines = [
        f"loading: {size / 1e9:.2f} GB of bf16 in {files} file{'s' * (files > 1)} ({config.num_hidden_layers} layers, {config.num_experts}"
        f" experts), fsdp {len(ranks)} x ep {len(ranks)}, parameters {str(dtype).removeprefix('torch.')}",
        "MiB:     anon, file pages and peak are the most above what was resident before the load: the process's own memory, pages of",
        "         mapped files, and all kinds together by the kernel's maximum; held is what the parameters take",
        "",
        f"{'':8}{'held MiB':>10}{'read MiB':>10}{'anon MiB':>10}{'x held':>8}{'file pages':>12}{'peak MiB':>10}{heads}",
    ]
    for index, rank in enumerate(ranks):
        ratio = "-" if rank.anon is None else f"{rank.anon / rank.held:.3f}"
        times = ""
        for state in states:
            seconds = statistics.median(load for load, _, _ in rank.seconds[state])
            times += f"{seconds:9.3f}{rank.read / seconds / 1e9:7.2f}"
        pages = _mib(rank.file_pages)
        figures = f"{rank.held / _MIB:10.1f}{rank.read / _MIB:10.1f}{_mib(rank.anon):>10}{ratio:>8}{pages:>12}{_mib(rank.peak):>10}"
        lines.append(f"{f'rank {index}':8}{figures}{times}")
    lines.append("")
    for state in states:
        turns = list(zip(*(rank.seconds[state] for rank in ranks), strict=True))
        load, plain, fill = (statistics.median(max(rank[what] for rank in turn) for turn in turns) for what in range(3))
        lines += [
            f"{state}: load {load:.3f} s ({size / load / 1e9:.2f} GB/s over all ranks), plain read {plain:.3f} s ({size / plain / 1e9:.2f}"
            f" GB/s), new memory {fill:.3f} s;",
            f"      load / plain read {load / plain:.2f}, load / (plain read + new memory) {load / (plain + fill):.2f};"
            f" median of {len(turns)}, slowest rank; {_about_cache(cached[state])}",
        ]
    lines += [
        "plain read: each rank its share of the bytes, in order, into one 8 MiB buffer; new memory: the first write to as many bytes as",
        "            the parameters have; cold: dropped from the page cache of this machine, not from what a disk or a host may keep",
    ]
    return lines


def _about_cache(shares: list[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        return "how much of the files was in the page cache is unknown here"
    return f"{min(known):.0%} to {max(known):.0%} of the files in the page cache before"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / _MIB:.1f}"
