"""The engine under asynchronous scheduling: up to two steps in flight.

Of a run of equal steps the last one stays in flight, as it would if they were taken one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from operator import sub
from typing import NamedTuple

import simpy

from simserve.engine.loop import Engine, EngineParts, Process, nothing_run, part_of
from simserve.protocols import SteadyScheduler, StepRecord
from simserve.types import StepPlan, StepResult, StepRun

__all__ = ["AsyncEngine"]


class _InFlight(NamedTuple):
    """A run of steps that was scheduled and whose tokens are not yet taken in."""

    run: StepRun
    start_s: float
    scheduled_at_s: float
    """When the first step was."""
    result: StepResult
    num_running: int
    num_waiting: int
    num_free_blocks: list[int]
    num_evicted_blocks: list[int]
    """After and in the schedule() of each step; of a run that is not passed over yet, the first."""
    gauges: Mapping[str, int]

    @property
    def end_s(self) -> float:
        return self.result.ends_s[-1]


class AsyncEngine(Engine):
    """Schedules step i + 1 while step i runs, and only then waits for step i."""

    def __init__(
        self,
        env: simpy.Environment,
        parts: EngineParts,
        progress: Callable[[float, int, int | None], object] | None = None,
    ) -> None:
        self._in_flight: deque[_InFlight] = deque()
        self._worker_free_at_s = 0.0
        super().__init__(env, parts, progress)

    def _run(self) -> Process:
        while not self.status:
            self._take_in()
            if self._unfinished or self._in_flight:
                yield from self._step()
            else:
                yield from self._wait_for_message("completed")

    def _step(self) -> Process:
        busy = False
        if self._unfinished:
            plan, end_s = self._launch()
            busy = bool(plan.request_ids or plan.preempted_ids)
            if plan.request_ids and len(self._in_flight) == 1 and end_s > self.now:
                return
        oldest = self._in_flight.popleft()
        yield from self._land(oldest)
        if self._in_flight and self._in_flight[0].run.count > 1 and self._steady is not None:
            yield from self._land(self._pass_over(self._in_flight.popleft(), self._steady))
        busy = busy or bool(oldest.run.plan.request_ids)
        if not busy and self._unfinished and not self.status:
            yield from self._idle()

    def _idle(self) -> Process:
        """Nothing runs and nothing was planned: only a message can change that.

        What may be in flight is a second such step. The engine plans them for ever; if `max_steps`
        ends the run anyway, so does this.
        """
        if self._in_flight and self._parts.max_steps is None:
            yield from self._land(self._in_flight.popleft())
        if not self._in_flight:
            yield from self._wait_for_message("deadlock")

    def _launch(self) -> tuple[StepPlan, float]:
        """Schedule a step, or a run of them; it starts when the worker is free, and ends then."""
        before = self._kv.evicted_cached_blocks
        plan = self._schedule()
        start_s = max(self._worker_free_at_s, self.now)
        run, result = self._begin(plan, start_s)
        step = _InFlight(
            run,
            start_s,
            self.now,
            result,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            [self._kv.num_free_blocks],
            [self._kv.evicted_cached_blocks - before],
            self._gauges(),
        )
        self._worker_free_at_s = step.end_s
        self._in_flight.append(step)
        self.num_steps += 1
        return plan, step.end_s

    def _begin(self, plan: StepPlan, start_s: float) -> tuple[StepRun, StepResult]:
        """Begin as many steps as will be scheduled alike: up to the look at the next message."""
        if not plan.request_ids:
            return StepRun(plan), nothing_run(start_s)
        count = self._num_equal_steps(plan) if self._in_flight else 1
        run, result = self._submit(plan, count, start_s)
        due = self._inbox.next_time()
        if run.count > 1 and due is not None:
            # Each further step is scheduled at the end of the one before the last.
            looks_s = [max(self.now, self._in_flight[0].end_s), *result.ends_s]
            passed = min(run.count, 1 + bisect_left(looks_s, due))
            return StepRun(plan, passed), part_of(result, 0, passed)
        return run, result

    def _pass_over(self, steps: _InFlight, steady: SteadyScheduler) -> _InFlight:
        """All of a run but its last step, which is now scheduled and stays in flight."""
        (plan, count), result = steps.run, steps.result
        grown = steady.advance(plan, count)
        free = list(accumulate(grown.taken, sub, initial=steps.num_free_blocks[0]))
        evicted = [*steps.num_evicted_blocks, *grown.evicted]
        done = count - 1
        self._in_flight.append(
            steps._replace(
                run=StepRun(_later(plan, done)),
                start_s=result.ends_s[done - 1],
                scheduled_at_s=[self.now, *result.ends_s][done - 1],
                result=part_of(result, done, count),
                num_free_blocks=free[done:],
                num_evicted_blocks=evicted[done:],
            )
        )
        self.num_steps += done
        return steps._replace(
            run=StepRun(plan, done),
            result=part_of(result, 0, done),
            num_free_blocks=free[:done],
            num_evicted_blocks=evicted[:done],
        )

    def _land(self, steps: _InFlight) -> Process:
        """Wait for the end of steps, and take in the tokens of the last one."""
        plan = steps.run.plan
        self.now = max(self.now, steps.end_s)
        yield self._until(self.now)
        self._last_step_s = (steps.end_s - steps.start_s) / steps.run.count
        output = self._update(plan, steps.result)
        self._parts.recorder.stepped(
            StepRecord(
                steps.run,
                steps.start_s,
                steps.result,
                output,
                steps.scheduled_at_s,
                steps.num_running,
                steps.num_waiting,
                steps.num_free_blocks,
                steps.num_evicted_blocks,
                steps.gauges,
            )
        )
        self._close_step(plan, output)


def _later(plan: StepPlan, count: int) -> StepPlan:
    """The plan that is the same `count` steps on."""
    return replace(
        plan,
        step=plan.step + count,
        starts=[start + count for start in plan.starts],
        new_blocks={},
        finished_ids=[],
    )
