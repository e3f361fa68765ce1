"""YAML and overrides -> RunConfig, or one ConfigError that lists everything that is wrong with them.

A recipe is a YAML file whose keys are the fields of `config.RunConfig`; `defaults: [base, _self_]` inherits from files
in its own folder (Hydra's compose API does that, without Hydra's run folders and logging). Overrides are Hydra's
`key=value`, applied last; a nested one keeps the rest of its section. Keys and values are then checked by `schema.py`
against the dataclasses: Hydra and OmegaConf would let `+new=1`, `++typo=1` and a text for a number through. So a `+` or
`++` in front of a known key changes nothing, and in front of an unknown one does not help.

What needs the number of ranks or the machine is not checked here, but in `resolve.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_moe.config import RunConfig
from nemo_moe.schema import FOREIGN_KEYS, Problem, build, join

# Sections whose keys are not this package's: what a base recipe set there may be taken out again with ~.
FREE_KEY = re.compile(r"model\.config\..+|data\.tasks\.\d+\.params\..+")


_MOST_VALUES = 100_000  # of a recipe; a few nested aliases come to billions


class ConfigError(ValueError):
    """A recipe or an override cannot be used. The message names each key, what was found and what is legal."""


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a recipe and overrides describe.

    Args:
        name_or_path: the name of a recipe that ships (`demo`), or the path of a YAML file.
        overrides: `key=value` with dotted keys (`optimizer.lr=5e-4`, `data.tasks.0.train_size=100`), `~key` to take a
            key out of `model.config`.

    Raises:
        ConfigError: with every problem found.
    """
    path = find_recipe(name_or_path)
    sources = dict(_key_lines(path))
    if "hydra" in sources:  # Hydra would take the section out, so that nothing below would see it
        raise ConfigError(f"recipe {name_or_path!r}: hydra: {FOREIGN_KEYS['hydra']} ({sources['hydra']})")
    parsed = [_parse_override(text) for text in overrides]
    values = _apply_overrides(_compose_file(path), parsed, sources)
    problems: list[Problem] = []
    config = build(RunConfig, values, problems)
    if problems:
        raise _config_error(f"recipe {name_or_path!r}", [_located(problem, sources) for problem in problems])
    assert isinstance(config, RunConfig)
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    """A config as nested dicts, lists and scalars: what is printed, logged and saved."""

    def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: item.value if isinstance(item, Enum) else item for key, item in items}

    return dataclasses.asdict(config, dict_factory=plain)


def to_yaml(config: RunConfig) -> str:
    """A config as YAML that `load_recipe` reads back to an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(_without_interpolations(to_plain(config))))


def _without_interpolations(value: Any) -> Any:
    """Plain values in which every `${` is marked as text, since OmegaConf would replace it."""
    if isinstance(value, dict):
        return {key: _without_interpolations(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_interpolations(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def recipe_folder() -> Path:
    """The folder of the recipes that ship: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def list_recipes() -> dict[str, str]:
    """Names of the recipes that ship -> their first comment line. Files whose name starts with _ are parts of others."""
    folder = recipe_folder()
    files = sorted(file for file in folder.rglob("*.yaml") if not file.name.startswith("_"))
    return {file.relative_to(folder).with_suffix("").as_posix(): _summary(file) for file in files}


def find_recipe(name_or_path: str) -> Path:
    """The absolute path of a recipe's YAML file. Raises ConfigError listing the recipes where there is no such one."""
    if name_or_path.endswith(".yml"):
        raise ConfigError(f"recipe {name_or_path!r}: Hydra reads files named .yaml only; rename it")
    names = list_recipes()
    if name_or_path in names:
        return recipe_folder() / f"{name_or_path}.yaml"
    try:
        path = Path(name_or_path).expanduser()
        if name_or_path.endswith(".yaml") and path.is_file():
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, the home folder of nobody, a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"recipe {name_or_path[:200]!r}: {reason}") from error
    what = "no such file" if name_or_path.endswith(".yaml") else "no recipe of that name, and no path of a .yaml file"
    near = difflib.get_close_matches(path.stem, list(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"recipe {name_or_path!r}: {what}{hint} (recipes that ship: {', '.join(names) or 'none'})")


def _summary(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        first = lines.readline()
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _key_lines(path: Path, heirs: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """(dotted path, "file line n") of every key in a recipe and in what it inherits from, in the order of inheritance.

    Raises ConfigError, with file and line, for a file that is not readable YAML or inherits from one that is not there.
    """
    root = _yaml_tree(path)
    parts, line = _defaults(root, path)
    for part in parts:
        if part == "_self_":
            yield from _lines_below(root, "", path.name)
        elif isinstance(part, str):
            yield from _key_lines(_inherited_file(path, part, line, heirs), (*heirs, path))


def _defaults(root: yaml.MappingNode, path: Path) -> tuple[list[Any], int]:
    """The defaults list of a file, `_self_` included (last, as Hydra has it), and its line."""
    parts: Any = []
    line = 1
    for key, value in root.value:
        if key.value == "defaults":
            line = key.start_mark.line + 1
            parts = yaml.SafeLoader("").construct_document(value)
    if not isinstance(parts, list):
        raise ConfigError(f"{path} line {line}: defaults needs a list, such as [base, _self_]")
    return (parts if "_self_" in parts else [*parts, "_self_"]), line


def _inherited_file(path: Path, part: str, line: int, heirs: tuple[Path, ...]) -> Path:
    if Path(part).is_absolute() or ".." in Path(part).parts:
        raise ConfigError(f"{path} line {line}: inherits from {part!r}, but a recipe inherits from files of its own folder only")
    file = path.parent / f"{part.removesuffix('.yaml')}.yaml"
    if file == path or file in heirs:
        raise ConfigError(f"{path} line {line}: inherits from {part!r}, which inherits from it")
    if not file.is_file():
        others = sorted(other.stem for other in path.parent.glob("*.yaml") if other != path)
        near = difflib.get_close_matches(part, others, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path} line {line}: inherits from {part!r}, but there is no {file}{hint}")
    return file


def _yaml_tree(path: Path) -> yaml.MappingNode:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is not None and _written_out(root, {}) > _MOST_VALUES:
            raise ConfigError(f"{path}: comes to more than {_MOST_VALUES} values with its aliases (*name) written out; use fewer")
        OmegaConf.load(path)  # refuses what the tree alone does not show: a key given twice, a tag it does not know
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not readable as YAML: {error.problem or error.context}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: {'is empty' if root is None else 'is not a mapping of keys'}; a recipe starts like `model:`")
    return root


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node comes to when each alias stands for a copy, without making them."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # what it counts as inside itself: an alias of what it is part of has no end
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        children = node.value if isinstance(node, yaml.SequenceNode) else [each for pair in pairs for each in pair]
        known[id(node)] = 1 + sum(_written_out(child, known) for child in children)
    return known[id(node)]


def _lines_below(node: yaml.Node, path: str, file: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = join(path, key.value)
            yield below, f"{file} line {key.start_mark.line + 1}"
            yield from _lines_below(value, below, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            below = join(path, index)
            yield below, f"{file} line {value.start_mark.line + 1}"
            yield from _lines_below(value, below, file)


def _compose_file(path: Path) -> DictConfig:
    try:
        with initialize_config_dir(str(path.parent), version_base="1.3"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*missing `_self_`")  # then it comes last, as anyone would expect
            config = compose(config_name=path.stem)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from error
    OmegaConf.set_struct(config, False)
    return config


def _parse_override(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        raise ConfigError(f"override {text!r}: missing '='; write key=value, such as optimizer.lr=1e-4")
    try:
        override: Override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        quoted = value.replace('"', '\\"')
        dotted = re.sub(r"\[(\w+)\]", r".\1", key)
        fix = f"a value with special characters needs quotes: '{key}=\"{quoted}\"'"
        raise ConfigError(f"override {text!r}: {reason}; {fix if dotted == key else f'write {dotted}={value}'}") from error
    if not override.key_or_group or override.package is not None:
        raise ConfigError(f"override {text!r}: {override.input_line!r} names no key; write key=value, such as optimizer.lr=1e-4")
    if override.is_sweep_override():
        fix = f"for a list write {key}=[{value}]" if override.value_type is ValueType.SIMPLE_CHOICE_SWEEP else "write that one"
        raise ConfigError(f"override {text!r}: is a sweep over several values, and a run has one; {fix}")
    return override


def _apply_overrides(config: DictConfig, overrides: list[Override], sources: dict[str, str]) -> Any:
    """The composed recipe with the overrides applied, interpolations resolved, as plain values."""
    for override in overrides:
        key, text = override.key_or_group, override.input_line
        try:
            if override.is_delete():
                _delete(config, override)
            else:
                OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError, IndexError) as error:
            raise ConfigError(f"override {text!r}: {str(error).splitlines()[0]}") from error
        sources[key] = f"command line: {text}"
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'an interpolation'}: {message}") from error


def _delete(config: DictConfig, override: Override) -> None:
    """Take a key out; `~key=value` only where that is its value."""
    key = override.key_or_group
    parent, _, name = key.rpartition(".")
    if not FREE_KEY.fullmatch(key):
        raise ValueError("only keys of model.config and of a task's params can be taken out; give another key a value instead")
    section = OmegaConf.select(config, parent)
    if not isinstance(section, DictConfig) or name not in section:
        raise ValueError(f"{key} is not there to be taken out")
    if override.value_type is not None and section[name] != override.value():
        raise ValueError(f"{key} is {section[name]!r}, not {override.value()!r}; write ~{key} to take it out whatever it is")
    del section[name]


def _located(problem: Problem, sources: dict[str, str]) -> str:
    """The problem with the place that the value, or the nearest section above it, was written in."""
    path = problem.path
    if not path:
        return problem.text
    below = (source for source in sources if source.startswith(f"{path}."))
    while path and path not in sources:
        path = path.rpartition(".")[0]
    place = sources.get(path) or sources.get(next(below, ""))
    return f"{problem.path}: {problem.text}" + (f" ({place})" if place else "")


def _config_error(subject: str, lines: list[str]) -> ConfigError:
    if len(lines) == 1:
        return ConfigError(f"{subject}: {lines[0]}")
    return ConfigError(f"{subject} has {len(lines)} problems:" + "".join(f"\n  - {line}" for line in lines))
