"""How many lines of code lie between `backend.dispatcher: NAME` in a recipe and the bytes on the wire, for each dispatcher.

The modules that a reader has to follow: those of all dispatchers (compose the YAML, check it, resolve it, build the layer,
make the calls differentiable) and, of the dispatch folder, the manager's own with what it imports there. Blank lines,
comments and docstrings are not code, but lines of reading; both numbers are printed. Nothing is imported to count it, so
optional libraries need not be there.

    python tools/path_length.py
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nemo_moe.registry import DISPATCHERS  # noqa: E402  (the checkout's own)

BUDGET = 2000  # lines of code of a path: what docstrings and comments add is there to be read faster, not slower
FOLDER = "nemo_moe.moe.dispatch"
SHARED = [
    *(f"nemo_moe.{name}" for name in ("compose", "schema", "config", "layer_config", "registry", "resolve", "moe.layer")),
    *(f"{FOLDER}.{name}" for name in ("token_dispatcher", "fused_a2a", "base")),
]


def source(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def imported(module: str) -> list[str]:
    """Modules of the dispatch folder that `module` imports, itself first, and those that they import in turn."""
    found = [module]
    for name in found:
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{FOLDER}.") and node.module not in found:
                found.append(str(node.module))
    return found


def path_of(name: str) -> list[str]:
    """The modules of a dispatcher that this package holds, each once. A registered one of another package is its own affair."""
    module = DISPATCHERS.get(name).target.partition(":")[0]
    return list(dict.fromkeys([*SHARED, *(imported(module) if module.startswith("nemo_moe.") else [])]))


def all_lines(module: str) -> int:
    return len(source(module).splitlines())


def code_lines(module: str) -> int:
    """Lines that hold code: not blank, not only a comment, not of a docstring."""
    text = source(module)
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def main() -> int:
    """Print both counts for every dispatcher; 1 where one is over the budget."""
    print(f"{'dispatcher':16}{'lines':>7}{'code':>7}   beside the shared modules")
    over = False
    for name in DISPATCHERS:
        modules = path_of(name)
        total, code = sum(map(all_lines, modules)), sum(map(code_lines, modules))
        own = ", ".join(module.rpartition(".")[2] for module in modules if module not in SHARED)
        print(f"{name:16}{total:7}{code:7}   {own}")
        over = over or code > BUDGET
    shared = ", ".join(f"{module.rpartition('.')[2]} {all_lines(module)}" for module in SHARED)
    print(f"shared: {shared}")
    print(f"budget: {BUDGET} lines of code{', which is exceeded' if over else ''}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
