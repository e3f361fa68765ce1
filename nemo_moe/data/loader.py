"""Batches of an optimizer step, the same for any number of ranks, and a position that can be saved and restored.

The samples of a step are a pure function of (seed, epoch, step): `StepLoader.step_samples`. Ranks take interleaved
slices of them and cut their slice into micro-batches, so that the number of ranks and the micro-batch size decide who
computes what and never what is computed. Every rank gets the same number of micro-batches in a step, because a forward
is a collective under expert parallelism; a rank that has run out of samples gets a row of padding without labels.

Samples of similar length travel together: an epoch's shuffled samples are cut into chunks of `length_group_batches`
batches, each sorted by length and cut into batches, whose order is shuffled again. That saves padding, at a price: where
length goes with the task or the answer, batches are no longer drawn from all of them alike and gradients are noisier (the
demo needs twice the steps).

Left out on purpose: worker processes (samples are lists of ids in memory) and packing of several samples in a row.

B rows of a micro-batch, S their longest sequence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_moe.data import IGNORE_INDEX
from nemo_moe.data.chat import Sample


class MicroBatch(NamedTuple):
    """What one rank puts through the model at once, padded on the right.

    Attributes:
        input_ids: [B, S] int64.
        labels: [B, S] int64, at the positions of their tokens (the loss shifts them); -100 where there is no loss.
        token_mask: [B, S] bool, False for padding.
    """

    input_ids: Tensor
    labels: Tensor
    token_mask: Tensor


class StepLoader:
    """Iterates the optimizer steps that are left of the current epoch; each is this rank's list of micro-batches.

    A step counts as taken when it is handed out: `state_dict` inside the loop body points at the next one. When the
    iterator is exhausted, the loader stands at the beginning of the next epoch, so iterating again continues.

    Args:
        samples: the data set, the same on all ranks.
        global_batch_size: samples of one optimizer step over all ranks; the last step of an epoch has what is left.
        micro_batch_size: rows a rank puts through the model at once.
        dp_rank, dp_size: this rank among the ranks with batches of their own.
        seed: of the order.
        length_group_batches: batches whose samples are sorted by length together; 1 does not sort.
        pad_id: fills up rows; the mask and the labels, not its value, tell padding from tokens.

    Raises:
        ValueError: no samples, a size below 1 or a rank outside [0, dp_size).
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        length_group_batches: int = 1,
        pad_id: int = 0,
    ) -> None:
        if not samples:
            raise ValueError("the data set is empty: there is nothing to train on")
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size, "length_group_batches": length_group_batches}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, found {value}")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank must be in [0, dp_size), found dp_rank {dp_rank} with dp_size {dp_size}")
        self.samples = samples
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.length_group_batches, self.pad_id = seed, length_group_batches, pad_id
        self.epoch = 0
        self.step = 0  # steps taken in this epoch
        self._order: tuple[int, list[list[int]]] | None = None  # (epoch, its steps): made once an epoch

    def __len__(self) -> int:
        """Optimizer steps of an epoch, the partial last one included."""
        return math.ceil(len(self.samples) / self.global_batch_size)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        while self.step < len(self):
            micro_batches = self.micro_batches(self.epoch, self.step)
            self.step += 1
            yield micro_batches
        self.epoch, self.step = self.epoch + 1, 0

    def step_samples(self, epoch: int, step: int) -> list[int]:
        """Indices into `samples` of one optimizer step, over all ranks; does not move the position."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._epoch_steps(epoch))
        return self._order[1][step]

    def micro_batches(self, epoch: int, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of one optimizer step; as many as every other rank's."""
        everyone = self.step_samples(epoch, step)
        mine = everyone[self.dp_rank :: self.dp_size]
        count = math.ceil(math.ceil(len(everyone) / self.dp_size) / self.micro_batch_size)
        rows = [mine[index * self.micro_batch_size : (index + 1) * self.micro_batch_size] for index in range(count)]
        return [collate([self.samples[index] for index in row], self.pad_id) for row in rows]

    def state_dict(self) -> dict[str, int]:
        """The position, and what the order depends on; none of it depends on the number of ranks."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "length_group_batches": self.length_group_batches,
            "num_samples": len(self.samples),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises ValueError when the order of this loader is another one."""
        mine = self.state_dict()
        for name in ("seed", "global_batch_size", "length_group_batches", "num_samples"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"the saved position belongs to another order of samples: {name} was {state[name]} and is {mine[name]} now;"
                    " samples would be repeated and left out"
                )
        self.epoch, self.step = state["epoch"], state["step"]

    def _epoch_steps(self, epoch: int) -> list[list[int]]:
        generator = random.Random(f"{self.seed}/{epoch}")  # seeding with text is the same on every platform
        order = list(range(len(self.samples)))
        generator.shuffle(order)
        size, steps = self.global_batch_size, []
        for start in range(0, len(order), size * self.length_group_batches):
            chunk = order[start : start + size * self.length_group_batches]
            if self.length_group_batches > 1:
                chunk.sort(key=lambda index: len(self.samples[index].input_ids))
            batches = [chunk[first : first + size] for first in range(0, len(chunk), size)]
            partial = batches.pop() if len(batches[-1]) < size else None  # only the very last chunk has one
            generator.shuffle(batches)
            steps += batches if partial is None else [*batches, partial]
        return steps


def collate(samples: Sequence[Sample], pad_id: int) -> MicroBatch:
    """Rows padded on the right to the longest; no samples give one row of one padding token without labels."""
    width = max((len(sample.input_ids) for sample in samples), default=1)
    rows = samples or [Sample([], [])]
    # One tensor from nested lists: a tensor for each row would cost milliseconds a batch.
    input_ids = torch.tensor([sample.input_ids + [pad_id] * (width - len(sample.input_ids)) for sample in rows], dtype=torch.int64)
    labels = torch.tensor([sample.labels + [IGNORE_INDEX] * (width - len(sample.labels)) for sample in rows], dtype=torch.int64)
    lengths = torch.tensor([len(sample.input_ids) for sample in rows])
    return MicroBatch(input_ids, labels, token_mask=torch.arange(width) < lengths[:, None])
