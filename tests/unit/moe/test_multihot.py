"""Top-k ids as the libraries want them: a map of tokens x experts, or each expert once a token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nemo_moe.moe.dispatch.hybridep import _HybridEPManager
from nemo_moe.moe.permute import merge_duplicates

IDS = {
    "plain": [[0, 2], [3, 1]],
    "dropped": [[0, -1], [-1, -1], [3, 1]],
    "duplicates": [[2, 2], [0, 3], [1, 1]],
    "duplicate dropped": [[-1, -1], [3, -1]],
    "top 1": [[1], [0], [3]],
    "all dropped": [[-1, -1], [-1, -1]],
    "one token": [[2, 0]],
}


def multihot(topk_idx: Tensor, topk_weights: Tensor, num_experts: int = 4) -> tuple[Tensor, Tensor]:
    return _HybridEPManager._indices_to_multihot(SimpleNamespace(num_experts=num_experts), topk_idx, topk_weights)  # type: ignore[arg-type]


def expected(topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    routing_map, probs = torch.zeros(topk_idx.shape[0], 4, dtype=torch.bool), torch.zeros(topk_idx.shape[0], 4)
    for token, ids in enumerate(topk_idx.tolist()):
        for slot, expert in enumerate(ids):
            if expert >= 0:
                routing_map[token, expert] = True
                probs[token, expert] += topk_weights[token, slot]
    return routing_map, probs


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_ids_become_a_map_and_probabilities_b06_b07(ids: list[list[int]]) -> None:
    """cases B06 and B07."""
    topk_idx = torch.tensor(ids)
    topk_weights = torch.rand(topk_idx.shape, generator=torch.Generator().manual_seed(0)) + 0.1
    routing_map, probs = multihot(topk_idx, topk_weights)
    wanted_map, wanted_probs = expected(topk_idx, topk_weights)
    assert torch.equal(routing_map, wanted_map) and torch.equal(probs, wanted_probs)
    assert routing_map.dtype is torch.bool and probs.dtype is torch.float32 and routing_map.is_contiguous() and probs.is_contiguous()


def test_no_tokens_become_an_empty_map() -> None:
    routing_map, probs = multihot(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert routing_map.shape == probs.shape == (0, 4)


def test_a_slot_with_weight_zero_still_goes() -> None:
    assert multihot(torch.tensor([[1]]), torch.zeros(1, 1))[0].tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_merging_gives_each_expert_once_with_the_sum_and_tells_where_slots_went(ids: list[list[int]]) -> None:
    topk_idx = torch.tensor(ids)
    topk_weights = torch.rand(topk_idx.shape, generator=torch.Generator().manual_seed(0)) + 0.1
    merged, weights, first_slot = merge_duplicates(topk_idx, topk_weights)
    for row in merged.tolist():
        real = [expert for expert in row if expert >= 0]
        assert len(set(real)) == len(real)
    wanted_map, wanted_probs = expected(topk_idx, topk_weights)
    merged_map, merged_probs = expected(merged, weights)
    assert torch.equal(merged_map, wanted_map) and torch.equal(merged_probs, wanted_probs)
    assert torch.equal(weights == 0, merged < 0)
    assert torch.equal(topk_idx.gather(1, first_slot), topk_idx), "a slot's first slot names the same expert"


def test_ids_without_duplicates_stay_where_they_are() -> None:
    topk_idx = torch.rand(50, 16).topk(8, dim=1).indices
    topk_weights = torch.rand(50, 8)
    merged, weights, first_slot = merge_duplicates(topk_idx, topk_weights)
    assert torch.equal(merged, topk_idx) and torch.equal(weights, topk_weights)
    assert torch.equal(first_slot, torch.arange(8).expand(50, 8))
