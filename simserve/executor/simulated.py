"""Runs steps on a cost model: prices them, and makes up what a model runner would answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import lt
from typing import Protocol

from simserve.errors import SimserveError
from simserve.executor.draft_cost import DraftCost
from simserve.protocols import CostModel, LoopCost
from simserve.types import StepPlan, StepResult, StepRun, TraceRequest

__all__ = ["Drafter", "SampledTokens", "SimulatedExecutor"]


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


class SampledTokens(Protocol):
    """What choosing tokens costs, beyond what the cost model has of it."""

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        ...

    def price_s(self, plan: StepPlan, count: int) -> float:
        """Time that it adds to each of `count` steps of a plan (s)."""
        ...


class SimulatedExecutor:
    """Answers at once; the engine sleeps until the priced end.

    Args:
        cost_model: prices steps.
        drafter: makes up drafts; None: no speculative decoding.
        sampling: prices the choice of tokens.
        draft_cost: prices the making of drafts.
        plans_ahead: steps are planned ahead, so that the loop's time between them hides behind one.
    """

    def __init__(
        self,
        cost_model: CostModel,
        drafter: Drafter | None = None,
        sampling: SampledTokens | None = None,
        draft_cost: DraftCost | None = None,
        plans_ahead: bool = False,
    ) -> None:
        self._cost_model = cost_model
        self._loop = cost_model if isinstance(cost_model, LoopCost) else None
        self._between = None if plans_ahead else self._loop
        self._drafter = drafter
        self._sampling = sampling
        self._draft_cost = draft_cost
        self._took_in = False
        self.single_steps = drafter is not None

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        if self._drafter is not None:
            self._drafter.add_request(request)
        if self._sampling is not None:
            self._sampling.add_request(request)

    def taken_in_s(self, request: TraceRequest, now_s: float) -> float:
        """When a request is taken in, if that begins at `now_s` (s)."""
        if self._loop is None:
            return now_s
        first, self._took_in = not self._took_in, True
        return now_s + self._loop.take_in_s(request, first)

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Price `run`. Ends are summed up one by one, as single steps would.

        Raises:
            SimserveError: the cost model gives a step no time, so that the clock would stand still.
        """
        plan = run.plan
        self._took_in = False
        durations, parts = self._cost_model.price(run)
        if self._sampling is not None:
            sample_s = self._sampling.price_s(plan, run.count)
            durations = [duration_s + sample_s for duration_s in durations]
            parts = {**parts, "sample_s": sample_s}
        emitted: Sequence[int] = plan.samples
        drafts = None
        if self._drafter is not None:
            emitted = self._drafter.emit(plan)
            drafts = self._drafter.draft(plan, emitted)
            if self._draft_cost is not None:
                draft_s = self._draft_cost.price_s(plan, emitted, drafts is not None)
                durations = [duration_s + draft_s for duration_s in durations]
                parts = {**parts, "draft_s": draft_s}
        gap_s = 0.0 if self._between is None else self._between.after_step_s(plan)
        starts_s = [start_s]
        if run.count == 1:
            ends_s = [start_s + durations[0]]
        elif gap_s:
            spans = chain.from_iterable(zip(durations, repeat(gap_s)))
            clock = list(accumulate(spans, initial=start_s))
            starts_s, ends_s = clock[::2], clock[1::2]
        else:
            starts_s = list(accumulate(durations, initial=start_s))
            ends_s = starts_s[1:]
        if not all(map(lt, starts_s, ends_s)):
            raise SimserveError(
                f"the cost model prices step {plan.step} ({plan.total_num_tokens} tokens) at "
                f"{min(durations)!r} s: every step with tokens must take time"
            )
        return StepResult(ends_s, parts, emitted, draft_tokens=drafts, gap_s=gap_s)
