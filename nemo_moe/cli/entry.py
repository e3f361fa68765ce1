"""What one rank of `finetune` runs: arguments -> config -> training, and a config error as one message.

Every rank finds the same error in the same arguments before any process group exists, so the first rank of each node
alone prints it (each node has a terminal or log of its own, and not all of them rank 0). The others wait a few seconds
before they exit: torchrun ends all ranks as soon as one has failed, and the first might not have printed by then.
Errors inside training are tracebacks of the rank that raised, unless all ranks know the reason.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from nemo_moe.compose import ConfigError, load_recipe, to_yaml
from nemo_moe.stopping import StopRequest

_GRACE_SECONDS = 10.0  # a node's first rank may be that much slower to import torch; torchrun ends the wait when it exits


def run_finetune_rank(argv: Sequence[str]) -> int:
    """Fine-tune on this rank; the ranks' environment variables are torchrun's.

    Args:
        argv: recipe, then overrides (and --print-config).

    Returns:
        The exit code: 0 (also after a signal, with a checkpoint saved), 1 for a run that failed for a reason all ranks
        know, 2 for a config that cannot run.
    """
    # First of all: imports take seconds, and a signal that comes meanwhile is to be obeyed like any other.
    with StopRequest(announce="RANK" not in os.environ) as stop:
        failure = _run(argv, stop)
    if failure is None:
        return 0
    # Outside the block, so that a rank which only waits to be ended ends by the first signal; it may have come already.
    return _fail(*failure, wait=not stop.requested)


def _run(argv: Sequence[str], stop: StopRequest) -> tuple[Exception, int] | None:
    """The run itself; what it failed of, and the exit code for that."""
    try:
        arguments = FinetuneParser("finetune").parse_intermixed_args(list(argv))
        config = load_recipe(arguments.recipe, arguments.overrides)
    except ConfigError as error:
        return error, 2
    if arguments.print_config:
        if _rank() == 0:
            print(to_yaml(config), end="")
        return None
    from nemo_moe.checkpoint.together import SaveError
    from nemo_moe.data.reasoning_gym import check_tasks
    from nemo_moe.resolve import resolve
    from nemo_moe.train.finetune import finetune
    from nemo_moe.train.runtime import StartError, local_world_size, world_size
    from nemo_moe.train.step import TrainingStopped

    try:
        resolve(config, world_size(), local_world_size=local_world_size())
        check_tasks(config.data)
    except (ValueError, ImportError) as error:
        return error, 2
    try:
        finetune(config, stop)
    except StartError as error:
        return error, 2
    except (TrainingStopped, SaveError) as error:
        return error, 1
    return None


class FinetuneParser(argparse.ArgumentParser):
    """The arguments of a fine-tuning run: those of every rank, to which the command adds torchrun's.

    A wrong argument is a ConfigError, since not every rank may print it; nor does every rank print the help.

    Args:
        prog: how the program is called.
        texts: further arguments of ArgumentParser.
    """

    def __init__(self, prog: str, **texts: Any) -> None:
        super().__init__(prog=prog, description="Fine-tune the model that a recipe describes.", allow_abbrev=False, **texts)
        self.add_argument("recipe", help="the name of a recipe that ships (see `nemo-moe recipes`), or the path of a YAML file")
        # With a default, so that argparse does not call it required where the recipe is missing.
        self.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="changes to the recipe, such as optimizer.lr=5e-4")
        self.add_argument("--print-config", action="store_true", help="print the config and stop")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n{self.format_usage().rstrip()}")

    def print_help(self, file: Any = None) -> None:
        if _rank() == 0:
            super().print_help(file)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _fail(error: Exception, code: int, *, wait: bool) -> int:
    rank = _rank()
    if int(os.environ.get("LOCAL_RANK", rank)) == 0:
        where = f"[node {os.environ.get('GROUP_RANK', '?')}, {socket.gethostname()}] " if rank else ""
        print(f"{where}finetune: error: {error}", file=sys.stderr, flush=True)
    elif wait:
        time.sleep(_GRACE_SECONDS)
    return code
