"""Mixtral: the shared decoder, and how its parameters are spelt in checkpoints.

In memory every parameter has transformers 5's name. Files have the older ones, which are what is written:

    block_sparse_moe.gate.weight                       mlp.gate.weight
    block_sparse_moe.experts.J.w1.weight, w3           mlp.experts.gate_up_proj[J], gate rows (w1) first, then up (w3)
    block_sparse_moe.experts.J.w2.weight               mlp.experts.down_proj[J]

Read are also the in-memory names, stacked or one by one, under either of the two prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_moe.config import BackendConfig, RouterConfig
from nemo_moe.models.decoder import DecoderForCausalLM, HFTensor
from nemo_moe.models.hf_layouts import ExpertNames, one_by_one, whole
from nemo_moe.models.mixtral.config import MixtralConfig

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def hf_layouts(name: str, shape: Sequence[int]) -> list[list[HFTensor]]:
    """The checkpoint tensors that make up parameter `name` of global `shape`: the layout to write first, then others.

    Pure; both directions of the key table follow from it. The gate's `expert_bias` has no place in the format: empty.
    """
    if name.endswith(".mlp.gate.expert_bias"):
        return []
    layer, mlp, rest = name.partition(".mlp.")
    if not mlp:
        return [whole(name, shape)]
    prefixes = (f"{layer}.block_sparse_moe.", f"{layer}.mlp.")
    stacked = [whole(prefix + rest, shape) for prefix in prefixes]
    experts, _, projection = rest.rpartition(".")
    if experts != "experts":
        return stacked
    return [one_by_one(prefix + experts, projection, shape, _NAMES) for prefix in prefixes] + stacked


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral with a language-model head.

    Args:
        config: `MixtralConfig.from_hf(...)`.
        backend: dispatcher and experts by name.
        router: how routing is trained; decides whether there is an expert bias, and whether routing is real.
    """

    config: MixtralConfig

    def __init__(self, config: MixtralConfig, backend: BackendConfig, router: RouterConfig | None = None) -> None:
        super().__init__(config, backend, router)

    def hf_layouts(self, name: str, shape: Sequence[int]) -> list[list[HFTensor]]:
        """See `nemo_moe.models.mixtral.hf_layouts`."""
        return hf_layouts(name, shape)
