"""Reading Hugging Face configs, whatever generation of names they use; shared by all model families.

`standard_names` brings old and new spellings to one, `merged` lays a user's changes over a folder's config, and `Fields`
hands out values with their types checked. A value that the code here cannot honour is the family's to refuse. A key
that nobody knows is kept where it comes from a folder (unless it looks like a misspelling of one that means something)
and refused where a user wrote it: a folder's file is what it is, but what a user asks for must not be ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Newer (or other) spelling -> the spelling of the hub's files, which is the one used here and written back.
_RENAMED = {"num_local_experts": "num_experts", "dtype": "torch_dtype"}

# What else people call a key, where the nearest name would be another one.
_FOREIGN = {"hidden": "hidden_size", "top_k": "num_experts_per_tok", "topk": "num_experts_per_tok", "n_routed_experts": "num_experts"}


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


# Keys any Hugging Face config may have that change nothing about the weights or the forward pass; kept and written back.
# They stand with what their values may be, null aside: what is written has to be read by transformers.
_KEPT: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a whole number",
        _is_whole,
        "bos_token_id chunk_size_feed_forward decoder_start_token_id max_window_layers pad_token_id pretraining_tp sep_token_id",
    ),
    ("a whole number or a list of them", lambda value: _is_whole(value) or _is_list_of(_is_whole)(value), "eos_token_id"),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        "is_decoder is_encoder_decoder output_attentions output_hidden_states output_router_logits return_dict torchscript use_bfloat16"
        " use_cache",
    ),
    (
        "text",
        lambda value: isinstance(value, str),
        "finetuning_task problem_type tokenizer_class transformers_version _attn_implementation _experts_implementation _name_or_path",
    ),
    ("a list of texts", _is_list_of(lambda value: isinstance(value, str)), "architectures"),
    (
        "a list of full_attention and sliding_attention",
        _is_list_of(lambda value: value in ("full_attention", "sliding_attention")),
        "layer_types",
    ),
    ("a mapping", lambda value: isinstance(value, Mapping), "auto_map id2label label2id"),
)
HARMLESS_KEYS = {key: (kind, fits) for kind, fits, keys in _KEPT for key in keys.split()}


def standard_names(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an HF config with old and new key names brought to one spelling.

    All about rotary positions (`rope_theta`, `rope_scaling` with `type` or `rope_type`, `rope_parameters`) becomes one
    dict under `rope_parameters`, holding only what was given.

    Raises ValueError when two spellings of one thing disagree.
    """
    result: dict[str, Any] = {}
    for key, value in hf.items():
        name = _RENAMED.get(key, key)
        if name == "torch_dtype" and value is not None:
            value = str(value).removeprefix("torch.")
        if name in result and result[name] != value:
            other = next(old for old in hf if old != key and _RENAMED.get(old, old) == name)
            raise ValueError(f"{key} is {hf[key]!r}, but {other}, another name for the same thing, is {hf[other]!r}; keep one of them")
        result[name] = value
    rope = _rope_parameters(result)
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        result.pop(key, None)
    if rope:
        result["rope_parameters"] = rope
    return result


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    sections = [config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None]
    for section in sections:
        if not isinstance(section, Mapping):
            raise ValueError(f"rope_scaling / rope_parameters must be a mapping, found {section!r}")
    flat = [{("rope_type" if name == "type" else name): value for name, value in section.items()} for section in sections]
    if len(flat) == 2:
        old, new = ({name: value for name, value in section.items() if name != "rope_theta"} for section in flat)
        if new.get("rope_type", "default") != "default" and old != new:
            raise ValueError(f"rope_scaling ({old}) and rope_parameters ({new}) disagree; keep one of them")
    if not flat and "rope_scaling" in config:
        flat = [{"rope_type": "default"}]  # an explicit null turns scaling off when it is laid over another config
    rope = dict(flat[0]) if flat else {}
    thetas = [section["rope_theta"] for section in (config, *flat) if section.get("rope_theta") is not None]
    if any(theta != thetas[0] for theta in thetas[1:]):
        raise ValueError(f"rope_theta is given more than once, with different values: {', '.join(map(str, thetas))}")
    if thetas:
        rope["rope_theta"] = thetas[0]
    return rope


def merged(hf: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """A folder's config with a user's changes, in standard names whichever spelling either of them used.

    A change that names a `rope_type` replaces the folder's scaling (rope_theta stays unless given); without one it
    changes single settings.
    """
    base, changes = standard_names(hf), standard_names(overrides or {})
    rope, new_rope = base.get("rope_parameters", {}), changes.pop("rope_parameters", {})
    if "rope_type" in new_rope and "rope_theta" in rope:
        new_rope = {"rope_theta": rope["rope_theta"], **new_rope}
    elif "rope_type" not in new_rope:
        new_rope = {**rope, **new_rope}
    return {**base, **changes, **({"rope_parameters": new_rope} if new_rope else {})}


def _legal(meaningful: Iterable[str]) -> set[str]:
    """All spellings of the keys that a family reads."""
    return {*meaningful, *_RENAMED, "rope_theta", "rope_scaling", "rope_parameters"}


def refuse_misspelt(keys: Iterable[str], meaningful: Iterable[str], family: str) -> None:
    """Raise ValueError for an unknown key that resembles a known one; other unknown keys pass.

    Args:
        keys: of a folder's config.
        meaningful: the keys that the family reads.
    """
    spellings = _legal(meaningful) | set(HARMLESS_KEYS)
    for key in keys:
        near = [] if key in spellings else difflib.get_close_matches(key, spellings, n=1, cutoff=0.85)
        if near:
            raise ValueError(f"model config of {family}: unknown key {key!r}; did you mean {near[0]!r}?")


def refuse_unknown(keys: Iterable[str], meaningful: Iterable[str], family: str) -> None:
    """Raise ValueError for every key that is not Hugging Face's, with the nearest ones and what is legal.

    Args:
        keys: that a user wrote.
        meaningful: the keys that the family reads.
    """
    legal = _legal(meaningful)
    unknown = [key for key in keys if key not in legal and key not in HARMLESS_KEYS]
    if not unknown:
        return
    hints = []
    for key in unknown:
        near = [_FOREIGN[key]] if key in _FOREIGN else difflib.get_close_matches(key, sorted(legal), n=1)
        near = near or difflib.get_close_matches(key, sorted(HARMLESS_KEYS), n=1, cutoff=0.85)
        hints.append(f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    found = hints[0] if len(hints) == 1 else "".join(f"\n  - {hint}" for hint in hints) + "\n "
    raise ValueError(
        f"model config of {family}: {found} (legal: {', '.join(sorted(legal))};"
        " and Hugging Face's keys without effect here, such as use_cache)"
    )


def check_kept(values: Mapping[str, Any], num_hidden_layers: int) -> None:
    """Raise ValueError for a key without effect here whose value transformers would not read in the saved model."""
    for key, (kind, fits) in HARMLESS_KEYS.items():
        value = values.get(key)
        if value is not None and not fits(value):
            raise ValueError(f"model config: {key} must be {kind}, or null; found {value!r}")
    layer_types = values.get("layer_types")
    if layer_types is not None and len(layer_types) != num_hidden_layers:
        raise ValueError(
            f"model config: layer_types has {len(layer_types)} entries, and num_hidden_layers is {num_hidden_layers};"
            " give one for each layer, or set layer_types to null"
        )


class Fields:
    """Typed access to an HF config in standard names; what is absent takes the family's default.

    Args:
        values: the config.
        defaults: default by key; its type is the type asked for.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values, self._defaults = values, defaults

    def integer(self, key: str) -> int:
        return int(self._number(key, whole=True))

    def number(self, key: str) -> float:
        return float(self._number(key, whole=False))

    def flag(self, key: str) -> bool:
        value = self._value(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise ValueError(f"model config: {key} must be true or false, found {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self._value(key) is None else self.integer(key)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._value(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValueError(f"model config: {key} must be a list of whole numbers, found {value!r}")
        return tuple(Fields({key: item}, {}).integer(key) for item in value)

    def _value(self, key: str) -> Any:
        return self._values[key] if key in self._values else self._defaults[key]

    def _number(self, key: str, *, whole: bool) -> float:
        value = self._value(key)
        kind: type[int] | type[float] = int if whole else float
        if not isinstance(value, bool) and isinstance(value, (str, int, kind)):
            try:  # text too, "20" and "1e-6": YAML readers differ on what is a number
                number = kind(value)
                if math.isfinite(number):
                    return number
            except (ValueError, OverflowError):
                pass
        raise ValueError(f"model config: {key} must be a {'whole ' if whole else 'finite '}number, found {value!r}")
