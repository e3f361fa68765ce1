"""Grouping by expert and adding back, against plain loops."""

from __future__ import annotations

import pytest
import torch

from nemo_moe.moe import permute
from nemo_moe.testing.tolerances import assert_close_relative


def draw(rows: int, slots: int, experts: int, *, dropped: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + slots)
    ids = torch.randint(0, experts, (rows, slots))
    ids[torch.rand(rows, slots) < dropped] = -1
    return torch.randn(rows, 12), ids


@pytest.mark.parametrize(("rows", "slots"), [(0, 2), (1, 1), (7, 3), (40, 8)])
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
def test_rows_are_grouped_like_the_reference(rows: int, slots: int, dropped: float) -> None:
    hidden_states, ids = draw(rows, slots, 5, dropped=dropped)
    counts = permute.count_per_expert(ids, 5)
    order = permute.slots_by_expert(ids, 5)[: counts.sum()]
    expected_rows, expected_counts = permute.reference_group_rows(hidden_states, ids, 5)
    assert counts.tolist() == expected_counts
    assert torch.equal(hidden_states[order // slots], expected_rows)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_summing_slots_equals_the_reference_and_ignores_dropped_rows(cut: bool, dtype: torch.dtype) -> None:
    _, ids = draw(30, 4, 6)
    real = int(permute.count_per_expert(ids, 6).sum())
    order = permute.slots_by_expert(ids, 6)
    if cut:
        order = order[:real]
    rows = torch.randn(order.numel(), 12).to(dtype)
    rows[real:] = float("nan")  # nobody may read them
    slot_rows = permute.rows_of_slots(order, ids)
    assert torch.equal(slot_rows < 0, ids < 0)
    total = permute.sum_slots(rows, slot_rows)
    assert_close_relative(total, permute.reference_sum_slots(rows, slot_rows), 1e-6 if dtype is torch.float32 else 0.0)
    by_hand = torch.zeros(30, 12)
    for position, slot in enumerate(order[:real].tolist()):
        by_hand[slot // 4] += rows[position].float()
    assert_close_relative(total.float(), by_hand, {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype])
    assert not total[(ids < 0).all(dim=1)].any()


def test_summing_accumulates_in_fp32() -> None:
    rows = torch.cat([torch.full((1, 4), 256.0), torch.full((16, 4), 0.5)]).bfloat16()
    assert permute.sum_slots(rows, torch.arange(17)[None])[0, 0].item() == 264.0  # 256 + 0.5 is 256 again where sums are kept in bf16


def test_no_rows_and_no_slots() -> None:
    assert permute.sum_slots(torch.zeros(0, 3), torch.full((2, 4), -1)).tolist() == [[0.0] * 3] * 2
    assert permute.sum_slots(torch.ones(5, 3), torch.full((2, 4), -1)).tolist() == [[0.0] * 3] * 2
    assert permute.sum_slots(torch.zeros(0, 3), torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 3)
