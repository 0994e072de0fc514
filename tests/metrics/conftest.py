"""A hand-made stream of engine events: what a recorder hears, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from simserve.metrics.options import MetricOptions, RunInfo
from simserve.metrics.recorder import RunData, RunRecorder
from simserve.metrics.result import RunResult
from simserve.protocols import StepRecord
from simserve.types import (
    Kind,
    Lookups,
    Request,
    Status,
    StepOutput,
    StepPlan,
    StepResult,
    StepRun,
    TraceRequest,
)

NO_LOOKUPS = Lookups()


class Story:
    """Drives a recorder. Time goes on by the durations of the steps."""

    def __init__(self, **recorder: Any) -> None:
        self.recorder = RunRecorder(
            **({"num_gpu_blocks": 101, "block_size": 16, "enable_prefix_caching": False} | recorder)
        )
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.num_steps = 0

    def arrive(
        self, request_id: str, at: float = 0.0, prompt: Any = 10, output: int = 100, **trace: Any
    ) -> None:
        """A request of `prompt` tokens (or segments) arrives at `at`; it is taken in now."""
        parts = ((f"{request_id}/prompt", prompt),) if isinstance(prompt, int) else prompt
        request = TraceRequest(
            request_id=request_id, arrival_s=at, prompt=parts, output_len=output, **trace
        )
        self.recorder.arrived(request, max(self.now, at))
        self.requests[request_id] = Request(request, 1 << 20)

    def reject(self, request_id: str, at: float, reason: str = "too long") -> None:
        request = TraceRequest(
            request_id=request_id, arrival_s=at, prompt=(("p", 99),), output_len=9
        )
        self.recorder.rejected(request, reason, max(self.now, at))

    def abort(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        request.finish_reason = "abort"
        self.recorder.aborted(request, self.now)

    def step(
        self,
        durations: float | Sequence[float],
        emits: Mapping[str, int],
        *,
        tokens: Mapping[str, int] | None = None,
        starts: Mapping[str, int] | None = None,
        kinds: Mapping[str, Kind] | None = None,
        preempted: Sequence[str] = (),
        finished: Sequence[str] = (),
        free: Sequence[int] | None = None,
        evicted: Sequence[int] | None = None,
        lookups: Lookups = NO_LOOKUPS,
        stop: str = "empty",
        running: int | None = None,
        waiting: int = 0,
        shared: int = 0,
        parts: Mapping[str, float | Sequence[float]] | None = None,
        start: float | None = None,
        scheduled_at: float | None = None,
    ) -> None:
        """A run of steps in which each request yields `emits` tokens per step."""
        durations = [durations] if isinstance(durations, float | int) else durations
        start = self.now if start is None else start
        ends = np.add.accumulate(np.array([start, *durations]))[1:]
        ids = list(emits)
        plan = StepPlan(
            step=self.num_steps,
            request_ids=ids,
            starts=[(starts or {}).get(i, 0) for i in ids],
            num_tokens=[(tokens or {}).get(i, 1) for i in ids],
            samples=[emits[i] > 0 for i in ids],
            kinds=dict(kinds or {}),
            preempted_ids=list(preempted),
            num_shared_kv_tokens=shared,
            lookups=lookups,
            admission_stop=stop,
        )
        over = []
        for request_id in finished:
            request = self.requests.pop(request_id)
            request.status, request.finish_reason = Status.FINISHED_LENGTH_CAPPED, "length"
            over.append(request)
        num_emitted = list(emits.values())
        named = {
            name: value if isinstance(value, float | int) else np.array(value)
            for name, value in (parts or {}).items()
        }
        self.recorder.stepped(
            StepRecord(
                StepRun(plan, len(durations)),
                start,
                StepResult(ends.tolist(), named, num_emitted),
                StepOutput(num_emitted, over),
                start if scheduled_at is None else scheduled_at,
                len(ids) if running is None else running,
                waiting,
                np.array([50] * len(durations) if free is None else free),
                np.array([0] * len(durations) if evicted is None else evicted),
            )
        )
        self.num_steps += len(durations)
        self.now = float(ends[-1])

    def decode(self, request_id: str, gap: float, count: int, finish: bool = True) -> None:
        """`count` single steps of one token each."""
        for k in range(count):
            over = [request_id] if finish and k == count - 1 else []
            self.step(gap, {request_id: 1}, finished=over)

    def end(self, status: str = "completed") -> RunData:
        self.recorder.ended(status, self.now, list(self.requests.values()))
        return self.recorder.data()

    def result(self, **options: Any) -> RunResult:
        """The run so far, ended and reduced."""
        return RunResult.of(self.end(), RunInfo(), MetricOptions(**options), config="seed: 0\n")

    def summary(self, **options: Any) -> dict[str, Any]:
        return self.result(**options).summary_dict

    def row(self, request_id: str, **options: Any) -> dict[str, Any]:
        table = self.result(**options).requests_table.to_pylist()
        return next(r for r in table if r["request_id"] == request_id)


@pytest.fixture(scope="session")
def story() -> Callable[..., Story]:
    """Makes a new story; session scope, so that hypothesis may use it."""
    return Story
