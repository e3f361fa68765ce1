"""The `nemo-moe` command: finetune, benchmark, export, doctor, recipes.

It also is what torchrun starts on every rank (`python -m nemo_moe.cli.main finetune ...` with the ranks' environment
variables), where it goes straight to the rank's work. torch is imported only by what needs it, so lists and messages
come at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from nemo_moe import __version__
from nemo_moe.cli.launch import add_launch_options, is_launch, launch, local_ranks, total_ranks, with_dashes

if TYPE_CHECKING:
    from nemo_moe.config import RunConfig

_EXAMPLES = """examples:
  nemo-moe recipes
  nemo-moe finetune demo --nproc-per-node 2
  nemo-moe finetune demo --nproc-per-node 2 train.max_steps=100 optimizer.lr=1e-3
  nemo-moe finetune my_run.yaml --print-config
  nemo-moe benchmark layer --nproc-per-node 2
  nemo-moe export runs/my_run my_model
  nemo-moe doctor demo
"""
_FINETUNE_EXAMPLES = """examples:
  nemo-moe finetune demo --nproc-per-node 2                       two ranks of this machine
  nemo-moe finetune demo distributed.ep_size=1                    one process, which has all experts
  nemo-moe finetune demo --print-config > my_run.yaml             the whole config, to start from
  nemo-moe finetune my_run.yaml --nproc-per-node 2 optimizer.lr=1e-3    a recipe of your own, with one key changed

On each of two nodes, 16 ranks in all, so with smaller micro-batches:
  nemo-moe finetune demo --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29400 train.micro_batch_size=8

The same through torchrun, in a checkout:
  torchrun --nproc-per-node 2 recipes/finetune.py demo train.max_steps=100
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for what the user can fix, with one message on stderr)."""
    parser = argparse.ArgumentParser(
        prog="nemo-moe",
        description="Fine-tune Mixture-of-Experts models with expert parallelism.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, text in _COMMAND_HELP.items():
        commands.add_parser(name, help=text, add_help=False)
    given = list(sys.argv[1:] if argv is None else argv)
    return _COMMANDS[parser.parse_args(given[:1]).command](given[1:])


def _finetune(argv: list[str]) -> int:
    from nemo_moe.cli.entry import run_finetune_rank

    parser, arguments = _finetune_arguments(argv)
    rank_arguments = [arguments.recipe, *arguments.overrides]
    if not is_launch(arguments) and not arguments.print_config:
        return run_finetune_rank(rank_arguments)
    lines, config = _check(parser, arguments)
    if arguments.print_config:
        from nemo_moe.compose import to_yaml

        print("".join(f"# {line}\n" for line in lines) + to_yaml(config), end="")
        return 0
    launch(arguments, ["finetune", *rank_arguments], config.checkpoint.grace_seconds)


def _finetune_arguments(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    from nemo_moe.cli.entry import FinetuneParser
    from nemo_moe.compose import ConfigError

    parser = FinetuneParser(
        "nemo-moe finetune",
        usage="nemo-moe finetune RECIPE [key=value ...] [--print-config] [--nproc-per-node N] [options of torchrun]",
        epilog=_FINETUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_launch_options(parser)
    try:
        arguments, unknown = parser.parse_known_intermixed_args(with_dashes(argv))
        if unknown:
            parser.error(_about_unknown(unknown))
    except ConfigError as error:
        _fail(parser, error)
    return parser, arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[list[str], RunConfig]:
    """What the ranks would find wrong, found before there are any. The resolved lines (where ranks are known) and config."""
    from nemo_moe.compose import load_recipe

    try:
        config = load_recipe(arguments.recipe, arguments.overrides)
        from nemo_moe.data.reasoning_gym import check_tasks
        from nemo_moe.resolve import model_config, resolve

        model_config(config.model)
        ranks = total_ranks(arguments)
        known = is_launch(arguments) and ranks is not None
        lines = resolve(config, ranks, local_world_size=local_ranks(arguments)).lines if known and ranks is not None else []
        check_tasks(config.data)
    except (ValueError, ImportError) as error:
        _fail(parser, error)
    return lines, config


def _benchmark(argv: list[str]) -> int:
    options = argparse.ArgumentParser(prog="nemo-moe benchmark", add_help=False, allow_abbrev=False)
    add_launch_options(options)
    arguments, given = options.parse_known_args(with_dashes(argv))
    from nemo_moe.bench.main import check, main as run_benchmark_rank

    if not is_launch(arguments):
        return run_benchmark_rank(given)
    try:
        check(given, total_ranks(arguments), local_ranks(arguments))
    except (ValueError, ImportError) as error:
        _fail(options, error)
    launch(arguments, ["benchmark", *given])


def _export(argv: list[str]) -> int:
    from nemo_moe.cli.export import run_export

    return run_export(argv)


def _doctor(argv: list[str]) -> int:
    from nemo_moe.cli.doctor import run_doctor

    return run_doctor(argv)


def _recipes(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="nemo-moe recipes", description="List the recipes that ship.")
    parser.parse_args(argv)
    from nemo_moe.compose import list_recipes, recipe_folder

    recipes = list_recipes()
    width = max((len(name) for name in recipes), default=0)
    for name, summary in recipes.items():
        print(f"{name:{width}}  {summary}".rstrip())
    print(f"\nTheir files are in {recipe_folder()}; start one with `nemo-moe finetune NAME`.")
    return 0


def _about_unknown(unknown: list[str]) -> str:
    first = unknown[0]
    if "=" in first and first.startswith("--"):
        return f"unknown option {first}; a change to the recipe is written without dashes: {first.lstrip('-')}"
    return f"unknown option {first}; see --help"


def _fail(parser: argparse.ArgumentParser, error: Exception) -> NoReturn:
    parser.exit(2, f"{parser.prog}: error: {error}\n")


def _versions() -> str:
    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "without torch"
    return f"nemo_moe {__version__} ({torch}, python {platform.python_version()})"


_COMMANDS = {"finetune": _finetune, "benchmark": _benchmark, "export": _export, "doctor": _doctor, "recipes": _recipes}
_COMMAND_HELP = {
    "finetune": "fine-tune the model that a recipe describes",
    "benchmark": "time dispatchers and experts against each other",
    "export": "write a checkpoint of a run as a Hugging Face folder",
    "doctor": "say which dispatchers and experts run on this machine, and why the others do not",
    "recipes": "list the recipes that ship",
}

if __name__ == "__main__":
    sys.exit(main())
