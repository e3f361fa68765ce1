"""Agreement of all ranks to stop: a signal reaches one rank, and all must leave at the same place.

In training the flag travels with the counts of a step (`step.train_step`), so it costs nothing; between steps and inside
evaluations, which are made of forwards that all ranks share, ranks ask each other over gloo.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import torch
import torch.distributed as dist

from nemo_moe.stopping import StopRequest


class StopAgreed(Exception):
    """All ranks have agreed to stop; raised on all of them at the same place."""


class StopVote:
    """One rank's voice.

    Args:
        request: whether this process has got a signal.
        group: all ranks, over gloo; used by the main thread alone.
        also: another reason to stop, known to this rank: a save in the background that failed.
    """

    def __init__(self, request: StopRequest, group: dist.ProcessGroup, also: Callable[[], bool] = lambda: False) -> None:
        self._request = request
        self._group = group
        self._also = also

    def wants_to_stop(self) -> bool:
        """Whether this rank asks for a stop."""
        return self._request.requested or self._also()

    def check(self) -> None:
        """Raise StopAgreed on all ranks if one asks for it. Collective; a fraction of a millisecond on one machine."""
        if self._maximum(int(self.wants_to_stop())):
            raise StopAgreed

    def signal_name(self) -> str | None:
        """The signal that some rank got; None where none did. Collective."""
        number = self._maximum(signal.Signals[self._request.signal_name].value if self._request.signal_name else 0)
        return signal.Signals(number).name if number else None

    def _maximum(self, value: int) -> int:
        votes = torch.tensor([value])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return int(votes)
