"""The `nemo-moe export` command: a checkpoint of a run becomes a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_EXAMPLES = """examples:
  nemo-moe export runs/my_run my_model
  nemo-moe export runs/my_run my_model --checkpoint best --dtype bfloat16
  nemo-moe export runs/my_run/checkpoints/step-00000400 my_model
"""


def run_export(argv: Sequence[str]) -> int:
    """Parse the arguments and export; the exit code is 2 for what the user can fix."""
    parser = argparse.ArgumentParser(
        prog="nemo-moe export",
        description="Write a checkpoint of a run as a Hugging Face folder. Needs neither the recipe, its data nor a GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="a run folder (output_dir of the recipe), or the folder of one checkpoint")
    parser.add_argument("folder", help="where to write; made if it is not there, its weights are replaced if it is")
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="latest, best or a step (default: latest)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: the model config's, else float32)"
    )
    parser.add_argument("--max-shard-gb", type=_gigabytes, default=5 * 10**9, metavar="GB", help="size of one weights file (default: 5)")
    arguments = parser.parse_args(argv)

    import torch

    from nemo_moe.checkpoint.together import SaveError
    from nemo_moe.train.export import export, find_checkpoint
    from nemo_moe.train.progress import TransferDisplay

    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    try:
        checkpoint = find_checkpoint(Path(arguments.run).expanduser().resolve(), arguments.checkpoint)
        with TransferDisplay(f"exporting {checkpoint} to {arguments.folder}") as display:
            export(
                checkpoint,
                arguments.folder,
                dtype=dtype,
                max_shard_bytes=arguments.max_shard_gb,
                progress=display.update,
            )
    except (ValueError, ImportError, SaveError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, SaveError) else 2
    return 0


def _gigabytes(text: str) -> int:
    """Bytes of a number of GB."""
    try:
        size = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"needs a size in GB above 0, found {text!r}")
    return size
