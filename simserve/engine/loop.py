"""The engine: take in what has arrived, schedule, run, update; one step in progress at a time.

A SimPy process that sleeps to the end of each run of steps, or to the next message. The engine
keeps a clock of its own, in absolute times, and that clock orders events: SimPy's relative delays
may differ from it in the last bit. An arrival during a step waits for the step's end: it cuts a run
of steps there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import Any, Protocol

import simpy

from simserve.engine.admission import Admission
from simserve.engine.inbox import Abort, Inbox, Message
from simserve.errors import OutOfDomainError
from simserve.protocols import (
    Executor,
    GaugedKVCacheManager,
    KVCacheManager,
    Recorder,
    Scheduler,
    SteadyScheduler,
    StepRecord,
    TimedIntake,
    Workload,
)
from simserve.types import Request, StepOutput, StepPlan, StepResult, StepRun, TraceRequest

__all__ = ["Engine", "EngineParts", "Observer"]

Process = Generator[simpy.Event, Any, None]

LIVELOCK_PREEMPTIONS = 1000
"""So many preemptions without a token or an arrival: the engine runs in a circle. Not looked at if
`max_steps` ends the run anyway."""


class Observer(Protocol):
    """Sees every single step; with one, the engine takes no steps at once."""

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        """schedule() has just returned."""
        ...

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None:
        """update() of this plan has just returned."""
        ...

    def reset(self, succeeded: bool, now_s: float) -> None:
        """A reset of the prefix cache was asked for."""
        ...


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """What the engine drives."""

    workload: Workload
    inbox: Inbox
    scheduler: Scheduler
    kv: KVCacheManager
    executor: Executor
    recorder: Recorder
    admission: Admission
    max_model_len: int
    leap: bool = True
    """Take runs of equal steps at once, where the scheduler offers it. Results are the same."""
    max_steps: int | None = None
    observer: Observer | None = None


class Engine:
    """Synchronous engine. `status` tells how it ended: completed, deadlock, livelock, max_steps."""

    def __init__(
        self,
        env: simpy.Environment,
        parts: EngineParts,
        progress: Callable[[float, int, int | None], object] | None = None,
    ) -> None:
        self.env = env
        self.now = 0.0
        self.status = ""
        self.num_steps = 0
        self._last_step_s = 0.0
        self.num_done = 0
        """Requests that have ended, however they did."""
        self._progress = progress
        self._parts = parts
        self._inbox = parts.inbox
        self._scheduler = parts.scheduler
        self._kv = parts.kv
        scheduler = parts.scheduler
        self._steady: SteadyScheduler | None = None
        leap = parts.leap and parts.observer is None and not parts.executor.single_steps
        if leap and isinstance(scheduler, SteadyScheduler):
            self._steady = scheduler
        self._gauged = parts.kv if isinstance(parts.kv, GaugedKVCacheManager) else None
        self._intake = parts.executor if isinstance(parts.executor, TimedIntake) else None
        self._idle_preemptions = 0
        self.process = env.process(self._run())

    def interrupt(self) -> None:
        """End after the step in progress."""
        self.status = "interrupted"

    # -- messages --------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Accept everything that is due by the engine's clock."""
        inbox = self._inbox
        while (due := inbox.next_time()) is not None and due <= self.now:
            self._accept(inbox.pop())

    def _accept(self, message: Message) -> None:
        parts = self._parts
        self._idle_preemptions = 0
        if isinstance(message, TraceRequest):
            reason = parts.admission.reason_to_reject(message)
            if reason is not None:
                parts.recorder.rejected(message, reason, self.now)
                self._ended(message.request_id, completed=False)
                return
            if self._intake is not None:
                self.now = self._intake.taken_in_s(message, self.now)
            parts.recorder.arrived(message, self.now)
            parts.executor.add_request(message)
            self._scheduler.add_request(Request(message, parts.max_model_len))
        elif isinstance(message, Abort):
            request = self._scheduler.abort(message.request_id)
            if request is not None:
                parts.recorder.aborted(request, self.now)
                self._ended(request.request_id, completed=False)
        else:
            succeeded = self._kv.reset_prefix_cache()
            if parts.observer is not None:
                parts.observer.reset(succeeded, self.now)

    def _ended(self, request_id: str, completed: bool) -> None:
        """Closed loops may send the next request now."""
        self.num_done += 1
        self._inbox.finished(request_id, self.now, completed)

    # -- steps -----------------------------------------------------------------------------------

    def _run(self) -> Process:
        while not self.status:
            self._take_in()
            if self._scheduler.num_running or self._scheduler.num_waiting:
                yield from self._step()
            else:
                yield from self._wait_for_message("completed")

    @property
    def _unfinished(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting

    def _wait_for_message(self, status_if_none: str) -> Process:
        """Sleep until the next message is due; with none left, that is the end."""
        due = self._inbox.next_time()
        if due is None:
            self.status = status_if_none
            return
        self.now = max(self.now, due)
        yield self._until(self.now)

    def _step(self) -> Process:
        start_s = self.now
        before = self._kv.evicted_cached_blocks
        plan = self._schedule()
        num_running, num_waiting = self._scheduler.num_running, self._scheduler.num_waiting
        free = [self._kv.num_free_blocks]
        evicted = [self._kv.evicted_cached_blocks - before]
        gauges = self._gauges()
        passed = 1
        if not plan.request_ids:
            run, result = StepRun(plan), nothing_run(start_s)
        else:
            run, result = self._submit(plan, self._num_equal_steps(plan), start_s)
            count = run.count
            passed = self._steps_until_message(result) if count > 1 else 1
            yield self._until(result.ends_s[passed - 1])
            if self._steady is not None and passed > 1:
                grown = self._steady.advance(plan, passed)
                free = list(accumulate(grown.taken, sub, initial=free[0]))
                evicted += grown.evicted
            if passed < count:
                run, result = StepRun(plan, passed), part_of(result, 0, passed)
            end_s = result.ends_s[-1]
            self._last_step_s = (end_s - start_s) / passed + result.gap_s
            self.now = end_s
        output = self._update(plan, result)
        self._parts.recorder.stepped(
            StepRecord(
                run,
                start_s,
                result,
                output,
                start_s,
                num_running,
                num_waiting,
                free,
                evicted,
                gauges,
            )
        )
        self.num_steps += passed
        self.now += result.gap_s
        self._close_step(plan, output)
        if not plan.request_ids and not plan.preempted_ids and not self.status:
            yield from self._wait_for_message("deadlock")

    def _gauges(self) -> Mapping[str, int]:
        """What the KV manager reports of itself now."""
        return self._gauged.gauges() if self._gauged is not None else {}

    def _num_equal_steps(self, plan: StepPlan) -> int:
        """For how many steps, `plan` included, nothing changes but an arrival could change it."""
        if self._steady is None:
            return 1
        count, limit = self._steady.steady_steps(plan), self._parts.max_steps
        if limit is not None:
            count = max(1, min(count, limit - self.num_steps))
        due = self._inbox.next_time()
        if count > 1 and due is not None and self._last_step_s > 0.0:
            # Steps beyond the next arrival would be priced for nothing. A guess will do.
            count = min(count, 2 + int(1.25 * (due - self.now) / self._last_step_s))
        return count

    def _submit(self, plan: StepPlan, count: int, start_s: float) -> tuple[StepRun, StepResult]:
        """Begin `count` steps; one alone if a later one cannot be priced, as it may never come."""
        run = StepRun(plan, count)
        try:
            return run, self._parts.executor.submit(run, start_s)
        except OutOfDomainError:
            if count == 1:
                raise
            return self._submit(plan, 1, start_s)

    def _schedule(self) -> StepPlan:
        plan = self._scheduler.schedule()
        if self._parts.observer is not None:
            self._parts.observer.scheduled(plan, self.now)
        return plan

    def _update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        output = self._scheduler.update(plan, result)
        for request in output.finished:
            self._ended(request.request_id, completed=True)
        if self._parts.observer is not None:
            self._parts.observer.updated(plan, output, self.now)
        return output

    def _steps_until_message(self, result: StepResult) -> int:
        """How many steps of a run there will be: the last is that after which a message is due."""
        due, gap_s = self._inbox.next_time(), result.gap_s
        num_steps = len(result.ends_s)
        if due is None:
            return num_steps
        before = bisect_left(result.ends_s, due, key=lambda end_s: end_s + gap_s)
        return min(num_steps, before + 1)

    def _close_step(self, plan: StepPlan, output: StepOutput) -> None:
        """Show progress, and see to it that nothing runs for ever."""
        if any(output.num_emitted):
            self._idle_preemptions = 0
        elif plan.preempted_ids:
            self._idle_preemptions += len(plan.preempted_ids)
        if self._progress is not None:
            self._progress(self.now, self.num_done, self._parts.workload.num_requests)
        limit = self._parts.max_steps
        if self.status:
            return
        if limit is not None and self.num_steps >= limit:
            self.status = "max_steps"
        elif limit is None and self._idle_preemptions > LIVELOCK_PREEMPTIONS:
            self.status = "livelock"

    def _until(self, time_s: float) -> simpy.Event:
        return self.env.timeout(max(0.0, time_s - self.env.now))


def nothing_run(now_s: float) -> StepResult:
    """The result of a step without tokens: no model is run."""
    return StepResult([now_s], {}, ())


def part_of(result: StepResult, start: int, stop: int) -> StepResult:
    """Steps `start` ... `stop - 1` of a run."""
    parts = {
        name: values if isinstance(values, (float, int)) else values[start:stop]
        for name, values in result.parts.items()
    }
    return StepResult(result.ends_s[start:stop], parts, result.num_emitted, gap_s=result.gap_s)
