"""The pairwise selection covers every pair, with few combinations, and only legal ones."""

from __future__ import annotations

import itertools

from nemo_moe.testing.pairwise import pairwise

FACTORS = [["a", "b", "c"], [1, 2], [True, False], ["x", "y", "z"]]


def _pairs(combinations: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    return {(i, c[i], j, c[j]) for c in combinations for i, j in itertools.combinations(range(len(c)), 2)}


def test_every_pair_of_values_meets_with_far_fewer_combinations_than_the_product() -> None:
    product = list(itertools.product(*FACTORS))
    chosen = pairwise(FACTORS)
    assert _pairs(chosen) == _pairs(product)
    assert len(chosen) <= len(product) / 3
    assert chosen == pairwise(FACTORS)


def test_illegal_combinations_are_left_out() -> None:
    def legal(combination: tuple[object, ...]) -> bool:
        return not (combination[0] == "a" and combination[2])

    chosen = pairwise(FACTORS, legal)
    assert all(legal(combination) for combination in chosen)
    assert _pairs(chosen) == _pairs([combination for combination in itertools.product(*FACTORS) if legal(combination)])
