"""torchrun's options on our command line, and the start of torchrun with them.

The parent checks everything that can be checked without a rank first, then becomes torchrun (exec; `cli.torchrun`, which
differs in how a stop by signal ends): signals reach it and its exit code is the command's, with no process in between.
Options are passed on as they were written. Left out on purpose: torchrun's options for what to run (`--module`,
`--no-python`, `--run-path`), since that is this package.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from nemo_moe.cli.torchrun import PATIENCE_VARIABLE

# Option -> help; None is passed on without being listed. Underscores are as good as dashes, as for torchrun.
VALUE_OPTIONS: dict[str, str | None] = {
    "--nnodes": "number of nodes",
    "--node-rank": "which of the nodes this is, from 0",
    "--master-addr": "host of node 0",
    "--master-port": "a free port there",
    "--rdzv-backend": "how nodes find each other, such as c10d",
    "--rdzv-endpoint": "host:port where they do",
    "--rdzv-id": "name of the job, alike on all nodes",
    "--rdzv-conf": None,
    "--local-addr": None,
    "--max-restarts": None,
    "--monitor-interval": None,
    "--start-method": None,
    "--event-log-handler": None,
    "--role": None,
    "--log-dir": None,
    "--redirects": None,
    "--tee": None,
    "--local-ranks-filter": None,
    "--duplicate-stdout-filters": None,
    "--duplicate-stderr-filters": None,
    "--logs-specs": None,
    "--numa-binding": None,
    "--signals-to-handle": None,
    "--shutdown-timeout": None,
}
FLAG_OPTIONS: dict[str, str | None] = {
    "--standalone": "one node that finds itself a free port (what happens anyway where no node or port is named)",
    "--virtual-local-rank": None,
}
SHORT_OPTIONS = {"--redirects": "-r", "--tee": "-t"}
_MARGIN_SECONDS = 15  # beyond the ranks' own grace time: they end themselves and say why, before torchrun ends them
_NAMES_A_PLACE = ("--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--standalone")


class _PassOn(argparse.Action):
    """Collect an option and its value as torchrun is to see them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        given = [*namespace.torchrun, self.option_strings[0]]
        namespace.torchrun = given if self.nargs == 0 else [*given, str(values)]


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add --nproc-per-node and torchrun's other options; they land in `nproc_per_node` and, as a list, in `torchrun`."""
    group = parser.add_argument_group(
        "starting ranks", "Given any of these, the command starts torchrun; all other options of torchrun are passed on too."
    )
    group.add_argument("--nproc-per-node", type=_rank_count, metavar="N", help="ranks on this node: a number, or gpu for one per GPU")
    for name, text in (VALUE_OPTIONS | FLAG_OPTIONS).items():
        group.add_argument(
            name,
            *([SHORT_OPTIONS[name]] if name in SHORT_OPTIONS else []),
            action=_PassOn,
            dest="torchrun",
            default=[],
            nargs=0 if name in FLAG_OPTIONS else None,
            metavar=None if name in FLAG_OPTIONS else name.rpartition("-")[2].upper(),
            help=text or argparse.SUPPRESS,
        )


def with_dashes(argv: Sequence[str]) -> list[str]:
    """The arguments with torchrun's options spelt one way: --nproc_per_node becomes --nproc-per-node."""
    spelt = []
    for argument in argv:
        option, equals, value = argument.partition("=")
        dashed = option.replace("_", "-")
        known = dashed == "--nproc-per-node" or dashed in VALUE_OPTIONS or dashed in FLAG_OPTIONS
        spelt.append(dashed + equals + value if known else argument)
    return spelt


def is_launch(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for torchrun."""
    return arguments.nproc_per_node is not None or bool(arguments.torchrun)


def local_ranks(arguments: argparse.Namespace) -> int:
    """Ranks to start on this node; torchrun's default is 1."""
    count: int | None = arguments.nproc_per_node
    return 1 if count is None else count


def total_ranks(arguments: argparse.Namespace) -> int | None:
    """Ranks over all nodes; None where --nnodes is a range, which only the rendezvous decides."""
    nodes = "1"
    for option, value in zip(arguments.torchrun, arguments.torchrun[1:], strict=False):
        if option == "--nnodes":
            nodes = value
    low, _, high = nodes.partition(":")
    return int(low) * local_ranks(arguments) if low.isdigit() and high in ("", low) else None


def torchrun_command(arguments: argparse.Namespace, rank_arguments: Sequence[str]) -> list[str]:
    """The command that starts the ranks, each of which runs `nemo-moe <rank_arguments>`."""
    options: list[str] = [f"--nproc-per-node={local_ranks(arguments)}", *arguments.torchrun]
    if total_ranks(arguments) == local_ranks(arguments) and not any(name in arguments.torchrun for name in _NAMES_A_PLACE):
        options.append("--standalone")  # a fixed default port would let two jobs on one machine collide
    return [sys.executable, "-m", "nemo_moe.cli.torchrun", *options, "-m", "nemo_moe.cli.main", *rank_arguments]


def launch(arguments: argparse.Namespace, rank_arguments: Sequence[str], grace_seconds: float | None = None) -> NoReturn:
    """Become torchrun.

    Args:
        grace_seconds: what the ranks may take to stop after a signal; torchrun waits a little longer, unless
            --shutdown-timeout or its environment variable says otherwise. None leaves torchrun's default.
    """
    # What torchrun sets anyway, with a warning; the ranks share out the cores themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Some data tasks iterate over sets of strings, whose order would differ from rank to rank.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if grace_seconds is not None:
        os.environ.setdefault(PATIENCE_VARIABLE, str(math.ceil(grace_seconds) + _MARGIN_SECONDS))
    command = torchrun_command(arguments, rank_arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _rank_count(text: str) -> int:
    if text == "gpu":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise argparse.ArgumentTypeError("gpu means one rank per CUDA device, and torch sees none here; give a number")
        return count
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number of 1 or more, or gpu, found {text!r}")
    return int(text)
