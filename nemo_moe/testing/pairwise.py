"""A few combinations of settings in which every pair of values meets at least once.

Most faults that a product of settings finds show for some pair of values already. So the default test run takes the
pairs, and the whole product runs where time allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

_Pair = tuple[int, Any, int, Any]


def pairwise(factors: Sequence[Sequence[Any]], legal: Callable[[tuple[Any, ...]], bool] = lambda _: True) -> list[tuple[Any, ...]]:
    """Combinations, one value of each factor, that cover every pair of values of two factors; greedy, deterministic.

    Args:
        factors: the (hashable) values of each factor.
        legal: tells combinations that make no sense; a pair that no legal combination holds is left out.

    Cost: goes through the whole product for every combination it returns, so keep the product in the thousands.
    """
    product = [combination for combination in itertools.product(*factors) if legal(combination)]
    open_pairs = {pair for combination in product for pair in _pairs(combination)}
    chosen = []
    while open_pairs:
        best = max(product, key=lambda combination: len(open_pairs.intersection(_pairs(combination))))
        open_pairs.difference_update(_pairs(best))
        chosen.append(best)
    return chosen


def _pairs(combination: tuple[Any, ...]) -> list[_Pair]:
    return [(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(combination), 2)]
