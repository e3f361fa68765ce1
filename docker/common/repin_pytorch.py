#!/usr/bin/env python3
"""Pin uv to the torch of an image, and to the cuDNN that this torch was built with.

    python docker/common/repin_pytorch.py                 # the torch that this python has installed
    python docker/common/repin_pytorch.py --torch 2.11.0 --cudnn nvidia-cudnn-cu13==9.15.1.9
    python docker/common/repin_pytorch.py --check         # change nothing; exit with 1 where something would change

Writes docker/common/uv-pytorch.toml (a uv configuration file: `uv pip install --config-file docker/common/uv-pytorch.toml ...`)
and the same lines between the two marks in pyproject.toml's [tool.uv]. Called twice it changes nothing; what an earlier call
wrote is replaced. Afterwards, and with the same version in the Makefile's TORCH, run: make lock

torch is a constraint: it is what the image has, not what a package would like. cuDNN is an override, for Linux alone:
torch asks for one version exactly and TransformerEngine for any, and two in one process is a crash. Needs no package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPEN, CLOSE = "# >>> docker/common/uv-pytorch.toml", "# <<<"
HEADER = "# Written by docker/common/repin_pytorch.py, here and in pyproject.toml."


class CannotPin(Exception):
    """What is missing, for a person."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pin uv to an image's torch and cuDNN.", allow_abbrev=False)
    parser.add_argument("--torch", metavar="VERSION", help="default: of the torch that is installed here")
    parser.add_argument("--cudnn", metavar="NAME==VERSION", help="default: what that torch asks for")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where something would change")
    arguments = parser.parse_args(argv)
    try:
        lines = pins(arguments.torch, arguments.cudnn)
        changed = [path for path, text in planned(arguments.root, lines) if write(path, text, arguments.check)]
    except CannotPin as error:
        print(f"repin_pytorch: {error}", file=sys.stderr)
        return 2
    for path in changed:
        print(f"{'would change' if arguments.check else 'changed'}: {path}")
    return 1 if arguments.check and changed else 0


def pins(torch: str | None, cudnn: str | None) -> list[str]:
    """The lines of TOML."""
    asked: list[str] = []
    if torch is None:
        try:
            found = importlib.metadata.distribution("torch")
        except importlib.metadata.PackageNotFoundError:
            raise CannotPin("torch is not installed for this python; run it with the image's python, or give --torch and --cudnn") from None
        torch, asked = found.version, found.requires or []
    torch = torch.partition("+")[0]  # 2.13.0+cu130 is 2.13.0 to whoever pins it
    if not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?", torch):
        raise CannotPin(f"--torch must be a version like 2.13.0, found {torch!r}")
    if cudnn is None:
        cudnn = next((match[0] for text in asked if (match := re.match(r"nvidia-cudnn-cu\d+==[\w.]+", text.replace(" ", "")))), None)
    if cudnn is None:
        raise CannotPin(
            f"torch {torch} here names no cuDNN package (a CPU build, or a vendor's); give --cudnn, like nvidia-cudnn-cu13==9.20.0.48"
        )
    if not re.fullmatch(r"nvidia-cudnn-cu\d+==\d[\w.]*", cudnn):
        raise CannotPin(f"--cudnn must be like nvidia-cudnn-cu13==9.20.0.48, found {cudnn!r}")
    return [f'constraint-dependencies = ["torch=={torch}"]', f"override-dependencies = [\"{cudnn}; sys_platform == 'linux'\"]"]


def planned(root: Path, lines: list[str]) -> list[tuple[Path, str]]:
    """(file, its new text) of both files."""
    pyproject = root / "pyproject.toml"
    try:
        text = pyproject.read_text(encoding="utf-8")
    except OSError as error:
        raise CannotPin(f"{pyproject} cannot be read ({error.strerror}); give the checkout with --root") from None
    return [
        (root / "docker" / "common" / "uv-pytorch.toml", "\n".join([HEADER, *lines, ""])),
        (pyproject, with_block(text, lines, pyproject)),
    ]


def with_block(text: str, lines: list[str], path: Path) -> str:
    """`text` with `lines` between the marks, and nothing of what stood there."""
    rows = text.splitlines(keepends=True)
    opened = [index for index, row in enumerate(rows) if row.startswith(OPEN)]
    closed = [index for index, row in enumerate(rows) if row.strip() == CLOSE]
    if len(opened) != 1 or len(closed) != 1 or opened[0] > closed[0]:
        raise CannotPin(
            f"{path} must have one line that starts with {OPEN!r} and after it one {CLOSE!r}, in its table [tool.uv];"
            f" found {len(opened)} and {len(closed)}"
        )
    outside = "".join([*rows[: opened[0]], *rows[closed[0] + 1 :]])
    doubled = [key for key in ("constraint-dependencies", "override-dependencies") if re.search(rf"^{key}\s*=", outside, re.MULTILINE)]
    if doubled:
        raise CannotPin(f"{path} also sets {', '.join(doubled)} outside the marks; remove it there")
    return "".join([*rows[: opened[0] + 1], *(f"{line}\n" for line in lines), *rows[closed[0] :]])


def write(path: Path, text: str, check: bool) -> bool:
    """Whether the file was, or would be, changed."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main())
