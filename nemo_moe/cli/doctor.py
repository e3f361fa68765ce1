"""`nemo-moe doctor`: which dispatcher x experts pairs run on this machine, with a reason for each that does not.

Each backend is asked for what it needs here, as a run would ask it; nothing is built and no rank is started. With a
recipe, the recipe is resolved as its ranks would, and the exit code says whether it can run. What only several nodes can
tell (that they have the same libraries, and reach each other) is left to the start of a run.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from typing import Any

_EXAMPLES = """examples:
  nemo-moe doctor                                                  what runs here, and why the rest does not
  nemo-moe doctor demo                                             whether a recipe runs here
  nemo-moe doctor demo --nproc-per-node 8 backend.dispatcher=deepep precision=bf16 distributed.ep_size=8
"""


def run_doctor(argv: Sequence[str]) -> int:
    """Print the report.

    Returns:
        The exit code: 0; 1 where the given recipe cannot run here.
    """
    parser = argparse.ArgumentParser(
        prog="nemo-moe doctor",
        description="Say which dispatchers and experts run on this machine, and why the others do not.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", help="a recipe to check too: the name of one that ships, or the path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks that the recipe would run on (default: the CUDA devices of this machine, or what its sizes need on a CPU)",
    )
    arguments = parser.parse_intermixed_args(list(argv))
    if arguments.nproc_per_node is not None and arguments.nproc_per_node < 1:
        parser.error(f"--nproc-per-node must be 1 or more, found {arguments.nproc_per_node}")
    print("\n".join([*_machine(), "", *_matrix()]))
    if arguments.recipe is None:
        return 0
    lines, runs = _recipe(arguments.recipe, arguments.overrides, arguments.nproc_per_node)
    print("\n".join(["", *lines]))
    return 0 if runs else 1


def _machine() -> list[str]:
    import torch

    from nemo_moe import __version__
    from nemo_moe.availability import cuda_home

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    found = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "no CUDA device"
    toolkit = cuda_home()
    return [
        f"nemo_moe {__version__}, python {platform.python_version()}, torch {torch.__version__}",
        f"devices: {found}; CUDA of torch: {torch.version.cuda or 'none'}; CUDA toolkit: {toolkit or 'none'}",
    ]


def _matrix() -> list[str]:
    """Precisions of each pair that runs, or the numbers of the reasons below the table."""
    from nemo_moe.registry import DISPATCHERS, EXPERTS

    reasons: list[str] = []
    problems = {
        (kind, name): _problem(registry, name)
        for kind, registry in (("dispatcher", DISPATCHERS), ("experts", EXPERTS))
        for name in registry
    }

    def cell(dispatcher: str, experts: str) -> str:
        found = [text for text in (problems["dispatcher", dispatcher], problems["experts", experts]) if text is not None]
        both = [name for name in DISPATCHERS.get(dispatcher).precisions if name in EXPERTS.get(experts).precisions]
        if not found and not both:
            found = [f"{dispatcher} and {experts} compute in no common precision"]
        for text in found:
            if text not in reasons:
                reasons.append(text)
        return "no: " + " ".join(f"[{reasons.index(text) + 1}]" for text in found) if found else " ".join(both)

    table = [["dispatcher \\ experts", *EXPERTS]]
    table += [[dispatcher, *(cell(dispatcher, experts) for experts in EXPERTS)] for dispatcher in DISPATCHERS]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    notes = [f"[{number}] {text}" for number, text in enumerate(reasons, 1)]
    return [*lines, *([""] if notes else []), *notes]


def _problem(registry: Any, name: str) -> str | None:
    """Why a backend cannot run on this machine; None where it can."""
    import torch

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    try:
        backend = registry.load(name)
        check = getattr(backend, "check_available", None)
        if check is not None:
            check()
    except (ImportError, ValueError) as error:
        return str(error)
    needed = registry.get(name).devices
    if not set(devices) & set(needed):
        return f"{registry.kind}: {name!r} runs on {', '.join(needed)} only, and torch sees none here"
    return None


def _recipe(recipe: str, overrides: list[str], ranks: int | None) -> tuple[list[str], bool]:
    """What a recipe comes to here, and whether it can run."""
    from nemo_moe.compose import load_recipe
    from nemo_moe.resolve import resolve

    try:
        config = load_recipe(recipe, overrides)
        ranks = ranks or _usual_ranks(config)
        resolved = resolve(config, ranks)
    except (ValueError, ImportError) as error:
        on = f" on {ranks} rank{'s' * (ranks > 1)} of this machine" if ranks else ""
        return [f"{recipe}: cannot run{on}: {error}"], False
    return [f"{recipe}: runs on {ranks} rank{'s' * (ranks > 1)} of this machine:", *(f"  {line}" for line in resolved.lines)], True


def _usual_ranks(config: Any) -> int:
    """A rank per CUDA device, where the recipe takes them; else as many as its sizes need."""
    import torch

    from nemo_moe.config import Device

    asked = config.distributed
    needed: int = max(asked.ep_size, asked.dp_replicate_size * asked.tp_size * (asked.fsdp_size or 1))
    if config.device is not Device.cpu and torch.cuda.is_available():
        return torch.cuda.device_count()
    return needed


if __name__ == "__main__":
    sys.exit(run_doctor(sys.argv[1:]))
