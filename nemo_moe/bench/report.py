"""What a benchmark prints beside its figures: machine, versions, commit, protocol."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_moe.bench.timing import Protocol, Timing


@dataclass(frozen=True)
class Row:
    """What is told of one contender.

    Attributes:
        difference: from the reference, relative: of outputs and gradients in norm (layer), of loss and gradient norm (step);
            the largest.
        peak_mib: see `memory.peak_increase`.
        shares: of this rank, see `shares.shares`.
        shared_batch: its ranks hold the same tokens, those of all ranks of the other rows.
    """

    timing: Timing
    difference: float
    peak_mib: float | None
    shares: Mapping[str, float]
    shared_batch: bool = False


def describe_machine(device: torch.device) -> list[str]:
    """Machine, ranks, versions and commit."""
    ranks = f"{dist.get_world_size()} rank{'s' * (dist.get_world_size() > 1)}, {dist.get_backend()}"
    return [
        f"machine:  {_gpu(device) if device.type == 'cuda' else _cpu()}; {ranks}",
        f"versions: torch {torch.__version__}, python {platform.python_version()}, commit {_commit()}",
    ]


def describe_run(device: torch.device, protocol: Protocol, reference: str) -> list[str]:
    """Lines that make a figure repeatable. `reference` is the pair that all are checked against."""
    return [
        *describe_machine(device),
        f"protocol: random data; every pair checked against {reference} first; warm-up; pairs in turn; median of {protocol.windows} windows"
        f" of about {protocol.window_seconds:g} s (one call or more, host clock between device synchronisations), slowest rank",
        "diff:     largest relative difference from the reference, in norm, of outputs and gradients; of a step: loss, gradient norm",
        f"peak MiB: most memory over what was in use before this pair was built and ran twice, with no other pair alive; largest rank;"
        f" {'by the allocator of torch' if device.type == 'cuda' else 'resident memory of the process, so small figures are rough'}",
        f"shares:   rank 0, under the profiler, {'of the time of all kernels' if device.type == 'cuda' else 'of the time of the calls'};"
        " permutation and wire lie inside dispatch and combine",
    ]


def table(rows: Mapping[str, Row], reference: str) -> list[str]:
    """One line per contender: median, spread, ratio to `reference`, difference, peak memory, shares; then what the marks mean."""
    width = max(len(name) for name in rows) + 2
    lines = [f"{'':{width}}{'median ms':>10}{'min':>9}{'max':>9}{'x ref':>8}{'diff':>9}{'peak MiB':>10}  shares"]
    for name, row in rows.items():
        timing = row.timing
        peak = f"{row.peak_mib:10.1f}" if row.peak_mib is not None else f"{'-':>10}"
        parts = ", ".join(f"{part} {share:.0%}" for part, share in row.shares.items())
        figures = f"{timing.median:10.3f}{timing.smallest:9.3f}{timing.largest:9.3f}{timing.median / rows[reference].timing.median:8.2f}"
        lines.append(f"{name + ' *' * row.shared_batch:{width}}{figures}{row.difference:9.1e}{peak}  {parts}".rstrip())
    if any(row.shared_batch for row in rows.values()):
        lines.append("* every rank holds the tokens of all ranks: as many distinct tokens as in the other rows")
    return lines


def clocks(device: torch.device) -> list[str]:
    """A line about rank 0's clock, to be asked for while it is still warm; nothing on the CPU."""
    if device.type != "cuda":
        return []
    return [f"SM clock right after the last call: {_nvidia_smi(device, 'clocks.sm')} (at most {_nvidia_smi(device, 'clocks.max.sm')})"]


def _cpu() -> str:
    name = platform.processor() or platform.machine()
    try:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} a rank"


def _gpu(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, driver {_nvidia_smi(device, 'driver_version')},"
        f" CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )


def _nvidia_smi(device: torch.device, field: str) -> str:
    uuid = torch.cuda.get_device_properties(device).uuid
    return _output(["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={field}", "--format=csv,noheader"]) or "unknown"


def _commit() -> str:
    """The commit of this file; a package that is installed inside somebody's checkout is not theirs."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    commit = _output([*git, "rev-parse", "--short", "HEAD"])
    if not commit or not _output([*git, "ls-files", here.name]):
        return "unknown (not a checkout)"
    return commit + (" with uncommitted changes" if _output([*git, "status", "--porcelain", "--", str(here.parents[1])]) else "")


def _output(command: list[str]) -> str:
    """What a command prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
