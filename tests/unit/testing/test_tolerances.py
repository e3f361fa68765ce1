"""Relative differences, and messages that say where tensors differ."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_moe.testing.tolerances import assert_all_close_relative, assert_close_relative, relative_difference


def test_the_difference_is_relative_to_the_largest_entry() -> None:
    assert relative_difference(torch.tensor([100.0, 0.5]), torch.tensor([100.0, 0.0])) == pytest.approx(0.005)
    assert relative_difference(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert relative_difference(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_never_close(value: float) -> None:
    assert relative_difference(torch.tensor([value, 1.0]), torch.tensor([1.0, 1.0])) == math.inf
    with pytest.raises(AssertionError, match=r"at \[0\]"):
        assert_close_relative(torch.tensor([value, 1.0]), torch.tensor([1.0, 1.0]), 1e9)


def test_a_failure_names_tensor_position_and_values() -> None:
    with pytest.raises(AssertionError, match=r"weight: relative difference 5.000e-01 .* at \[1, 0\] found 3, expected 2") as caught:
        assert_close_relative(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [2.0]]), 1e-3, "weight")
    assert "1.0e-03" in str(caught.value)
    with pytest.raises(AssertionError, match="shapes differ"):
        relative_difference(torch.zeros(2), torch.zeros(3))


def test_mappings_must_hold_the_same_names_and_all_differences_are_reported() -> None:
    ones = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    assert_all_close_relative(ones, ones, 0.0)
    with pytest.raises(AssertionError, match=r"missing \['c'\]"):
        assert_all_close_relative({"a": torch.ones(2), "b": torch.ones(2)}, ones, 1.0)
    with pytest.raises(AssertionError, match="2 of 3 tensors differ") as caught:
        assert_all_close_relative({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.zeros(2)}, ones, 1e-3)
    assert "a: relative" in str(caught.value) and "c: relative" in str(caught.value)
