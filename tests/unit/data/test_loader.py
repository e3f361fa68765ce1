"""The loader: what a step holds does not depend on the ranks, nothing is lost or repeated, positions are exact."""

from __future__ import annotations

import math
import random
from itertools import chain

import pytest
import torch

from nemo_moe.data.chat import Sample
from nemo_moe.data.loader import MicroBatch, StepLoader


def samples(count: int, seed: int = 0) -> list[Sample]:
    """Sample i begins with its own number, so that it can be told in a batch."""
    lengths = random.Random(seed).choices(range(3, 20), k=count)
    return [Sample([index + 1, *[7] * (length - 1)], [-100, *[7] * (length - 1)]) for index, length in enumerate(lengths)]


def loader(count: int = 103, **changes: object) -> StepLoader:
    settings: dict[str, object] = {"global_batch_size": 8, "micro_batch_size": 3, "seed": 5, "length_group_batches": 4, "pad_id": 0}
    return StepLoader(samples(count), **{**settings, **changes})  # type: ignore[arg-type]


def held(micro_batches: list[MicroBatch]) -> list[int]:
    """Which samples the micro-batches hold."""
    return [int(row[0]) - 1 for batch in micro_batches for row, mask in zip(batch.input_ids, batch.token_mask, strict=True) if mask.any()]


def test_an_epoch_holds_each_sample_once_and_the_partial_step_comes_last() -> None:
    steps = [held(step) for step in loader()]
    assert [len(step) for step in steps] == [8] * 12 + [7]
    assert sorted(chain(*steps)) == list(range(103))


def test_ten_micro_batches_accumulated_by_four_are_three_steps() -> None:
    """case B52: the remainder is a step of its own and counted."""
    data = loader(10, global_batch_size=4, micro_batch_size=1)
    assert len(data) == 3
    assert [len(step) for step in data] == [4, 4, 2]


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_a_step_holds_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    alone = loader()
    together = [loader(dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
    for _ in range(2):  # epochs
        iterators = [iter(one) for one in together]
        for step in alone:
            parts = [next(iterator) for iterator in iterators]
            assert sorted(held(step)) == sorted(chain(*map(held, parts)))
            assert len({len(part) for part in parts}) == 1, "as many forwards on every rank"
        assert all(next(iterator, None) is None for iterator in iterators)


def test_a_rank_without_samples_gets_a_row_of_padding() -> None:
    [step] = list(loader(1, dp_rank=1, dp_size=2))
    [batch] = step
    assert batch.input_ids.shape == batch.labels.shape == batch.token_mask.shape == (1, 1)
    assert not batch.token_mask.any()
    assert (batch.labels == -100).all()


def test_a_micro_batch_is_padded_on_the_right_with_its_own_mask() -> None:
    data = loader(20, pad_id=9)
    for step in data:
        for batch in step:
            assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
            assert batch.token_mask.dtype == torch.bool
            for row in range(len(batch.input_ids)):
                length = int(batch.token_mask[row].sum())
                sample = data.samples[int(batch.input_ids[row, 0]) - 1]
                assert batch.input_ids[row, :length].tolist() == sample.input_ids
                assert batch.labels[row, :length].tolist() == sample.labels
                assert batch.token_mask[row, :length].all()
                assert (batch.input_ids[row, length:] == 9).all()
                assert (batch.labels[row, length:] == -100).all()
            assert batch.token_mask.any(dim=0).all(), "no column of padding alone"


def test_grouping_by_length_saves_padding_and_1_keeps_the_shuffled_order() -> None:
    def padding(length_group_batches: int) -> int:
        data = loader(512, length_group_batches=length_group_batches, micro_batch_size=8)
        return sum(int((~batch.token_mask).sum()) for step in data for batch in step)

    assert padding(16) < 0.25 * padding(1)
    order = [data_index for step in range(13) for data_index in loader(length_group_batches=1).step_samples(0, step)]
    lengths = [len(sample.input_ids) for sample in samples(103)]
    assert [lengths[index] for index in order] != sorted(lengths[index] for index in order)
    assert order != list(range(103))


def test_order_changes_with_the_epoch_and_the_seed_and_with_nothing_else() -> None:
    def order(epoch: int, **changes: object) -> list[list[int]]:
        data = loader(**changes)
        return [data.step_samples(epoch, step) for step in range(len(data))]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=6)
    assert order(1) == order(1, micro_batch_size=1, dp_size=4, dp_rank=2, pad_id=3)


def test_saved_in_the_middle_of_the_second_epoch_it_continues_exactly() -> None:
    """case B47: same ids as the uninterrupted run, each sample once an epoch."""
    whole = loader()
    uninterrupted = [held(step) for _ in range(3) for step in whole]

    first = loader()
    before, state = [], {}
    for step in [*first]:
        before.append(held(step))
    for step in first:
        before.append(held(step))
        if len(before) == 18:
            state = first.state_dict()
            break
    resumed = loader()
    resumed.load_state_dict(state)
    after = [held(step) for step in resumed] + [held(step) for step in resumed]
    assert before + after == uninterrupted
    assert sorted(chain(*(before + after)[13:26])) == list(range(103))


def test_a_position_moves_to_another_number_of_ranks() -> None:
    first = loader(dp_rank=0, dp_size=4)
    steps = iter(first)
    for _ in range(5):
        next(steps)
    resumed = [loader(dp_rank=rank, dp_size=2) for rank in range(2)]
    for one in resumed:
        one.load_state_dict(first.state_dict())
    assert sorted(chain(*(held(next(iter(one))) for one in resumed))) == sorted(first.step_samples(0, 5))


def test_at_the_end_of_an_epoch_the_position_is_the_beginning_of_the_next() -> None:
    data = loader()
    for _ in data:
        pass
    state = data.state_dict()
    assert (state["epoch"], state["step"]) == (1, 0)
    # saved after the last step but before the iterator noticed that it was the last
    nearly = loader()
    iterator = iter(nearly)
    for _ in range(len(nearly)):
        next(iterator)
    resumed = loader()
    resumed.load_state_dict(nearly.state_dict())
    assert [held(step) for step in resumed] == []
    assert held(next(iter(resumed))) == held(next(iter(data)))


@pytest.mark.parametrize("change", [{"seed": 6}, {"global_batch_size": 4}, {"length_group_batches": 1}, {"count": 50}])
def test_a_position_of_another_order_is_refused(change: dict[str, int]) -> None:
    state = loader().state_dict()
    with pytest.raises(ValueError) as error:
        loader(**change).load_state_dict(state)  # type: ignore[arg-type]
    name = "num_samples" if "count" in change else next(iter(change))
    assert name in str(error.value)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        loader(0)
    with pytest.raises(ValueError, match="micro_batch_size must be 1 or more, found 0"):
        loader(micro_batch_size=0)
    with pytest.raises(ValueError, match="dp_rank 2 with dp_size 2"):
        loader(dp_rank=2, dp_size=2)


def test_micro_batches_cover_a_rank_share_evenly() -> None:
    for ranks in (1, 2, 4):
        data = loader(global_batch_size=30, micro_batch_size=4, dp_rank=ranks - 1, dp_size=ranks)
        assert {len(step) for step in list(data)[:-1]} == {math.ceil(math.ceil(30 / ranks) / 4)}
