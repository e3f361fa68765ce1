"""`nemo-moe benchmark layer|step|loading`: its arguments, what is checked before any rank starts, and what every rank runs.

The parent of a launch calls `check`, every rank `main`, which checks again (a rank may have been started by torchrun
itself). What is wrong with the arguments is one message of rank 0 and exit code 2; a pair that computes something else
than the reference is one message and exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from nemo_moe.bench.layer import SHAPES, Work, WrongResult, benchmark_layer
from nemo_moe.bench.pairs import ORACLE, Pairs, check_sizes, choose_pairs, pair_name
from nemo_moe.bench.report import clocks, describe_machine, describe_run, table
from nemo_moe.bench.timing import Protocol
from nemo_moe.config import BackendConfig, Device
from nemo_moe.moe.types import experts_per_rank
from nemo_moe.registry import DISPATCHERS, PRECISIONS
from nemo_moe.resolve import Resolved, choose_device, resolve
from nemo_moe.train.runtime import StartError, agreed, local_device, local_world_size, process_group, world_size

if TYPE_CHECKING:
    from nemo_moe.config import RunConfig

_LAYER = "One MoE expert layer: dispatch, experts, combine."
_STEP = "A whole training step of a recipe's model, on random tokens."
_LOADING = "Loading a random Hugging Face folder: memory and time beside a plain read of its files."
_SUMMARIES = {"layer": _LAYER, "step": _STEP, "loading": _LOADING}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in PRECISIONS.items()}
_GRACE_SECONDS = 10.0  # for rank 0 to print what all ranks found: torchrun ends all as soon as one has failed
_LAUNCH = "With --nproc-per-node N, and any other option of torchrun, it runs on N ranks of each node."


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of exiting: every rank parses, one prints."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n{self.format_usage().rstrip()}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of `nemo-moe benchmark`, torchrun's options taken out. Raises ValueError; exits for --help."""
    top = _Parser(prog="nemo-moe benchmark", description="Time dispatchers and experts against each other, or loading.", epilog=_LAUNCH)
    commands = top.add_subparsers(dest="command", metavar="|".join(_SUMMARIES), required=True)
    for name, summary in _SUMMARIES.items():
        commands.add_parser(name, help=summary, add_help=False)
    command: str = top.parse_args(argv[:1]).command
    parser = _Parser(prog=f"nemo-moe benchmark {command}", description=_SUMMARIES[command], epilog=_LAUNCH)
    parser.set_defaults(command=command)
    if command == "loading":
        _add_loading_arguments(parser)
        return parser.parse_args(argv[1:])
    if command == "layer":
        parser.add_argument("--shape", choices=sorted(SHAPES), default="small", help="sizes of the layer (default: small)")
        parser.add_argument("--tokens", type=_positives, default=[256, 1024], help="tokens a rank, e.g. 16,256,4096 (default: 256,1024)")
        parser.add_argument("--layers", type=_positive, default=4, help="distinct layers back to back (default: 4)")
        parser.add_argument("--inference", action="store_true", help="forward only, without gradients")
        parser.add_argument("--precision", choices=sorted(DTYPES), default="fp32", help="of weights and activations (default: fp32)")
    else:
        parser.add_argument("recipe", help="the name of a recipe that ships, or the path of a YAML file")
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe, but for its backend section")
        parser.add_argument("--sequence-length", type=_positive, default=64, help="tokens of a sequence (default: 64)")
    default_device = "auto" if command == "layer" else None
    parser.add_argument("--dispatchers", type=_names, help="comma-separated; default: all that run here")
    parser.add_argument("--experts", type=_names, help="comma-separated; default: all that run here")
    devices = [device.value for device in Device]
    parser.add_argument("--device", choices=devices, default=default_device, help=f"default: {default_device or 'what the recipe says'}")
    parser.add_argument("--windows", type=_positive, default=Protocol.windows, help=f"timed windows a pair (default: {Protocol.windows})")
    parser.add_argument(
        "--window-seconds", type=_seconds, default=Protocol.window_seconds, help=f"length of one (default: {Protocol.window_seconds})"
    )
    return parser.parse_intermixed_args(argv[1:])


def _add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=_size, default=1.0, help="of the folder's weights, about (default: 1)")
    parser.add_argument("--folder", help="where the temporary folder is made; with several nodes a place that all see")
    parser.add_argument("--shard-gb", type=_size, default=5.0, help="of one weights file, at most (default: 5)")
    parser.add_argument("--parameters", choices=sorted(DTYPES), default="fp32", help="type of the parameters to fill (default: fp32)")
    parser.add_argument("--repeats", type=_positive, default=3, help="timed loads, warm and cold each (default: 3)")
    parser.add_argument("--device", choices=[device.value for device in Device], default="auto", help="default: auto")


def check(argv: Sequence[str], ranks: int | None, local_ranks: int) -> None:
    """What the ranks would find wrong, found before there are any.

    Args:
        ranks: over all nodes; None where only the rendezvous will decide. local_ranks: of this node.

    Raises:
        ValueError, ImportError: an argument, the recipe, or a pair that was named cannot be used.
    """
    arguments = parse(argv)
    if ranks is None and arguments.command != "loading":
        choose_pairs(arguments.dispatchers, arguments.experts, local_ranks, check=lambda _: None)
    else:
        _plan(arguments, local_ranks if ranks is None else ranks, local_ranks)


def main(argv: Sequence[str]) -> int:
    """Run a benchmark on this rank; rank 0 prints the report.

    Returns:
        The exit code: 0, 1 for a pair that computes something else than the reference, 2 for what cannot run.
    """
    try:
        arguments = parse(argv)
        plan = _plan(arguments, world_size(), local_world_size())
    except (ValueError, ImportError) as error:
        return _fail(error, 2)
    device = local_device(plan.device)
    try:
        with process_group("nccl" if plan.device == "cuda" else "gloo", plan.timeout_minutes, device):
            try:
                _report(arguments, device)
            except StartError as error:
                return _fail(error, 2)
            except WrongResult as error:
                return _fail(error, 1)
    except StartError as error:  # the ranks did not come to one kind of group
        return _fail(error, 2)
    return 0


@dataclass(frozen=True)
class _Plan:
    """What the arguments come to on so many ranks.

    Attributes:
        device: "cpu" or "cuda".
        ep_size: ranks that tokens travel between.
        pairs: to be checked again on the ranks, with what only they can tell; None for `loading`.
        lines: what runs, for the report.
        resolved, config: of `step`: sizes and device, the same for all pairs; the recipe.
    """

    device: str
    ep_size: int
    pairs: Pairs | None
    lines: list[str]
    resolved: Resolved | None = None
    config: RunConfig | None = None
    timeout_minutes: float = 10.0


def _plan(arguments: argparse.Namespace, ranks: int, local_ranks: int, *, on_ranks: bool = False) -> _Plan:
    """Raises ValueError or ImportError for what cannot run. With `on_ranks` it asks the machine too, and is collective."""
    plan = {"layer": _plan_layer, "step": _plan_step, "loading": _plan_loading}[arguments.command]
    return plan(arguments, ranks, local_ranks, on_ranks)


def _plan_layer(arguments: argparse.Namespace, ranks: int, local_ranks: int, on_ranks: bool) -> _Plan:
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device, line = choose_device(Device(arguments.device), device_count, local_ranks)
    shape = SHAPES[arguments.shape]
    experts_per_rank(shape.num_experts, ranks)

    def check_pair(backend: BackendConfig) -> None:
        check_sizes(backend, shape.hidden_size, shape.moe_intermediate_size, arguments.precision, local=ranks == 1)
        _check_machine(backend, on_ranks and ranks > 1)

    pairs = choose_pairs(arguments.dispatchers, arguments.experts, ranks, check_pair)
    return _Plan(device, ranks, pairs, [line])


def _plan_step(arguments: argparse.Namespace, ranks: int, local_ranks: int, on_ranks: bool) -> _Plan:
    from nemo_moe.bench.step import load_step_recipe, with_backend

    config = load_step_recipe(arguments.recipe, arguments.overrides, arguments.device)
    ep_size = config.distributed.ep_size
    resolved: dict[str, Resolved] = {}

    def check_pair(backend: BackendConfig) -> None:
        def find() -> Resolved:
            return resolve(with_backend(config, backend), ranks, local_world_size=local_ranks)

        # It asks this machine too, so the ranks have to agree.
        resolved[pair_name(backend, ep_size)] = agreed(find) if on_ranks and ep_size > 1 else find()

    pairs = choose_pairs(arguments.dispatchers, arguments.experts, ep_size, check_pair, config.backend)
    first = next(iter(resolved.values()))
    # Line by line, what the pairs have in common once and what they have not one after the other.
    lines = [line for same in zip(*(found.lines for found in resolved.values()), strict=True) for line in dict.fromkeys(same)]
    return _Plan(first.device, ep_size, pairs, lines, first, config, config.distributed.timeout_minutes)


def _plan_loading(arguments: argparse.Namespace, ranks: int, local_ranks: int, _on_ranks: bool) -> _Plan:
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device, line = choose_device(Device(arguments.device), device_count, local_ranks)
    if ranks > local_ranks and arguments.folder is None:
        raise ValueError(f"{ranks} ranks on several nodes need --folder: a place that all of them see")
    return _Plan(device, ranks, None, [line])


def _check_machine(backend: BackendConfig, asked: bool) -> None:
    """Whether the dispatcher finds here what it needs; the same answer on all ranks. Collective where it is asked."""
    if asked:
        agreed(lambda: DISPATCHERS.load(backend.dispatcher).check_available())


def _report(arguments: argparse.Namespace, device: torch.device) -> None:
    plan = _plan(arguments, world_size(), local_world_size(), on_ranks=True)
    if plan.pairs is None:
        _loading(arguments, plan, device)
        return
    protocol = Protocol(arguments.windows, arguments.window_seconds)
    oracle = pair_name(ORACLE, plan.ep_size)
    lines = [*describe_run(device, protocol, oracle), *plan.lines, *plan.pairs.left_out]
    if plan.ep_size == 1:
        lines.append("one expert-parallel rank: no token leaves it, a local permutation runs whatever the dispatcher, each experts once")
    _print([*lines, ""])
    reference = oracle if oracle in plan.pairs.backends else next(iter(plan.pairs.backends))
    if arguments.command == "layer":
        _layer(arguments, plan.pairs, device, protocol, reference)
    else:
        _step(arguments, plan, device, protocol, reference)


def _loading(arguments: argparse.Namespace, plan: _Plan, device: torch.device) -> None:
    from nemo_moe.bench.loading import benchmark_loading

    _print([*describe_machine(device), *plan.lines])
    lines = benchmark_loading(
        gigabytes=arguments.size_gb,
        parent=arguments.folder,
        dtype=DTYPES[arguments.parameters],
        repeats=arguments.repeats,
        max_shard_bytes=int(arguments.shard_gb * 1e9),
        device=device,
    )
    _print(lines)


def _layer(arguments: argparse.Namespace, pairs: Pairs, device: torch.device, protocol: Protocol, reference: str) -> None:
    training = not arguments.inference
    for tokens in arguments.tokens:
        work = Work(SHAPES[arguments.shape], tokens, arguments.layers, device, DTYPES[arguments.precision], training)
        rows = benchmark_layer(work, pairs.backends, protocol)
        what = "forward + backward (with gradients of tokens, routing weights and expert weights)" if training else "forward"
        _print(
            [
                f"layer {arguments.shape}, {work.shape}, {arguments.precision}, {tokens} tokens a rank, {what};",
                f"ms of one layer, MiB of all {arguments.layers} without their weights; x ref: {reference}",
                *table(rows, reference),
                *clocks(device),
                "",
            ]
        )


def _step(arguments: argparse.Namespace, plan: _Plan, device: torch.device, protocol: Protocol, reference: str) -> None:
    from nemo_moe.bench.step import benchmark_step

    assert plan.config is not None and plan.resolved is not None and plan.pairs is not None
    config, length = plan.config, arguments.sequence_length
    rows, family_config = benchmark_step(config, plan.resolved, plan.pairs.backends, length, device, protocol)
    tokens = config.train.global_batch_size * length
    _print(
        [
            f"step of {arguments.recipe}: {config.train.global_batch_size} sequences of {length} tokens, vocabulary"
            f" {family_config.vocab_size}, activation checkpointing {config.train.activation_checkpointing.value}; x ref: {reference}",
            *table(rows, reference),
            *(f"{name}: {tokens / row.timing.median * 1000:,.0f} tokens/s over all ranks" for name, row in rows.items()),
            *clocks(device),
        ]
    )


def _fail(error: Exception, code: int) -> int:
    """What all ranks know: the first of each node prints it, the others leave it the time to."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if int(os.environ.get("LOCAL_RANK", rank)) == 0:
        print(f"nemo-moe benchmark: error: {error}", file=sys.stderr, flush=True)
    elif not dist.is_initialized():
        time.sleep(_GRACE_SECONDS)
    if dist.is_initialized():
        dist.barrier()
    return code


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("give one name or more, separated by commas")
    return names


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1e-3 <= size <= 1e4:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GB from 0.001 to 10000")
    return size


def _print(lines: list[str]) -> None:
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
