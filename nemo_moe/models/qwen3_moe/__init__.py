"""Qwen3-MoE (Qwen3-30B-A3B and its siblings)."""

from nemo_moe.models.qwen3_moe.config import Qwen3MoeConfig
from nemo_moe.models.qwen3_moe.model import Qwen3MoeForCausalLM, hf_layouts

__all__ = ["Qwen3MoeConfig", "Qwen3MoeForCausalLM", "hf_layouts"]
