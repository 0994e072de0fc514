"""Where a simulation first plans otherwise than the engine did, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.replay.plans import PlanDifference
from simserve.metrics.recorder import RunData
from simserve.metrics.request_log import Outcome

__all__ = ["Divergence", "explain"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step whose plans differ."""

    difference: PlanDifference
    by_arrival: bool
    """Whether other requests had been taken in by then; else the same state led elsewhere."""
    reason: str

    def __str__(self) -> str:
        return f"{self.difference}; {self.reason}"


def explain(log: StepLog, data: RunData, difference: PlanDifference) -> Divergence:
    """Compare which requests the two engines had taken in before the step.

    Times differ a little, so a request may make it into a step in one of them only. Where both had
    taken in the same requests and planned the same until then, a rule must differ.
    """
    step = difference.step
    ours = _taken_in(data, step)
    theirs = set(np.flatnonzero(log.added_s <= _start(log.steps.start_s, step)).tolist())
    theirs -= {int(data.requests.request_ids[row]) for row in _refused(data)}
    if ours == theirs:
        reason = "the same requests had been taken in: a rule of the scheduler differs"
        return Divergence(difference, False, reason)
    early = [f"{i} only in the simulation" for i in sorted(ours - theirs)]
    late = [f"{i} only in the engine" for i in sorted(theirs - ours)]
    named = ", ".join((early + late)[:3])
    more = len(early) + len(late) - 3
    reason = f"requests taken in by then: {named}{f' and {more} more' if more > 0 else ''}"
    return Divergence(difference, True, reason)


def _taken_in(data: RunData, step: int) -> set[int]:
    until_s = _start(data.steps.start_s, step)
    inside = np.flatnonzero(data.requests.queued_s <= until_s)
    return {int(data.requests.request_ids[row]) for row in inside}


def _refused(data: RunData) -> NDArray[np.intp]:
    """Rows of requests that neither engine takes in, as they are too long."""
    return np.flatnonzero(data.requests.are(Outcome.REJECTED))


def _start(starts_s: np.ndarray[tuple[int], np.dtype[np.float64]], step: int) -> float:
    return float(starts_s[step]) if step < len(starts_s) else np.inf
