"""Writes down a simulation in the form that cases are recorded in."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simserve.kv.manager import PagedKVCacheManager
from simserve.protocols import StepRecord
from simserve.sched.base import BaseScheduler
from simserve.types import Kind, Request, StepOutput, StepPlan, TraceRequest

__all__ = ["CaseRecord"]

CLOCK_BASE_S = 1024.0
"""The recorded engine's monotonic clock did not start at 0. It shows only in how quotients round
(mean time per output token): any start from 1024 up to 2048 s reproduces all of them."""


@dataclass(slots=True)
class _Life:
    """Times of one request, as vLLM's statistics classes keep them."""

    arrival_s: float
    queued_s: float | None = None
    scheduled_s: float | None = None
    request: Request | None = None
    finished_s: float | None = None
    token_steps: list[tuple[int, int]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)


class CaseRecord:
    """Recorder and observer in one: builds `steps`, `requests` and `summary` of a case."""

    def __init__(
        self,
        config: dict[str, Any],
        requests: Sequence[TraceRequest],
        scheduler: BaseScheduler,
        kv: PagedKVCacheManager,
    ) -> None:
        self._config = config
        self._requests = requests
        self._scheduler = scheduler
        self._kv = kv
        self._steps: list[dict[str, Any]] = []
        self._lives: dict[str, _Life] = {}
        self._block_names = np.array([f"{i},".encode() for i in range(config["num_gpu_blocks"])])
        self._resets: list[list[Any]] = []
        self._totals = dict.fromkeys(
            ("preemptions", "ghosts", "resumed", "scheduled_tokens", "output_tokens"), 0
        )
        self._lookups = [0, 0]

    # -- recorder --------------------------------------------------------------------------------

    def arrived(self, request: TraceRequest, now_s: float) -> None:
        """Note when the engine took a request in."""
        self._lives[request.request_id] = _Life(request.arrival_s, queued_s=now_s)

    def rejected(self, request: TraceRequest, reason: str, now_s: float) -> None:
        """A refused request leaves no trace but its id."""
        self._lives[request.request_id] = _Life(request.arrival_s)

    def aborted(self, request: Request, now_s: float) -> None:
        """Note the end."""
        life = self._lives[request.request_id]
        life.request, life.finished_s = request, now_s

    def stepped(self, record: StepRecord) -> None:
        """Add the times, which are known only now."""
        step = self._steps[record.run.plan.step]
        step["t"] = [_rounded(record.start_s), _rounded(record.result.ends_s[-1])]
        if self._config["async_scheduling"]:
            step["ts"] = _rounded(record.scheduled_at_s)

    def ended(self, status: str, now_s: float, unfinished: Sequence[Request]) -> None:
        """Nothing to add: `finish` tells the end."""

    # -- observer --------------------------------------------------------------------------------

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        """Write the decision down."""
        waiting = [int(r.request_id) for r in self._scheduler.waiting]
        kinds = {Kind.NEW: 1, Kind.RESUMED: 2, Kind.GHOST: 3}
        common = list(plan.num_common_prefix_blocks)
        blocks = [(i, groups) for i, groups in plan.new_blocks.items() if any(groups)]
        step = {
            "s": [int(i) for i in plan.request_ids],
            "n": list(plan.num_tokens),
            "c": list(plan.starts),
            "fs": self._kv.num_free_blocks,
            "q": [len(self._scheduler.running), len(waiting)],
        }
        optional = {
            "k": [[int(i), kinds[plan.kinds[i]]] for i in plan.request_ids if i in plan.kinds],
            "b": [[int(i), _runs_by_group(groups)] for i, groups in blocks]
            if self._config.get("record_blocks", True)
            else [],
            "sp": [[int(i), len(drafts)] for i, drafts in plan.draft_tokens.items()],
            "pre": [int(i) for i in plan.preempted_ids],
            "pq": list(plan.lookups) if plan.lookups.requests else [],
            "cp": (common if len(common) > 1 else common[0]) if any(common) else 0,
            "wq": waiting[:16],
        }
        step.update({key: value for key, value in optional.items() if value})
        self._steps.append(step)
        self._count(plan, now_s)

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None:
        """Write the state after the update down."""
        step = self._steps[plan.step]
        step["o"] = sum(output.num_emitted)
        step["fu"] = self._kv.num_free_blocks
        if self._config.get("record_queue", True):
            names = self._block_names[self._kv.pool.free_queue.blocks].tobytes()  # padded by zeros
            step["fq"] = zlib.crc32(names.replace(b"\0", b"").removesuffix(b","))
        if self._config["enable_prefix_caching"]:
            step["nc"] = self._kv.num_cached_keys
        if output.finished:
            step["fin"] = [int(r.request_id) for r in output.finished]
        for request_id, count in zip(plan.request_ids, output.num_emitted, strict=True):
            if count:
                life = self._lives[request_id]
                life.token_steps.append((plan.step, int(count)))
                life.token_times.append(now_s)
        for request in output.finished:
            life = self._lives[request.request_id]
            life.request, life.finished_s = request, now_s
        self._totals["output_tokens"] += step["o"]

    def reset(self, succeeded: bool, now_s: float) -> None:
        """Note a reset of the prefix cache."""
        self._resets.append([_rounded(now_s), succeeded])

    def _count(self, plan: StepPlan, now_s: float) -> None:
        totals, kinds = self._totals, list(plan.kinds.values())
        totals["preemptions"] += len(plan.preempted_ids)
        totals["ghosts"] += kinds.count(Kind.GHOST)
        totals["resumed"] += kinds.count(Kind.RESUMED)
        totals["scheduled_tokens"] += plan.total_num_tokens
        self._lookups[0] += plan.lookups.queries
        self._lookups[1] += plan.lookups.hits
        for request_id, kind in plan.kinds.items():
            if kind is Kind.NEW:
                self._lives[request_id].scheduled_s = now_s

    # -- the whole -------------------------------------------------------------------------------

    def finish(self, status: str, now_s: float) -> dict[str, Any]:
        """Steps, requests (by id) and summary."""
        for request in self._scheduler.requests.values():
            self._lives[request.request_id].request = request
        for trace in self._requests:  # those that had not arrived when the run was cut
            self._lives.setdefault(trace.request_id, _Life(trace.arrival_s))
        lives = sorted(self._lives.items(), key=lambda item: int(item[0]))
        unfinished = [int(i) for i, life in lives if life.finished_s is None]
        summary: dict[str, Any] = {
            "end": "done" if status == "completed" else status,
            "steps": len(self._steps),
            "end_time": _rounded(now_s),
            **self._totals,
            "prefix_queries": self._lookups[0],
            "prefix_hits": self._lookups[1],
            "unfinished": unfinished,
            "runner_would_crash": False,
        }
        if self._resets:
            summary["resets"] = self._resets
        rows = [_request_row(int(i), life) for i, life in lives]
        return {"steps": self._steps, "requests": rows, "summary": summary}


def _request_row(request_id: int, life: _Life) -> dict[str, Any]:
    request = life.request
    row: dict[str, Any] = {
        "id": request_id,
        "pre": request.num_preemptions if request else 0,
        # The records take it when a request ends: -1 for those that never do.
        "cached": request.num_cached_tokens if request and request.is_finished else -1,
        "ntok": request.num_output_tokens if request else 0,
        "reason": request.finish_reason if request else None,
        "tok": _token_runs(life.token_steps),
    }
    times = life.token_times
    if life.finished_s is not None:
        row["fin"] = _rounded(life.finished_s)
    if times and life.finished_s is not None:
        row["ttft"] = _rounded(times[0] - life.arrival_s)
    if times and row["reason"] == "length":
        assert life.scheduled_s is not None
        assert life.queued_s is not None
        decode = times[-1] - times[0]
        row["queue"] = _rounded(life.scheduled_s - life.queued_s)
        row["prefill"] = _rounded(times[0] - life.scheduled_s)
        row["decode"] = _rounded(decode)
        row["e2e"] = _rounded(times[-1] - life.arrival_s)
        first, last = (CLOCK_BASE_S + time_s for time_s in (times[0], times[-1]))
        row["tpot"] = _rounded((last - first) / (row["ntok"] - 1)) if row["ntok"] > 1 else 0
    return row


def _token_runs(token_steps: Sequence[tuple[int, int]]) -> list[int]:
    """first step, number of consecutive steps, tokens per step, …"""
    runs: list[int] = []
    for step, count in token_steps:
        if runs and runs[-3] + runs[-2] == step and runs[-1] == count:
            runs[-2] += 1
        else:
            runs += [step, 1, count]
    return runs


def _runs_by_group(groups: Sequence[Sequence[int]]) -> list[Any]:
    """Consecutive block ids as first, count, …; one list a group if there are several."""
    runs = [_id_runs(blocks) for blocks in groups]
    return runs[0] if len(runs) == 1 else runs


def _id_runs(blocks: Sequence[int]) -> list[int]:
    runs: list[int] = []
    for block in blocks:
        if runs and runs[-2] + runs[-1] == block:
            runs[-1] += 1
        else:
            runs += [block, 1]
    return runs


def _rounded(time_s: float) -> float:
    return round(time_s, 9)
