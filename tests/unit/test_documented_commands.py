"""Every command that the documentation tells a reader to run comes to a run on the ranks that it starts.

Nothing is started: the arguments go through the command's own parser, the recipe through `load_recipe` and `resolve`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nemo_moe.cli import main as cli
from nemo_moe.cli.launch import is_launch, local_ranks, total_ranks
from nemo_moe.compose import load_recipe, recipe_folder, to_yaml
from nemo_moe.resolve import model_config, resolve

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "README.md": (ROOT / "README.md").read_text(encoding="utf-8"),
    "the help": cli._EXAMPLES + cli._FINETUNE_EXAMPLES,
    "examples/slurm.sh": (ROOT / "examples" / "slurm.sh").read_text(encoding="utf-8"),
    "recipes/finetune.py": (ROOT / "recipes" / "finetune.py").read_text(encoding="utf-8"),
    **{file.name: file.read_text(encoding="utf-8") for file in recipe_folder().glob("*.yaml")},
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def written_out() -> list[tuple[str, str]]:
    """(where, command) of the lines that start with one; an explanation stands two spaces away."""
    commands = []
    for where, text in TEXTS.items():
        for line in text.splitlines():
            command = re.split(r"  +| > ", line.strip("#$ "))[0]
            if re.match(r"nemo-moe finetune |torchrun .*recipes/finetune.py|sbatch examples/slurm.sh", command):
                commands.append((where, command))
    return commands


def of_make() -> list[tuple[str, str]]:
    """What `make demo` starts for each NPROC that the Makefile knows, and with the README's ARGS."""
    fits = {"2": "", **dict(re.findall(r"^FIT_(\d+) := (.*)$", MAKEFILE, flags=re.MULTILINE))}
    (recipe,) = re.findall(r"^demo: setup\n(?:\t@.*\n)*\t\$\(BIN\)/(.*)$", MAKEFILE, flags=re.MULTILINE)
    assert "$(NPROC)" in recipe and "$(FIT_$(NPROC))" in recipe and recipe.endswith(" $(ARGS)")
    commands = []
    for ranks, fit in fits.items():
        for args in ["", *(re.findall(r"`make demo ARGS='([^']*)'`", TEXTS["README.md"]) if ranks == "2" else [])]:
            filled = recipe.replace("$(FIT_$(NPROC))", fit).replace("$(NPROC)", ranks).replace("$(DEVICE)", "cpu").replace("$(ARGS)", args)
            commands.append((f"make demo NPROC={ranks}", filled))
    return commands


def arguments_of(command: str) -> list[str]:
    """What `nemo-moe finetune` would be given to do the same."""
    words = shlex.split(command)
    if words[0] == "sbatch":
        sizes = dict(re.findall(r"^#SBATCH --(nodes|gpus-per-node)=(\d+)", TEXTS["examples/slurm.sh"], flags=re.MULTILINE))
        return [*words[2:], "--nnodes", sizes["nodes"], "--nproc-per-node", sizes["gpus-per-node"]]
    if words[0] == "torchrun":
        return [word for word in words[1:] if word != "recipes/finetune.py"]
    return words[2:]


COMMANDS = [*written_out(), *of_make()]


def test_the_commands_are_found() -> None:
    found = {where for where, _ in COMMANDS}
    assert {*TEXTS, *(f"make demo NPROC={ranks}" for ranks in (1, 2, 4))} <= found
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=[f"{where}: {command}" for where, command in COMMANDS])
def test_a_documented_command_comes_to_a_run(where: str, command: str, tmp_path: Path) -> None:
    _, arguments = cli._finetune_arguments(arguments_of(command))
    recipe = arguments.recipe
    if recipe == "my_run.yaml":  # which the README makes out of the demo
        recipe = str(tmp_path / recipe)
        Path(recipe).write_text(to_yaml(load_recipe("demo")), encoding="utf-8")
    config = load_recipe(recipe, arguments.overrides)
    if arguments.print_config and not is_launch(arguments):
        assert model_config(config.model).num_hidden_layers > 0
        return
    ranks, here = total_ranks(arguments), local_ranks(arguments)
    assert ranks is not None
    for device_count in (0, here):
        assert resolve(config, ranks, device_count=device_count, local_world_size=here).sizes.world_size == ranks
