"""Tiny Mixtral models of transformers' own making, and ours with the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nemo_moe.config import BackendConfig
from nemo_moe.models.mixtral import MixtralConfig, MixtralForCausalLM
from tiny_qwen3_moe import strong, with_weights_of

if TYPE_CHECKING:
    import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def hf_model(**changes: Any) -> transformers.MixtralForCausalLM:
    """See `tiny_qwen3_moe.hf_model`."""
    import transformers

    torch.manual_seed(11)
    return strong(transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **changes})))


def ours_like(theirs: nn.Module, experts: str = "loop") -> MixtralForCausalLM:
    """See `tiny_qwen3_moe.ours_like`."""
    return with_weights_of(theirs, MixtralForCausalLM(MixtralConfig.from_hf(theirs.config.to_dict()), BackendConfig(experts=experts)))
