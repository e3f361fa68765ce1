"""`nemo-moe benchmark layer|step`, as it runs on every rank (start it through the command line or torchrun)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from nemo_moe.bench.layer import REFERENCE, SHAPES, benchmark_layer, pair_name
from nemo_moe.bench.report import describe_run, table
from nemo_moe.bench.step import benchmark_step
from nemo_moe.config import BackendConfig
from nemo_moe.registry import DISPATCHERS, EXPERTS
from nemo_moe.train.runtime import local_device, process_group

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of `nemo-moe benchmark`."""
    parser = argparse.ArgumentParser(prog="nemo-moe benchmark", description="Time dispatchers and experts against each other.")
    commands = parser.add_subparsers(dest="command", required=True)
    layer = commands.add_parser("layer", help="one MoE expert layer: dispatch, experts, combine")
    layer.add_argument("--shape", choices=sorted(SHAPES), default="small", help="sizes of the layer (default: small)")
    layer.add_argument("--tokens", type=_positive_ints, default=[256, 1024], help="tokens a rank, e.g. 16,256,4096 (default: 256,1024)")
    layer.add_argument("--layers", type=int, default=4, help="distinct layers back to back (default: 4)")
    layer.add_argument("--inference", action="store_true", help="forward only, without gradients")
    layer.add_argument("--precision", choices=sorted(DTYPES), default="fp32")
    step = commands.add_parser("step", help="a whole training step of a recipe's model, on random tokens")
    step.add_argument("recipe", help="recipe name or YAML file")
    step.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    step.add_argument("--sequence-length", type=int, default=64, help="tokens of a sequence (default: 64)")
    for command in (layer, step):
        command.add_argument("--dispatchers", type=_names, default=None, help="comma-separated; default: all that run here")
        command.add_argument("--experts", type=_names, default=None, help="comma-separated; default: all that run here")
        command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a benchmark on this rank; rank 0 prints. Raises ValueError for a name that is not registered."""
    arguments = build_parser().parse_args(argv)
    backends = _pairs(arguments.dispatchers, arguments.experts, shared_batch=arguments.command == "layer")
    kind = arguments.device if arguments.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = local_device(kind)
    with process_group("nccl" if kind == "cuda" else "gloo", 10.0, device):
        _print([*describe_run(device), ""])
        if arguments.command == "step":
            _print(benchmark_step(arguments.recipe, arguments.overrides, backends, arguments.sequence_length, device))
        else:
            _layer(arguments, backends, device)
    return 0


def _layer(arguments: argparse.Namespace, backends: list[BackendConfig], device: torch.device) -> None:
    dtype, training = DTYPES[arguments.precision], not arguments.inference
    mode = "forward + backward" if training else "forward"
    for tokens in arguments.tokens:
        result = benchmark_layer(
            SHAPES[arguments.shape], backends, tokens, layers=arguments.layers, device=device, dtype=dtype, training=training
        )
        reference = pair_name(REFERENCE) if pair_name(REFERENCE) in result.timings else pair_name(backends[0])
        _print([f"layer {arguments.shape}, {mode}, {tokens} tokens a rank, {arguments.precision}; x ref: {reference}"])
        _print([*table(result.timings, reference, result.shares), ""])


def _pairs(dispatchers: list[str] | None, experts: list[str] | None, *, shared_batch: bool) -> list[BackendConfig]:
    """The pairs asked for, or all whose libraries are here. A training step has no shared batch to offer."""
    names = dispatchers or [
        name for name in DISPATCHERS if _installed(DISPATCHERS, name) and (shared_batch or not DISPATCHERS.get(name).needs_shared_batch)
    ]
    return [
        BackendConfig(dispatcher=dispatcher, experts=expert)
        for dispatcher, expert in itertools.product(names, experts or [name for name in EXPERTS if _installed(EXPERTS, name)])
    ]


def _installed(registry: object, name: str) -> bool:
    try:
        registry.check_installed(name)  # type: ignore[attr-defined]
    except ImportError:
        return False
    return True


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _positive_ints(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give positive whole numbers, e.g. 16,256")
    return numbers


def _print(lines: list[str]) -> None:
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
