"""The engine under asynchronous scheduling: up to two steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import simpy

from simserve.engine.loop import Engine, EngineParts, Process, nothing_run
from simserve.protocols import StepRecord
from simserve.types import StepPlan, StepResult, StepRun

__all__ = ["AsyncEngine"]


class _InFlight(NamedTuple):
    """A step that was scheduled and whose tokens are not yet taken in."""

    plan: StepPlan
    start_s: float
    scheduled_at_s: float
    result: StepResult
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_evicted_blocks: int

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
            step = self._launch()
            busy = bool(step.plan.request_ids or step.plan.preempted_ids)
            if step.plan.request_ids and len(self._in_flight) == 1 and step.end_s > self.now:
                return
        oldest = self._in_flight.popleft()
        self.now = max(self.now, oldest.end_s)
        yield self._until(self.now)
        self._land(oldest)
        busy = busy or bool(oldest.plan.request_ids)
        if not busy and not self._in_flight and self._unfinished and not self.status:
            yield from self._wait_for_message("deadlock")

    def _launch(self) -> _InFlight:
        """Schedule a step; it starts when the worker is free."""
        before = self._kv.evicted_cached_blocks
        plan = self._schedule()
        start_s = max(self._worker_free_at_s, self.now)
        if plan.request_ids:
            result = self._parts.executor.submit(StepRun(plan), start_s)
        else:
            result = nothing_run(start_s)
        step = _InFlight(
            plan,
            start_s,
            self.now,
            result,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._kv.num_free_blocks,
            self._kv.evicted_cached_blocks - before,
        )
        self._worker_free_at_s = step.end_s
        self._in_flight.append(step)
        self.num_steps += 1
        return step

    def _land(self, step: _InFlight) -> None:
        """Take in the tokens of a step that has ended."""
        output = self._update(step.plan, step.result)
        self._parts.recorder.stepped(
            StepRecord(
                StepRun(step.plan),
                step.start_s,
                step.result,
                output,
                step.scheduled_at_s,
                step.num_running,
                step.num_waiting,
                [step.num_free_blocks],
                [step.num_evicted_blocks],
            )
        )
        self._close_step(step.plan, output)
