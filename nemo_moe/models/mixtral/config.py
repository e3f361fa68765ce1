"""Mixtral's Hugging Face config, mapped both ways.

Old and new key names are read alike and the hub's are written (`num_local_experts`, `torch_dtype`, `rope_theta`). Absent
keys have the defaults of transformers' class. The width of an expert is `intermediate_size`: there are no dense layers.

Left out: noise on the router's input in training (`router_jitter_noise`), which is refused unless it is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_moe.config import MoEConfig
from nemo_moe.models.decoder import DecoderConfig
from nemo_moe.models.family_config import read_config, written_config

MODEL_TYPE = "mixtral"
_ROPE_THETA = 1e6
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": None,
}


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """Sizes and rules of a Mixtral model. Built by `from_hf`.

    Attributes:
        sliding_window: tokens that each layer looks back over, itself included; None is all of them.
    """

    sliding_window: int | None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"model config: sliding_window must be 1 or more tokens, or null for no window; found {self.sliding_window}")
        super().__post_init__()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> MixtralConfig:
        """From an HF config (a parsed config.json), with a user's changes on top; either may use old or new names.

        Raises:
            ValueError: a value of the wrong type or range, one that this code cannot honour, two names of one thing that
                disagree, another `model_type`, an unknown key among the changes, or one in `hf` that looks misspelt
                (other unknown keys of `hf` are kept).
        """
        fields, shared = read_config(hf, overrides, model_type=MODEL_TYPE, defaults=_DEFAULTS, rope_theta=_ROPE_THETA)
        noise = fields.number("router_jitter_noise")
        if noise:
            raise ValueError(
                f"model config: router_jitter_noise is {noise:g}, but no noise is put on the router's input here;"
                " set it to 0 (it acts in training only: what the model computes otherwise stays the same)"
            )
        return cls(**shared, moe_intermediate_size=shared["intermediate_size"], attention_bias=False)

    def to_hf(self) -> dict[str, Any]:
        """The HF config in the hub's spelling, unknown keys included; `from_hf` of it equals this config."""
        keys = [key for key in _DEFAULTS if key not in ("num_experts", "router_jitter_noise")]
        hf = written_config(self, keys, model_type=MODEL_TYPE, architecture="MixtralForCausalLM")
        return {**hf, "num_local_experts": self.num_experts, "router_jitter_noise": 0.0}

    @property
    def norm_topk_prob(self) -> bool:
        """A token's routing weights are always divided by their sum."""
        return True

    @property
    def qk_norm(self) -> bool:
        return False

    def is_moe_layer(self, index: int) -> bool:
        return True

    def attention_window(self, index: int) -> int | None:
        return self.sliding_window

    def moe(self, *, use_expert_bias: bool) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            norm_topk_prob=True,
            use_expert_bias=use_expert_bias,
        )
