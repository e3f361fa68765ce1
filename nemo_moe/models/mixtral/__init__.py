"""Mixtral (Mixtral-8x7B, 8x22B and their siblings)."""

from nemo_moe.models.mixtral.config import MixtralConfig
from nemo_moe.models.mixtral.model import MixtralForCausalLM, hf_layouts

__all__ = ["MixtralConfig", "MixtralForCausalLM", "hf_layouts"]
