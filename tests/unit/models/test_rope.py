"""Frequencies against transformers' own rope functions, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_moe.layers.rope import RopeConfig, RotaryEmbedding, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {**LLAMA3, "original_max_position_embeddings": 8192},
    {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 1024},
]


@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_frequencies_equal_transformers(settings: dict[str, Any], theta: float) -> None:
    settings = {**settings, "rope_theta": theta}
    hf = transformers.Qwen3MoeConfig(head_dim=128, max_position_embeddings=32768, rope_parameters=dict(settings))
    expected, length = ROPE_INIT_FUNCTIONS[settings["rope_type"]](hf, torch.device("cpu"))
    actual, our_length = inverse_frequencies(RopeConfig.from_settings(settings), 128, 32768)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert our_length == pytest.approx(length, rel=1e-12)


@pytest.mark.parametrize("length", [5, 32, 33, 100])
def test_dynamic_theta_follows_the_longest_position(length: int) -> None:
    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    hf = transformers.Qwen3MoeConfig(head_dim=16, max_position_embeddings=32, rope_parameters=dict(settings))
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf, torch.device("cpu"), seq_len=length)
    rotary = RotaryEmbedding(RopeConfig.from_settings(settings), 16, 32)
    rotary(torch.arange(500)[None], torch.float32)  # an earlier, longer batch leaves nothing behind
    cos, sin = rotary(torch.arange(length)[None], torch.float32)
    angles = torch.arange(length)[:, None] * torch.cat((frequencies, frequencies))
    torch.testing.assert_close(cos[0], angles.cos(), rtol=0, atol=2e-5)
    torch.testing.assert_close(sin[0], angles.sin(), rtol=0, atol=2e-5)


def test_frequencies_survive_meta_to_empty_and_half_precision() -> None:
    config = RopeConfig(rope_type="linear", factor=2.0)
    expected = RotaryEmbedding(config, 16, 32).inv_freq
    with torch.device("meta"):
        rotary = RotaryEmbedding(config, 16, 32)
    assert rotary.inv_freq.is_meta
    rotary.to_empty(device="cpu")
    assert torch.equal(rotary.inv_freq, expected)
    rotary.bfloat16()
    assert torch.equal(rotary.inv_freq, expected)
    assert rotary.state_dict() == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "longrope"}, "unknown value 'longrope' .legal: default, linear, dynamic, yarn, llama3"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be 1 or more, found 0.5"),
        ({"rope_type": "linear", "factor": "two"}, "factor must be a number, found 'two'"),
        ({"rope_type": "linear", "factor": True}, "factor must be a number above 0, found True"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast is 3.0, but rope_type 'linear' takes rope_theta, factor"),
        ({"rope_type": "default", "factor": 2.0}, "factor is 2.0, but rope_type 'default' takes rope_theta"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "unknown key 'mrope_section'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "unknown key 'partial_rotary_factor'"),
        ({"rope_type": "yarn"}, "needs factor, or original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate must be true or false, found 1"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor is missing"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor .1.0. must be above low_freq_factor .1.0."),
        ({"rope_type": [1]}, "rope_type: unknown value .1."),
        ({"rope_type": "linear", "factor": 10**400}, "factor must be a number above 0"),
        ({"rope_theta": {"a": 1}}, "rope_theta must be a number above 0, found ..a.: 1."),
        ({"rope_theta": 0.5}, "rope_theta must be above 1, found 0.5"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
def test_settings_that_would_be_ignored_or_are_wrong_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_settings(settings)


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim must be even"):
        RotaryEmbedding(RopeConfig(), 15, 32)
