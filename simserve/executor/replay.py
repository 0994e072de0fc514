"""Runs steps in the time that they took in a real engine, whatever is scheduled in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.types import StepResult, StepRun, TraceRequest

__all__ = ["RecordEndsError", "ReplayExecutor"]


class RecordEndsError(SimserveError):
    """More steps are needed than were recorded."""


class ReplayExecutor:
    """Step k begins at `starts_s[k]` and ends at `ends_s[k]`; the engine's clock is the record's.

    Between steps lies what lay there in the record, idle time included. So the loop takes in at
    every step what had arrived by then in the record.

    Args:
        starts_s, ends_s: times on the engine's clock (s), shape [steps].
    """

    single_steps = True

    def __init__(self, starts_s: NDArray[np.float64], ends_s: NDArray[np.float64]) -> None:
        self._starts_s = starts_s
        self._ends_s = ends_s
        self._next = 0

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in: nothing depends on it."""

    def taken_in_s(self, request: TraceRequest, now_s: float) -> float:
        """The start of the next step: an idle loop that a request wakes goes on there (s)."""
        if self._next == len(self._starts_s):
            return now_s
        return max(now_s, self._starts_s.item(self._next))

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """The recorded end of a step.

        Raises:
            RecordEndsError: the record has no such step.
        """
        step = run.plan.step
        if step >= len(self._ends_s):
            raise RecordEndsError(
                f"the record ends after {len(self._ends_s)} steps, but requests are left: their "
                "plans differ from the recorded ones"
            )
        self._next = step + 1
        end_s = float(self._ends_s[step])
        gap_s = 0.0
        if self._next < len(self._starts_s):
            # One bit later than the record, so that rounding never puts the sum before it.
            gap_s = float(np.nextafter(self._starts_s[self._next], np.inf) - end_s)
        return StepResult([end_s], {}, run.plan.samples, gap_s=gap_s)
