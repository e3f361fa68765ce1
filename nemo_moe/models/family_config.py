"""What the Hugging Face configs of all families here have in common: reading it, and writing it back.

A family gives its defaults and its own keys; the rest (old and new names, unknown keys, what no decoder here can do)
follows one rule for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_moe.layers.rope import RopeConfig
from nemo_moe.models.decoder import DecoderConfig
from nemo_moe.models.hf_config import Fields, check_kept, merged, refuse_misspelt, refuse_unknown

_ALSO_READ = frozenset({"rope_parameters", "model_type", "quantization_config", "partial_rotary_factor"})


def read_config(
    hf: Mapping[str, Any], overrides: Mapping[str, Any] | None, *, model_type: str, defaults: Mapping[str, Any], rope_theta: float
) -> tuple[Fields, dict[str, Any]]:
    """An HF config with a user's changes, checked.

    Args:
        hf, overrides: either in old or new names.
        defaults: value of an absent key, for every key that the family reads.
        rope_theta: where neither says one.

    Returns:
        The values, for what only this family has; and the fields of `DecoderConfig` that every family reads alike.

    Raises:
        ValueError: see a family's `from_hf`.
    """
    values = merged(hf, overrides)
    _refuse_unsupported(values, model_type)
    read = {*defaults, *_ALSO_READ}
    refuse_unknown(overrides or {}, read, model_type)
    refuse_misspelt(hf, read, model_type)
    fields = Fields(values, defaults)
    check_kept(values, fields.integer("num_hidden_layers"))
    heads = fields.integer("num_attention_heads")
    if heads < 1:
        raise ValueError(f"model config: num_attention_heads must be 1 or more, found {heads}")
    hidden_size = fields.integer("hidden_size")
    rope = {key: value for key, value in values.get("rope_parameters", {}).items() if value is not None}
    head_dim = fields.optional_integer("head_dim")
    shared = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if values.get("num_key_value_heads", 0) is None else fields.integer("num_key_value_heads"),
        "head_dim": hidden_size // heads if head_dim is None else head_dim,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "initializer_range": fields.number("initializer_range"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "attention_dropout": fields.number("attention_dropout"),
        "rope": RopeConfig.from_settings({"rope_theta": rope_theta, **rope}),
        "num_experts": fields.integer("num_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
        "router_aux_loss_coef": fields.number("router_aux_loss_coef"),
        "sliding_window": fields.optional_integer("sliding_window"),
        "dtype": values.get("torch_dtype"),
        "extra": {key: value for key, value in values.items() if key not in read},
    }
    return fields, shared


def written_config(config: DecoderConfig, keys: Iterable[str], *, model_type: str, architecture: str) -> dict[str, Any]:
    """The HF config in the hub's spelling, with the values of `keys` and the unknown keys that `config` came with."""
    rope = config.rope.settings()
    theta = rope.pop("rope_theta")
    own = {key: getattr(config, key) for key in keys if key not in ("hidden_act", "torch_dtype")}
    return {
        "architectures": [architecture],
        **config.extra,
        "model_type": model_type,
        **own,
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        **({"torch_dtype": config.dtype} if config.dtype is not None else {}),
    }


def _refuse_unsupported(values: Mapping[str, Any], family: str) -> None:
    model_type = values.get("model_type", family)
    if model_type != family:
        raise ValueError(f"model config: model_type is {model_type!r}, but the family is {family!r}; choose the checkpoint's family")
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"model config: hidden_act: unknown value {activation!r} (legal: silu)")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"model config: partial_rotary_factor must be 1 (whole heads rotate), found {values['partial_rotary_factor']!r}")
    if values.get("original_max_position_embeddings") is not None:
        raise ValueError("model config: original_max_position_embeddings belongs inside rope_scaling (or rope_parameters); move it there")
    if values.get("quantization_config") is not None:
        raise ValueError("model config: quantization_config is set, but quantised checkpoints cannot be trained; use the unquantised one")
