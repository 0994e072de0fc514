"""Runs steps on a cost model: prices them, and makes up what a model runner would answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from simserve.errors import SimserveError
from simserve.protocols import CostModel
from simserve.types import StepPlan, StepResult, StepRun, TraceRequest

__all__ = ["Drafter", "SimulatedExecutor"]


class Drafter(Protocol):
    """Speculative decoding without a model: which drafts are accepted, and the next ones."""

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        ...

    def emit(self, plan: StepPlan) -> Sequence[int]:
        """Tokens each request of the plan yields: accepted drafts and one more."""
        ...

    def draft(self, plan: StepPlan, emitted: Sequence[int]) -> Mapping[str, Sequence[int]] | None:
        """New drafts per request, or None if the drafter is not run after this step."""
        ...


class SimulatedExecutor:
    """Answers at once; the engine sleeps until the priced end."""

    def __init__(self, cost_model: CostModel, drafter: Drafter | None = None) -> None:
        self._cost_model = cost_model
        self._drafter = drafter
        self.single_steps = drafter is not None

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        if self._drafter is not None:
            self._drafter.add_request(request)

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Price `run`. Ends are summed up one by one, as single steps would.

        Raises:
            SimserveError: the cost model gives a step no time, so that the clock would stand still.
        """
        plan = run.plan
        durations, parts = self._cost_model.price(run)
        if run.count == 1:
            end_s = start_s + durations.item(0)
            ends_s = np.array([end_s])
            advances = end_s > start_s
        else:
            clock = np.concatenate(((start_s,), durations))
            ends_s = np.add.accumulate(clock, out=clock)[1:]
            advances = bool((clock[1:] > clock[:-1]).all())
        if not advances:
            raise SimserveError(
                f"the cost model prices step {plan.step} ({plan.total_num_tokens} tokens) at "
                f"{float(np.min(durations))!r} s: every step with tokens must take time"
            )
        emitted: Sequence[int] = plan.samples
        drafts = None
        if self._drafter is not None:
            emitted = self._drafter.emit(plan)
            drafts = self._drafter.draft(plan, emitted)
        return StepResult(ends_s, parts, emitted, draft_tokens=drafts)
