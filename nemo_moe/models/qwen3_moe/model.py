"""Qwen3-MoE: the shared decoder, and how its parameters are spelt in checkpoints.

Every parameter has transformers' in-memory name. Files of the hub hold the experts one by one, as
`mlp.experts.J.{gate,up,down}_proj.weight`. That is what is written; files that hold the stacked parameters under their
own names are read too.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_moe.config import BackendConfig, RouterConfig
from nemo_moe.models.decoder import DecoderForCausalLM, HFTensor
from nemo_moe.models.hf_layouts import ExpertNames, one_by_one, whole
from nemo_moe.models.qwen3_moe.config import Qwen3MoeConfig

_NAMES = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")


def hf_layouts(name: str, shape: Sequence[int]) -> list[list[HFTensor]]:
    """The checkpoint tensors that make up parameter `name` of global `shape`: the layout to write first, then others.

    Pure; both directions of the key table follow from it. The gate's `expert_bias` has no place in the format: empty.
    """
    if name.endswith(".mlp.gate.expert_bias"):
        return []
    experts, _, projection = name.rpartition(".")
    if not experts.endswith(".mlp.experts"):
        return [whole(name, shape)]
    return [one_by_one(experts, projection, shape, _NAMES), whole(name, shape)]


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3-MoE with a language-model head.

    Args:
        config: `Qwen3MoeConfig.from_hf(...)`.
        backend: dispatcher and experts by name.
        router: how routing is trained; decides whether there is an expert bias, and whether routing is real.
    """

    config: Qwen3MoeConfig

    def __init__(self, config: Qwen3MoeConfig, backend: BackendConfig, router: RouterConfig | None = None) -> None:
        super().__init__(config, backend, router)

    def hf_layouts(self, name: str, shape: Sequence[int]) -> list[list[HFTensor]]:
        """See `nemo_moe.models.qwen3_moe.hf_layouts`."""
        return hf_layouts(name, shape)
