"""Qwen3-MoE's Hugging Face config, mapped both ways.

Files of the hub (2025: `num_experts`, `torch_dtype`, `rope_theta`, `rope_scaling`) and those that transformers 5 writes
(`num_local_experts`, `dtype`, `rope_parameters`) are read alike; the hub's spelling is written, because every
transformers that knows the family reads it. Absent keys have the defaults of transformers' class, among them
`norm_topk_prob: false`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_moe.config import MoEConfig
from nemo_moe.models.decoder import DecoderConfig
from nemo_moe.models.family_config import read_config, written_config

MODEL_TYPE = "qwen3_moe"
_ROPE_THETA = 10000.0
_logger = logging.getLogger(__name__)
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "torch_dtype": None,
}


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Sizes and rules of a Qwen3-MoE model. Built by `from_hf`.

    Attributes:
        norm_topk_prob: a token's routing weights are divided by their sum.
        decoder_sparse_step, mlp_only_layers: layer i has experts when i + 1 is a multiple of the step and i is not listed.
        sliding_window: as the config says it; it acts where `use_sliding_window` is true, and then in every layer,
            which is transformers' rule: it does not look at `max_window_layers` for this family, nor does this code,
            which says so in a warning.
    """

    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    use_sliding_window: bool
    sliding_window: int | None

    def __post_init__(self) -> None:
        if self.decoder_sparse_step < 1:
            raise ValueError(f"model config: decoder_sparse_step must be 1 or more, found {self.decoder_sparse_step}")
        if any(index < 0 for index in self.mlp_only_layers):
            raise ValueError(f"model config: mlp_only_layers must count layers from 0, found {list(self.mlp_only_layers)}")
        if self.use_sliding_window and (self.sliding_window or 0) < 1:
            raise ValueError(
                f"model config: use_sliding_window is true, but sliding_window is {self.sliding_window}; give a window of 1 or more tokens"
            )
        if self.use_sliding_window and self.extra.get("max_window_layers"):
            _logger.warning("max_window_layers has no effect: as in transformers, the sliding window of Qwen3-MoE is in every layer")
        super().__post_init__()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Qwen3MoeConfig:
        """From an HF config (a parsed config.json), with a user's changes on top; either may use old or new names.

        Raises:
            ValueError: a value of the wrong type or range, one that this code cannot honour, two names of one thing that
                disagree, another `model_type`, an unknown key among the changes, or one in `hf` that looks misspelt
                (other unknown keys of `hf` are kept).
        """
        fields, shared = read_config(hf, overrides, model_type=MODEL_TYPE, defaults=_DEFAULTS, rope_theta=_ROPE_THETA)
        return cls(
            **shared,
            attention_bias=fields.flag("attention_bias"),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            norm_topk_prob=fields.flag("norm_topk_prob"),
            decoder_sparse_step=fields.integer("decoder_sparse_step"),
            mlp_only_layers=fields.integers("mlp_only_layers"),
            use_sliding_window=fields.flag("use_sliding_window"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The HF config in the hub's spelling, unknown keys included; `from_hf` of it equals this config."""
        hf = written_config(self, _DEFAULTS, model_type=MODEL_TYPE, architecture="Qwen3MoeForCausalLM")
        return {**hf, "mlp_only_layers": list(self.mlp_only_layers)}

    @property
    def qk_norm(self) -> bool:
        return True

    def is_moe_layer(self, index: int) -> bool:
        return self.num_experts > 0 and index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

    def attention_window(self, index: int) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def moe(self, *, use_expert_bias: bool) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            norm_topk_prob=self.norm_topk_prob,
            use_expert_bias=use_expert_bias,
        )
