"""Where a run stands, besides its tensors and its position in the data: plain values that go into a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from nemo_moe.train.evaluate import ExactMatch


@dataclass
class Progress:
    """Equal on all ranks, but for `seconds`.

    Attributes:
        step: finished optimizer steps.
        loss: of the last of them.
        validated_step, validation_loss: the newest validation; step 0 is none.
        best_step, best_loss: the validation with the lowest loss; None before the first.
        steps_without_labels: steps that changed nothing.
        seconds: of training, this rank's.
        exact_match_before: the evaluation before training; None where there was none.
    """

    step: int = 0
    loss: float = 0.0
    validated_step: int = 0
    validation_loss: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    steps_without_labels: int = 0
    seconds: float = 0.0
    exact_match_before: ExactMatch | None = None

    def validated(self, loss: float) -> None:
        """Take up the validation loss of the current step."""
        self.validated_step, self.validation_loss = self.step, loss
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_step, self.best_loss = self.step, loss

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` of it equals this."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """Raises TypeError for keys that are not there or not known."""
        before = values["exact_match_before"]
        progress = cls(**{**values, "exact_match_before": None if before is None else ExactMatch(**before)})
        if not isinstance(progress.step, int) or progress.step < 0:
            raise TypeError(f"step is {progress.step!r}")
        return progress
