"""What a benchmark prints beside its figures: machine, versions, commit, protocol."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_moe.bench.timing import WINDOW_SECONDS, WINDOWS, Timing


def describe_run(device: torch.device) -> list[str]:
    """Lines that make a figure repeatable."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine = f"{dist.get_world_size()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"
    return [
        f"machine:  {machine}; {dist.get_world_size()} ranks, {dist.get_backend()}",
        f"versions: torch {torch.__version__}, python {platform.python_version()}, commit {_commit()}",
        f"protocol: random data, warm-up, contenders in turn, median of {WINDOWS} windows of about {WINDOW_SECONDS} s, slowest rank",
    ]


def table(rows: dict[str, Timing], reference: str, extra: dict[str, dict[str, float]] | None = None) -> list[str]:
    """One line per contender: median, spread, ratio to `reference`, peak memory, shares."""
    lines = [f"{'':26}{'median ms':>10}{'min':>9}{'max':>9}{'x ref':>8}{'peak MiB':>10}  shares of the time"]
    for name, timing in rows.items():
        ratio = timing.median / rows[reference].median
        peak = f"{timing.peak_mib:10.0f}" if timing.peak_mib is not None else f"{'-':>10}"
        parts = ", ".join(f"{part} {share:.0%}" for part, share in (extra or {}).get(name, {}).items())
        lines.append(f"{name:26}{timing.median:10.3f}{timing.smallest:9.3f}{timing.largest:9.3f}{ratio:8.2f}{peak}  {parts}")
    return lines


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
        return found.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown (not a checkout)"
