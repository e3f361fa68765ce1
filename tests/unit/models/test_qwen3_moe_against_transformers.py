"""Our Qwen3-MoE against transformers' with the same weights: logits and every parameter's gradient, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_moe.testing.tolerances import assert_all_close_relative
from tiny_qwen3_moe import SIZES, gradients, hf_model, ids, ours_like

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "normalised weights (case B22)": {"norm_topk_prob": True},
    "weights as they are (case B22)": {"norm_topk_prob": False},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "as many key heads as query heads": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "dense layer in between": {"mlp_only_layers": [1]},
    "every second layer sparse": {"decoder_sparse_step": 2},
    "all layers dense": {"mlp_only_layers": [0, 1, 2]},
    "no experts at all": {"num_experts": 0},
    "top-1": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all experts": {"num_experts_per_tok": 8},
    "sliding window": {"use_sliding_window": True, "sliding_window": 4},
    "sliding window longer than the text": {"use_sliding_window": True, "sliding_window": 64},
    "sliding window switched off": {"use_sliding_window": False, "sliding_window": 4},
    "sliding window with max_window_layers": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "other epsilon": {"rms_norm_eps": 0.1},
    "other theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "rope dynamic, longer than trained for": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "max_position_embeddings": 10,
    },
    "rope yarn": {"rope_parameters": YARN},
    "rope llama3": {"rope_parameters": LLAMA3},
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
    tokens = ids()
    plain = ours_like(hf_model())(tokens).logits
    same = {"normalised weights (case B22)", "sliding window longer than the text", "sliding window switched off"}
    for name, changes in VARIANTS.items():
        difference = (ours_like(hf_model(**changes))(tokens).logits - plain).abs().max().item()
        assert (difference > 1e-3) == (name not in same), (name, difference)


def test_right_padding_changes_nothing_for_real_tokens() -> None:
    theirs = hf_model()
    ours = ours_like(theirs)
    tokens, mask = ids(), torch.ones(3, 17, dtype=torch.bool)
    mask[1, 9:] = False
    mask[2, 1:] = False
    labels = tokens.masked_fill(~mask, -100)
    expected, output = theirs(tokens, attention_mask=mask.long()).logits, ours(tokens, token_mask=mask)
    assert (output.logits - expected)[mask].abs().max().item() < 1e-5
    assert_all_close_relative(gradients(ours, output.logits, labels), gradients(theirs, expected, labels), 1e-4)
    other = tokens.masked_fill(~mask, 5)
    torch.testing.assert_close(ours(other, token_mask=mask).logits[mask], output.logits[mask])


def test_a_row_of_padding_gives_finite_logits_and_counts_nowhere() -> None:
    ours = ours_like(hf_model())
    mask = torch.ones(3, 17, dtype=torch.bool)
    mask[0] = False
    output = ours(ids(), token_mask=mask)
    assert output.logits.isfinite().all()
    assert output.router_stats is not None
    assert output.router_stats.num_tokens.tolist() == [34.0] * 3
    torch.testing.assert_close(output.logits[1:], ours(ids()[1:]).logits)


def test_padding_left_of_a_token_is_refused() -> None:
    ours = ours_like(hf_model())
    mask = torch.ones(3, 17, dtype=torch.bool)
    mask[0, 0] = False
    with pytest.raises(ValueError, match="pad on the right"):
        ours(ids(), token_mask=mask)


def test_position_ids_move_the_angles_as_in_transformers() -> None:
    theirs = hf_model()
    tokens = ids()
    positions = torch.arange(17)[None] * 2 + torch.tensor([[0], [3], [7]])
    expected = theirs(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens)).logits
    assert (ours_like(theirs)(tokens, position_ids=positions).logits - expected).abs().max().item() < 1e-5


def test_router_statistics_are_those_of_transformers_router_logits() -> None:
    theirs = hf_model(mlp_only_layers=[1], output_router_logits=True)
    tokens = ids()
    router_logits = theirs(tokens).router_logits
    stats = ours_like(theirs)(tokens).router_stats
    assert stats is not None
    assert len(router_logits) == 2
    for layer, logits in enumerate(router_logits):
        probs = logits.float().softmax(-1)
        counts = torch.nn.functional.one_hot(probs.topk(SIZES["num_experts_per_tok"]).indices, SIZES["num_experts"]).sum((0, 1))
        torch.testing.assert_close(stats.probs_sum[layer], probs.sum(0))
        torch.testing.assert_close(stats.tokens_per_expert[layer], counts.float())
        torch.testing.assert_close(stats.z_sum[layer], logits.logsumexp(-1).square().sum())
    assert stats.num_tokens.tolist() == [51.0, 51.0]


def test_attention_dropout_acts_in_training_only() -> None:
    ours = ours_like(hf_model(attention_dropout=0.5))
    tokens = ids()
    torch.testing.assert_close(ours(tokens).logits, ours_like(hf_model())(tokens).logits)
    ours.train()
    assert (ours(tokens).logits - ours(tokens).logits).abs().max().item() > 1e-3


def test_bf16_is_as_near_to_fp32_as_transformers_bf16() -> None:
    theirs = hf_model()
    tokens = ids()
    truth = theirs(tokens).logits
    ours = ours_like(theirs).bfloat16()
    error = (ours(tokens).logits.float() - truth).abs().mean().item()
    assert ours.model.rotary_emb.inv_freq.dtype is torch.float32
    assert error < 1.5 * (theirs.bfloat16()(tokens).logits.float() - truth).abs().mean().item()
