"""Comparing tensors by their relative difference, with messages that say where they differ most.

The relative difference is max|a - b| / max|b|: one number a tensor, insensitive to entries near zero, which in sums of
many terms carry rounding of the large ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max|expected| in fp64; the absolute difference where expected is all zeros.

    0.0 for empty tensors; inf where one of them holds a NaN or an infinity that the other does not hold.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    left, right = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference = torch.where(left == right, torch.zeros_like(left), (left - right).abs()).max().item()
    scale = right.abs().max().item()
    result = difference / scale if scale > 0 else difference
    return float("inf") if math.isnan(result) else result


def assert_close_relative(actual: Tensor, expected: Tensor, tolerance: float, name: str = "tensor") -> None:
    """Raise AssertionError with the difference and the worst position unless relative_difference <= tolerance."""
    difference = relative_difference(actual, expected)
    if difference <= tolerance:
        return
    left, right = actual.detach().double().cpu(), expected.detach().double().cpu()
    worst = (left - right).abs().nan_to_num(float("inf")).argmax()
    position = tuple(int(i) for i in torch.unravel_index(worst, left.shape))
    raise AssertionError(
        f"{name}: relative difference {difference:.3e} is above {tolerance:.1e};"
        f" at {list(position)} found {left[position].item():.8g}, expected {right[position].item():.8g}"
    )


def assert_all_close_relative(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """assert_close_relative for each name; both sides must hold the same names. Reports every tensor that differs."""
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or extra:
        raise AssertionError(f"names differ: missing {missing}, not expected {extra}")
    problems = []
    for name in expected:
        try:
            assert_close_relative(actual[name], expected[name], tolerance, name)
        except AssertionError as error:
            problems.append(str(error))
    if problems:
        raise AssertionError(f"{len(problems)} of {len(expected)} tensors differ:\n" + "\n".join(problems))
