"""Our Mixtral against transformers' with the same weights (logits, every gradient), and its config both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from nemo_moe.layers.rope import RopeConfig
from nemo_moe.models.mixtral import MixtralConfig, hf_layouts
from nemo_moe.testing.tolerances import assert_all_close_relative
from tiny_mixtral import SIZES, hf_model, ours_like
from tiny_qwen3_moe import gradients, ids

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "sliding window": {"sliding_window": 4},
    "tied": {"tie_word_embeddings": True},
    "head size of its own": {"head_dim": 12},
    "as many key heads as query heads": {"num_key_value_heads": 4},
    "three experts a token": {"num_experts_per_tok": 3},
    "all experts": {"num_experts_per_tok": 8},
    "other epsilon": {"rms_norm_eps": 0.1},
    "other theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
}
OLD = {  # as in the hub's files of 2024
    **SIZES,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.0,
    "output_router_logits": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEW = {  # as transformers 5 writes them
    **{key: value for key, value in OLD.items() if key not in ("torch_dtype", "rope_theta")},
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


@pytest.mark.parametrize("experts", ["loop", "grouped_mm"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_and_all_gradients_equal_transformers(changes: dict[str, Any], experts: str) -> None:
    theirs = hf_model(**changes)
    ours = ours_like(theirs, experts)
    tokens = ids()
    expected, output = theirs(tokens).logits, ours(tokens)
    assert (output.logits - expected).abs().max().item() < 1e-5
    assert_all_close_relative(gradients(ours, output.logits, tokens), gradients(theirs, expected, tokens), 1e-4)


def test_variants_differ_from_the_plain_model() -> None:
    """Otherwise the comparison above shows nothing about the key that a variant changes."""
    plain = ours_like(hf_model())(ids()).logits
    for name, changes in VARIANTS.items():
        difference = (ours_like(hf_model(**changes))(ids()).logits - plain).abs().max().item()
        assert (difference > 1e-3) == (name != "as it is"), (name, difference)


@pytest.mark.parametrize("hf", [OLD, NEW], ids=["old", "new"])
def test_old_and_new_spelling_are_one_config_and_come_back(hf: dict[str, Any]) -> None:
    config = MixtralConfig.from_hf(hf)
    assert config == MixtralConfig.from_hf(OLD)
    assert (config.num_experts, config.moe_intermediate_size, config.dtype, config.rope) == (8, 24, "bfloat16", RopeConfig(rope_theta=1e6))
    written = config.to_hf()
    assert MixtralConfig.from_hf(written) == config
    assert written["num_local_experts"] == 8 and "num_experts" not in written
    theirs, expected = transformers.MixtralConfig(**written).to_dict(), transformers.MixtralConfig(**hf, head_dim=8).to_dict()
    assert theirs == expected


def test_absent_keys_have_the_defaults_of_transformers_class() -> None:
    config, theirs = MixtralConfig.from_hf({}), transformers.MixtralConfig()
    same = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings"
    same += " initializer_range rms_norm_eps tie_word_embeddings attention_dropout sliding_window num_experts_per_tok router_aux_loss_coef"
    for key in same.split():
        assert getattr(config, key) == getattr(theirs, key), key
    assert (config.num_experts, config.head_dim) == (theirs.num_local_experts, 128)
    assert config.rope.rope_theta == theirs.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but no noise is put on the router's input here; set it to 0"),
        ({"sliding_window": 0}, "sliding_window must be 1 or more tokens, or null"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', but the family is 'mixtral'"),
        ({"hidden_act": "gelu"}, "hidden_act: unknown value 'gelu'"),
        ({"num_local_experts": 0}, "num_experts must be 1 or more, found 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok .9. is above num_experts .8."),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtralConfig.from_hf({**SIZES, **changes})


@pytest.mark.parametrize("key", ["norm_topk_prob", "moe_intermediate_size", "decoder_sparse_step"])
def test_keys_of_another_family_are_refused_where_a_user_writes_them(key: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'"):
        MixtralConfig.from_hf(SIZES, {key: 1})


def test_the_key_table_tiles_a_stacked_parameter_exactly_once() -> None:
    for name in ("gate_up_proj", "down_proj"):
        for layout in hf_layouts(f"model.layers.4.mlp.experts.{name}", (3, 8, 5)):
            count = torch.zeros(3, 8, 5)
            for piece in layout:
                sizes = (1,) * (3 - len(piece.shape)) + piece.shape
                count[tuple(slice(start, start + size) for start, size in zip(piece.offsets, sizes, strict=True))] += 1
            assert torch.equal(count, torch.ones(3, 8, 5))
    keys = [piece.key for piece in hf_layouts("model.layers.4.mlp.experts.gate_up_proj", (1, 8, 5))[0]]
    assert keys == [f"model.layers.4.block_sparse_moe.experts.0.{part}.weight" for part in ("w1", "w3")]
    assert hf_layouts("model.layers.4.mlp.gate.weight", (3, 5))[0][0].key == "model.layers.4.block_sparse_moe.gate.weight"
    assert hf_layouts("model.layers.4.mlp.gate.expert_bias", (3,)) == []
