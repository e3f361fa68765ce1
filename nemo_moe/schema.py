"""Plain values against the dataclasses of `config.py`: builds them, or says of each key what is wrong with it.

Keys are addressed by dotted path (`data.tasks.0.name`), the same in YAML messages and in overrides. The rules of type:
a number in quotes counts where it parses exactly as the field's type ("20", "5e-4", "true"); nothing else is converted,
so 1.5 is no whole number, true is no number and 2024 is no text. Words that users of other frameworks write are refused
with the key to use here. Left out on purpose: OmegaConf's structured configs, which accept keys that `+` or a YAML
without the schema adds, turn any value into text, and stop at the first problem.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from nemo_moe.config import RunConfig

MISSING = "???"  # OmegaConf's mark for a value that the user must give
_INVALID: Any = object()  # a value about which a problem has been noted

# Old and foreign keys -> what to use here. A section's entry covers what is below it, unless a longer path says more.
FOREIGN_KEYS: dict[str, str] = {
    "backend.enable_deepep": "use backend.dispatcher",
    "backend.te_fp8": "use backend.experts_fp8 (current, block or mxfp8)",
    "backend.fake_balanced_gate": "use router.fake_balanced",
    "backend.fake_gate_noise": "there is no noisy fake gate; router.fake_balanced routes evenly",
    "backend.attn": "attention is torch's scaled_dot_product_attention; remove it",
    "backend.linear": "linear layers are torch's; remove it",
    "backend.rms_norm": "norms are computed in fp32; remove it",
    "backend.rope_fusion": "remove it",
    "model.backend": "backend is a section of its own at the top level: backend.dispatcher, backend.experts",
    "model.pretrained_model_name_or_path": "use model.path, a local folder in Hugging Face layout",
    "model._target_": "use model.family",
    "model.torch_dtype": "use precision (fp32 or bf16)",
    "model.dtype": "use precision (fp32 or bf16)",
    "step_scheduler.global_batch_size": "use train.global_batch_size",
    "step_scheduler.local_batch_size": "use train.micro_batch_size",
    "step_scheduler.num_epochs": "use train.num_epochs",
    "step_scheduler.max_steps": "use train.max_steps",
    "step_scheduler.val_every_steps": "use validation.every_steps",
    "step_scheduler.log_remote_every_steps": "use logging.every_steps",
    "step_scheduler": "its keys are in train, validation and logging",
    "per_device_train_batch_size": "use train.micro_batch_size",
    "gradient_accumulation_steps": "it follows from train.global_batch_size and train.micro_batch_size; remove it",
    "train.gradient_accumulation_steps": "it follows from train.global_batch_size and train.micro_batch_size; remove it",
    "train.local_batch_size": "use train.micro_batch_size",
    "learning_rate": "use optimizer.lr",
    "bf16": "use precision: bf16",
    "optimizer._target_": "use optimizer.name (adamw or sgd)",
    "lr_scheduler": "use schedule.name, schedule.warmup_steps and schedule.min_lr_ratio",
    "wandb": "use logging.wandb",
    "rng": "use seed",
    "recipe": "remove it; a recipe file is a run",
    "dist_env.timeout_minutes": "use distributed.timeout_minutes",
    "dist_env": "the process group follows from device (nccl on cuda, gloo on cpu); remove it",
    "distributed.strategy": "FSDP2 is the only one; remove it",
    "distributed.dp_size": "use distributed.fsdp_size (and distributed.dp_replicate_size for replicas of it)",
    "distributed.activation_checkpointing": "use train.activation_checkpointing (none, full or selective)",
    "distributed.cp_size": "there is no context parallelism here; remove it",
    "distributed.pp_size": "there is no pipeline parallelism here; remove it",
    "dataset": "use data",
    "validation_dataset": "data.held_out_per_task sets the held-out items aside",
    "checkpoint.checkpoint_dir": "use output_dir",
    "moe_metrics": "expert load is always logged; remove it",
    "hydra": "Hydra itself is not configurable from a recipe; remove it",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is wrong with the value at a dotted path ("" is the whole recipe)."""

    path: str
    text: str


def join(path: str, key: object) -> str:
    """The dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def build(schema: type, values: Any, problems: list[Problem], path: str = "") -> Any:
    """A dataclass `schema` from plain nested values; None, and more in `problems`, where that is not possible."""
    if not isinstance(values, Mapping):
        problems.append(Problem(path, f"needs a section of keys, found {describe(values)}"))
        return None
    hints = typing.get_type_hints(schema)
    names = [field.name for field in dataclasses.fields(schema)]
    before = len(problems)
    for key, value in values.items():
        if key == "":
            problems.append(Problem(path, f"has an empty key with {describe(value)} below it; give it a name or remove it"))
        elif isinstance(key, str) and "." in key:
            keys = ", ".join(f"{part}:" for part in key.split("."))
            problems.append(Problem(join(path, key), f"is one key with dots in it; in YAML, write the keys below one another: {keys}"))
        elif key not in names:
            problems.extend(unknown_key(join(path, key), value, schema, path))
    built = {name: _convert(hints[name], values[name], problems, join(path, name)) for name in names if name in values}
    for field in dataclasses.fields(schema):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            problems.append(Problem(join(path, field.name), "is missing"))
    if len(problems) > before:
        return None
    try:
        return schema(**built)
    except ValueError as error:
        problems.append(Problem("", str(error)))
        return None


def unknown_key(path: str, value: Any, schema: type, parent: str) -> Iterator[Problem]:
    """Problems for a key that the dataclass `schema` at `parent` does not have: one, or one per foreign key below it."""
    if isinstance(value, Mapping) and any(name.startswith(f"{path}.") for name in FOREIGN_KEYS):
        for key, inner in value.items():
            yield from unknown_key(join(path, key), inner, schema, parent)
        return
    while isinstance(value, Mapping) and len(value) == 1 and not _foreign(path):
        ((key, value),) = value.items()  # as `optimiser.lr=1` on the command line: the whole key is what was misspelt
        path = join(path, key)
    foreign = _foreign(path)
    if foreign:
        yield Problem(path, f"is another framework's or an older key; {foreign}")
    else:
        yield Problem(path, f"unknown key{_hint(path, schema, parent)}")


def _foreign(path: str) -> str | None:
    """What FOREIGN_KEYS says of a path, or of the nearest section above it."""
    while path and path not in FOREIGN_KEYS:
        path = path.rpartition(".")[0]
    return FOREIGN_KEYS.get(path)


def key_paths(schema: type = RunConfig, path: str = "") -> list[str]:
    """All dotted paths that a recipe may use (those inside lists and free mappings aside)."""
    paths: list[str] = []
    for name, hint in typing.get_type_hints(schema).items():
        paths.append(join(path, name))
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            paths.extend(key_paths(hint, join(path, name)))
    return paths


def _hint(path: str, schema: type, parent: str) -> str:
    """What an unknown key was meant to be: a key beside it, a like path or the same name elsewhere; else what is legal."""
    siblings = [field.name for field in dataclasses.fields(schema)]
    name = path.rpartition(".")[2]
    near: list[str] = []
    if path == join(parent, name):
        near = [join(parent, sibling) for sibling in difflib.get_close_matches(name, siblings, n=1)]
    elsewhere = [known for known in key_paths() if known.rpartition(".")[0] != parent and known.count(".") >= path.count(".")]
    near = near or difflib.get_close_matches(path, elsewhere, n=1, cutoff=0.75)
    near = near or [known for known in elsewhere if known.rpartition(".")[2] == name]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f" (legal in {parent or 'the top level'}: {', '.join(siblings)})"


def _convert(hint: Any, value: Any, problems: list[Problem], path: str) -> Any:
    """`value` as the annotated type, or _INVALID with a problem noted."""
    if value == MISSING and isinstance(value, str):
        problems.append(Problem(path, f"must be given; the recipe leaves it open ({path}=...)"))
        return _INVALID
    inner, optional = _without_none(hint)
    if value is None and optional:
        return None
    if inner is Any:
        return value
    if dataclasses.is_dataclass(inner):
        return build(typing.cast(type, inner), value, problems, path)
    origin = typing.get_origin(inner)
    if origin is list and isinstance(value, list):
        element = typing.get_args(inner)[0]
        return [_convert(element, item, problems, join(path, index)) for index, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return _free_mapping(value, problems, path)
    converted = _INVALID if origin else _scalar(inner, value)
    if converted is _INVALID:
        problems.append(Problem(path, f"needs {_needs(inner, optional)}, found {describe(value)}{_advice(inner, value, path)}"))
    return converted


def _free_mapping(value: Mapping[Any, Any], problems: list[Problem], path: str) -> Any:
    """A mapping whose keys this package does not define: any text will do, and values that YAML can hold."""
    for key, inner in value.items():
        if not isinstance(key, str):
            problems.append(Problem(path, f"its keys need to be text, found {describe(key)}"))
        elif isinstance(inner, str) and inner == MISSING:
            problems.append(Problem(join(path, key), "must be given; the recipe leaves it open"))
    return dict(value)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); anything else -> (itself, False)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(hint) if option is not type(None)]
        assert len(inner) == 1, f"the schema knows `X | None` unions only, not {hint}"
        return inner[0], True
    return hint, False


def _scalar(kind: type, value: Any) -> Any:
    """`value` as bool, int, float, str or Enum `kind`; _INVALID where it is not one."""
    if issubclass(kind, Enum):
        return kind[value] if isinstance(value, str) and value in kind.__members__ else _INVALID
    if kind is str:
        return str(value) if isinstance(value, str) else _INVALID
    if kind is bool:
        return {"true": True, "false": False}.get(str(value).lower(), _INVALID) if isinstance(value, bool | str) else _INVALID
    if isinstance(value, bool) or not isinstance(value, int | float | str) or (kind is int and isinstance(value, float)):
        return _INVALID
    try:
        number = int(value) if kind is int else float(value)
    except (ValueError, OverflowError):
        return _INVALID
    return number if math.isfinite(number) else _INVALID


def _needs(kind: Any, optional: bool) -> str:
    origin = typing.get_origin(kind) or kind
    if issubclass(origin, Enum):
        text = f"one of {', '.join(origin.__members__)}"
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a section of keys"}
        text = words[origin]
    return f"{text} or null" if optional else text


def _advice(kind: Any, value: Any, path: str) -> str:
    if kind is str and isinstance(value, bool | int | float):
        return f"; to mean it as text, quote it ({path}='\"{value}\"' on the command line)"
    if typing.get_origin(kind) is list and isinstance(value, Mapping) and all(str(key).isdigit() for key in value):
        return f"; there is no list yet whose places could be changed, so write it whole: {path}=[...]"
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        near = difflib.get_close_matches(value, list(kind.__members__), n=1)
        return f"; did you mean {near[0]}?" if near else ""
    return ""


def describe(value: Any) -> str:
    """A found value in words, with its kind, since `"true"` and `true` look alike in a message."""
    if value is None:
        return "nothing (an empty value is null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {str(value)!r}"
    return "a list" if isinstance(value, list) else "a section of keys"
