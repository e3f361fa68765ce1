"""Where a run stands, besides its tensors and its position in the data: plain values that go into a checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nemo_moe.train.evaluate import ExactMatch


@dataclass
class RunState:
    """Equal on all ranks, but for `seconds`.

    Attributes:
        step: finished optimizer steps.
        loss: of the last of them.
        validated_step, validation_loss: the newest validation; step 0 is none.
        steps_without_labels: steps that changed nothing.
        seconds: of training, this rank's.
        exact_match_before: the evaluation before training; None where there was none.
    """

    step: int = 0
    loss: float = 0.0
    validated_step: int = 0
    validation_loss: float = 0.0
    steps_without_labels: int = 0
    seconds: float = 0.0
    exact_match_before: ExactMatch | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` of it equals this."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """Raises TypeError for keys that are not there or not known."""
        before = values["exact_match_before"]
        state = cls(**{**values, "exact_match_before": None if before is None else ExactMatch(**before)})
        if not isinstance(state.step, int) or state.step < 0:
            raise TypeError(f"step is {state.step!r}")
        return state
