"""HF configs in, old and new spelling, and out; what is refused and what is kept."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import transformers

from nemo_moe.layers.rope import RopeConfig
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig
from tiny_qwen3_moe import SIZES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLD = {  # as in the hub's files of 2025
    **SIZES,
    "max_position_embeddings": 128,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "router_aux_loss_coef": 0.01,
    "eos_token_id": 5,
    "use_cache": True,
    "max_window_layers": 48,
}
NEW = {  # as transformers 5 writes them
    **{key: value for key, value in OLD.items() if key not in ("num_experts", "torch_dtype", "rope_theta", "rope_scaling")},
    "num_local_experts": SIZES["num_experts"],
    "dtype": "bfloat16",
    "rope_parameters": {**YARN, "rope_theta": 1000000.0},
}


def test_old_and_new_spelling_are_the_same_config() -> None:
    old = Qwen3MoeConfig.from_hf(OLD)
    assert old == Qwen3MoeConfig.from_hf(NEW)
    assert old.rope == RopeConfig(rope_theta=1000000.0, **YARN)
    assert old.num_experts == 8
    assert old.dtype == "bfloat16"
    assert old.router_aux_loss_coef == 0.01


@pytest.mark.parametrize("hf", [OLD, NEW], ids=["old", "new"])
def test_to_hf_is_read_back_equal_by_us_and_by_transformers(hf: dict[str, Any]) -> None:
    config = Qwen3MoeConfig.from_hf(hf)
    assert Qwen3MoeConfig.from_hf(config.to_hf()) == config
    theirs, expected = transformers.Qwen3MoeConfig(**config.to_hf()), transformers.Qwen3MoeConfig(**hf)
    expected.rope_parameters.pop("type", None)  # the older spelling of rope_type, which it keeps beside it
    assert theirs.to_dict() == expected.to_dict()


def test_what_transformers_writes_is_read() -> None:
    hf = transformers.Qwen3MoeConfig(**SIZES, mlp_only_layers=[1], tie_word_embeddings=True, dtype="float32")
    config = Qwen3MoeConfig.from_hf(hf.to_dict())
    assert {key: getattr(config, key) for key in SIZES} == SIZES
    assert (config.mlp_only_layers, config.tie_word_embeddings, config.dtype) == ((1,), True, "float32")


def test_absent_keys_have_the_defaults_of_transformers_class() -> None:
    config, theirs = Qwen3MoeConfig.from_hf({}), transformers.Qwen3MoeConfig()
    same = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings"
    same += " initializer_range rms_norm_eps tie_word_embeddings attention_bias attention_dropout use_sliding_window decoder_sparse_step"
    same += " moe_intermediate_size num_experts num_experts_per_tok norm_topk_prob router_aux_loss_coef"
    for key in same.split():
        assert getattr(config, key) == getattr(theirs, key), key
    assert config.norm_topk_prob is False
    assert config.head_dim == 64
    assert config.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.attention_window(0) is None


def test_unknown_keys_are_kept_and_written_back() -> None:
    config = Qwen3MoeConfig.from_hf({**SIZES, "made_by": "us", "eos_token_id": [1, 2], "use_cache": False})
    assert {key: config.to_hf()[key] for key in ("made_by", "eos_token_id", "use_cache")} == {
        "made_by": "us",
        "eos_token_id": [1, 2],
        "use_cache": False,
    }


@pytest.mark.parametrize(
    ("key", "near"), [("num_hiden_layers", "num_hidden_layers"), ("norm_topk_probs", "norm_topk_prob"), ("rope_scalling", "rope_scaling")]
)
def test_misspelt_keys_are_refused_with_the_nearest_name(key: str, near: str) -> None:
    """case B65: also for a key laid over a folder's config."""
    with pytest.raises(ValueError, match=f"unknown key '{key}'; did you mean '{near}'"):
        Qwen3MoeConfig.from_hf({key: 1})
    with pytest.raises(ValueError, match=f"unknown key '{key}'; did you mean '{near}'"):
        Qwen3MoeConfig.from_hf(OLD, {key: 1})


@pytest.mark.parametrize("folder", [{}, OLD], ids=["no folder", "folder"])
def test_unknown_keys_of_a_user_are_refused_with_the_nearest_and_the_legal_ones(folder: dict[str, Any]) -> None:
    """case B65: these would have built the default 24 layers, each key ignored."""
    with pytest.raises(ValueError) as caught:
        Qwen3MoeConfig.from_hf(folder, {"num_layers": 2, "hidden": 64, "top_k": 4, "made_by": "us"})
    text, _, legal = str(caught.value).partition("(legal: ")
    for key, near in (("num_layers", "num_hidden_layers"), ("hidden", "hidden_size"), ("top_k", "num_experts_per_tok")):
        assert f"unknown key {key!r}; did you mean {near!r}?" in text
    assert "unknown key 'made_by'" in text
    assert {"hidden_size", "num_experts", "rope_scaling", "dtype", "use_cache"} <= set(re.findall(r"\w+", legal))


def test_every_key_of_hugging_face_is_legal_for_a_user_and_written_back() -> None:
    theirs = transformers.Qwen3MoeConfig(**SIZES, bos_token_id=1, eos_token_id=2, output_router_logits=True).to_dict()
    assert {"output_router_logits", "use_cache", "architectures", "model_type", "transformers_version"} <= theirs.keys()
    config = Qwen3MoeConfig.from_hf({}, theirs)
    assert config.to_hf()["eos_token_id"] == 2 and config.to_hf()["output_router_logits"] is True
    assert Qwen3MoeConfig.from_hf({}, config.to_hf()) == config


@pytest.mark.parametrize("folder", [OLD, NEW], ids=["old", "new"])
def test_changes_apply_in_either_spelling(folder: dict[str, Any]) -> None:
    """case B65"""
    assert Qwen3MoeConfig.from_hf(folder, {"num_hidden_layers": 2}).num_hidden_layers == 2
    assert Qwen3MoeConfig.from_hf(folder, {"num_experts": 4}).num_experts == 4
    assert Qwen3MoeConfig.from_hf(folder, {"num_local_experts": 4}).num_experts == 4
    assert Qwen3MoeConfig.from_hf(folder, {"torch_dtype": "float32"}).dtype == "float32"
    assert Qwen3MoeConfig.from_hf(folder, {"rope_theta": 500.0}).rope == RopeConfig(rope_theta=500.0, **YARN)
    assert Qwen3MoeConfig.from_hf(folder, {"rope_scaling": None}).rope == RopeConfig(rope_theta=1000000.0)
    assert Qwen3MoeConfig.from_hf(folder, {"rope_parameters": {"factor": 2.0}}).rope.factor == 2.0
    linear = Qwen3MoeConfig.from_hf(folder, {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    assert linear == RopeConfig(rope_theta=1000000.0, rope_type="linear", factor=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: unknown value 'gelu' .legal: silu"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral', but the family is 'qwen3_moe'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type: unknown value 'longrope' .legal: default, linear, dynamic, yarn, llama3"),
        ({"rope_scaling": "yarn"}, "must be a mapping, found 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"original_max_position_embeddings": 32}, "belongs inside rope_scaling"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ({"num_experts": 8, "num_local_experts": 4}, "num_local_experts is 4, but num_experts, another name for the same thing, is 8"),
        (
            {"rope_theta": 1.5, "rope_parameters": {"rope_theta": 2.5}},
            "rope_theta is given more than once, with different values: 1.5, 2.5",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling .* and rope_parameters .* disagree",
        ),
        ({"hidden_size": 32.5}, "hidden_size must be a whole number, found 32.5"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number, found 'big'"),
        ({"hidden_size": None}, "hidden_size must be a whole number, found None"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, found True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be 1 or more, found 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be 1 or more, found 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, found 1"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of whole numbers, found 1"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must count layers from 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be 1 or more, found 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads .4. must be a multiple of num_key_value_heads .3."),
        ({"head_dim": 13}, "head_dim must be even for rotary embeddings, found 13"),
        ({"head_dim": 0}, "head_dim must be 1 or more, found 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok .9. is above num_experts .8."),
        ({"use_sliding_window": True, "sliding_window": None}, "use_sliding_window is true, but sliding_window is None"),
        ({"attention_dropout": 1.0}, "attention_dropout must be in .0, 1., found 1.0"),
        ({"torch_dtype": "float99"}, "torch_dtype: unknown value 'float99'"),
        ({"torch_dtype": "int8"}, "torch_dtype: unknown value 'int8' .legal: float32, bfloat16, float16"),
        ({"torch_dtype": "float64"}, "torch_dtype: unknown value 'float64'"),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef must be 0 or more, found -1"),
        ({"router_aux_loss_coef": math.nan}, "router_aux_loss_coef must be a finite number, found nan"),
        ({"num_experts": -4}, "num_experts must be 0 or more, found -4"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be above 0, found -1"),
        ({"rms_norm_eps": "nan"}, "rms_norm_eps must be a finite number, found 'nan'"),
        ({"initializer_range": math.inf}, "initializer_range must be a finite number, found inf"),
        ({"initializer_range": -1}, "initializer_range must be 0 or more, found -1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": math.nan}, "rope_theta must be a number above 0, found nan"),
        ({"rope_theta": [1]}, "rope_theta must be a number above 0, found .1."),
        ({"rope_theta": {"a": 1}}, "rope_theta must be a number above 0, found ..a.: 1."),
        (
            {"rope_theta": "1e6", "rope_parameters": {"rope_theta": [1]}},
            "rope_theta is given more than once, with different values: 1e6, .1.",
        ),
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta must be a number above 0, found .1."),
        ({"rope_scaling": {"rope_type": [1]}}, "rope_type: unknown value .1."),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "dtype is 'bfloat16', but torch_dtype, another name for the same thing"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3MoeConfig.from_hf({**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": "abc"}, "eos_token_id must be a whole number or a list of them, or null; found 'abc'"),
        ({"eos_token_id": [1, None]}, "eos_token_id must be a whole number or a list of them"),
        ({"pad_token_id": [1]}, "pad_token_id must be a whole number, or null; found .1."),
        ({"architectures": 5}, "architectures must be a list of texts, or null; found 5"),
        ({"layer_types": ["a", "a", "a"]}, "layer_types must be a list of full_attention and sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, and num_hidden_layers is 3; give one for each layer, or set"),
        ({"use_cache": "x"}, "use_cache must be true or false"),
        ({"id2label": 3}, "id2label must be a mapping"),
    ],
)
def test_a_key_without_effect_here_must_be_what_transformers_reads(changes: dict[str, Any], message: str) -> None:
    """It is written into the saved model's config.json; both in a folder's file and as a user's change."""
    for arguments in (({**SIZES, **changes},), (SIZES, changes)):
        with pytest.raises(ValueError, match=message):
            Qwen3MoeConfig.from_hf(*arguments)
    fits = {"eos_token_id": [1, 2], "pad_token_id": 3, "architectures": None, "layer_types": ["full_attention"] * 3, "use_cache": False}
    transformers.Qwen3MoeConfig(**Qwen3MoeConfig.from_hf({**SIZES, **fits}).to_hf())


def test_quoted_numbers_and_flags_are_read() -> None:
    config = Qwen3MoeConfig.from_hf({**SIZES, "hidden_size": "64", "rms_norm_eps": "1e-5", "norm_topk_prob": "false", "rope_theta": "1e6"})
    assert (config.hidden_size, config.rms_norm_eps, config.norm_topk_prob, config.rope.rope_theta) == (64, 1e-5, False, 1e6)


def test_nulls_of_real_files_are_defaults() -> None:
    config = Qwen3MoeConfig.from_hf({**SIZES, "head_dim": None, "mlp_only_layers": None, "rope_scaling": None, "num_key_value_heads": None})
    assert (config.head_dim, config.mlp_only_layers, config.rope, config.num_key_value_heads) == (8, (), RopeConfig(), 4)


def test_max_window_layers_is_warned_about_where_it_would_matter(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Qwen3MoeConfig.from_hf({**SIZES, "max_window_layers": 2})
        assert not caplog.records
        Qwen3MoeConfig.from_hf({**SIZES, "max_window_layers": 2, "use_sliding_window": True})
    assert "max_window_layers has no effect" in caplog.text
