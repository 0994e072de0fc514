"""Clocks of a real run: idle time passed over, or lived through; and the scheduler's share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from simserve.protocols import Scheduler
from simserve.types import Request, StepOutput, StepPlan, StepResult

__all__ = ["Pace", "TimedScheduler"]


class Pace:
    """Turns measured time into the engine's clock.

    `virtual`: a step ends when its measured duration has passed since its start; idle time costs
    nothing. `realtime`: the clock is the wall's, and a step does not start before its time.
    """

    def __init__(self, kind: Literal["virtual", "realtime"]) -> None:
        self._is_real = kind == "realtime"
        self._zero_s: float | None = None
        """What the wall clock showed when the engine's was 0."""

    def wait(self, start_s: float) -> None:
        """Let the wall clock reach the engine's."""
        if not self._is_real:
            return
        now = time.perf_counter()
        if self._zero_s is None:
            self._zero_s = now - start_s
        if (left := self._zero_s + start_s - now) > 0:
            time.sleep(left)

    def end(self, start_s: float, duration_s: float) -> float:
        """The engine's clock when a step has just ended that began at `start_s`."""
        if not self._is_real or self._zero_s is None:
            return start_s + duration_s
        return time.perf_counter() - self._zero_s


class TimedScheduler:
    """A scheduler whose time is taken: on a real engine the GPU waits for it.

    It also keeps plans without tokens, which no executor is given: they may tell who has ended or
    was preempted.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.ended: Callable[[Request], None] | None = None
        """Called with each request that has ended or was aborted, before anybody else knows."""
        self._scheduler = scheduler
        self.__wrapped__ = scheduler  # whoever names who decides looks behind this
        self._empty_plans: list[StepPlan] = []
        self._schedule_s = 0.0
        self._update_s = 0.0

    def take_times(self) -> dict[str, float]:
        """Seconds in schedule() and update() since they were last taken."""
        taken = {"schedule_s": self._schedule_s, "update_s": self._update_s}
        self._schedule_s = self._update_s = 0.0
        return taken

    def take_empty_plans(self) -> list[StepPlan]:
        """Plans without tokens since they were last taken."""
        taken, self._empty_plans = self._empty_plans, []
        return taken

    @property
    def num_running(self) -> int:
        """See `Scheduler`."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """See `Scheduler`."""
        return self._scheduler.num_waiting

    def unfinished(self) -> Sequence[Request]:
        """See `Scheduler`."""
        return self._scheduler.unfinished()

    def add_request(self, request: Request) -> None:
        """See `Scheduler`."""
        self._scheduler.add_request(request)

    def abort(self, request_id: str) -> Request | None:
        """See `Scheduler`."""
        request = self._scheduler.abort(request_id)
        if request is not None and self.ended is not None:
            self.ended(request)
        return request

    def schedule(self) -> StepPlan:
        """See `Scheduler`."""
        began = time.perf_counter()
        plan = self._scheduler.schedule()
        self._schedule_s += time.perf_counter() - began
        if not plan.request_ids:
            self._empty_plans.append(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """See `Scheduler`."""
        began = time.perf_counter()
        output = self._scheduler.update(plan, result)
        if self.ended is not None:
            for request in output.finished:
                self.ended(request)
        self._update_s += time.perf_counter() - began
        return output
