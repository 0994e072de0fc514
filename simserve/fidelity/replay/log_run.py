"""Simulates what a step log recorded: its engine's settings and requests, on any executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nextafter

from simserve.engine.admission import Admission
from simserve.engine.inbox import Inbox
from simserve.engine.loop import EngineParts, Observer
from simserve.engine.simulation import simulate
from simserve.errors import TraceError
from simserve.executor.replay import RecordEndsError, ReplayExecutor
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.replay.endings import open_ends
from simserve.fidelity.replay.plans import PlanCheck, PlanDifference
from simserve.kv.manager import PagedKVCacheManager
from simserve.metrics.recorder import RunData, RunRecorder
from simserve.protocols import Executor
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm import VllmScheduler
from simserve.types import TraceRequest
from simserve.workload.source import OpenLoop

__all__ = ["check_replay", "replay_log", "simulate_log"]

_RESERVES_FULL_ISL = {"vllm-0.11.0": False, "vllm-0.20.2": True}
"""Engines whose decisions are known, and in what they differ."""


def simulate_log(log: StepLog, executor: Executor, observer: Observer | None = None) -> RunData:
    """The logged requests, each due at its `arrival`, under the logged settings.

    Raises:
        TraceError: the decisions of the log's engine are not known.
        SimserveError: as the executor has it.
    """
    requests = sorted(log.requests, key=lambda request: request.arrival_s)
    return _simulate(log, requests, executor, observer)


def replay_log(log: StepLog, observer: Observer | None = None) -> RunData:
    """The same with the measured times of all steps; requests come at their `added` time.

    Arrival times in the result are those at which requests were due, as in `simulate_log`. Requests
    that were not over with their last token want all tokens that they asked for.

    Raises:
        TraceError: the decisions of the log's engine are not known.
        RecordEndsError: decisions differ so much that more steps are needed than there are.
    """
    added = log.added_s.tolist()
    order = sorted(range(len(added)), key=lambda i: (added[i], log.requests[i].arrival_s))
    unfinished = open_ends(log)
    requests = [
        replace(
            log.requests[i],
            arrival_s=added[i],
            output_len=log.asked_lens[i] if i in unfinished else log.requests[i].output_len,
        )
        for i in order
    ]
    executor = ReplayExecutor(log.steps.start_s, log.steps.end_s)
    data = _simulate(log, requests, executor, observer)
    for row, request_id in enumerate(data.requests.request_ids):
        data.requests.arrival_s[row] = log.requests[int(request_id)].arrival_s
    return data


def check_replay(log: StepLog) -> tuple[RunData | None, PlanDifference | None]:
    """Replay a log and compare every plan: the run, and the first plan that is not the log's.

    Without a run, more steps were needed than the log holds.

    Raises:
        TraceError: the decisions of the log's engine are not known.
    """
    plans = PlanCheck(log)
    try:
        data = replay_log(log, plans)
    except RecordEndsError:
        return None, plans.difference
    return data, plans.finish()


def _simulate(
    log: StepLog, requests: Sequence[TraceRequest], executor: Executor, observer: Observer | None
) -> RunData:
    config = log.config
    kv = PagedKVCacheManager(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    if config.policy == "priority":
        requests = _stamped(requests)
    source = OpenLoop(requests, len(requests))
    recorder = RunRecorder(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    simulate(
        EngineParts(
            workload=source,
            inbox=Inbox(source),
            scheduler=VllmScheduler(_params(log), kv),
            kv=kv,
            executor=executor,
            recorder=recorder,
            admission=Admission(config.max_model_len, kv, as_engine=True),
            max_model_len=config.max_model_len,
            observer=observer,
        )
    )
    return recorder.data()


def _stamped(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same, with arrivals that differ in the last bit where they were equal.

    A front end stamps one request after another, so that to `priority` no two came at once.
    """
    times_s = [request.arrival_s for request in requests]
    for i in range(len(times_s) - 1, 0, -1):
        times_s[i - 1] = min(times_s[i - 1], nextafter(times_s[i], 0.0))
    for i in range(1, len(times_s)):  # those at 0 cannot be earlier
        times_s[i] = max(times_s[i], nextafter(times_s[i - 1], inf))
    return [replace(r, arrival_s=time_s) for r, time_s in zip(requests, times_s, strict=True)]


def _params(log: StepLog) -> SchedulerParams:
    if log.engine not in _RESERVES_FULL_ISL:
        raise TraceError(
            f"{log.path}: engine: the decisions of {log.engine!r} are not known; those of "
            f"{' and '.join(_RESERVES_FULL_ISL)} are"
        )
    config, reserves = log.config, log.config.scheduler_reserve_full_isl
    return SchedulerParams(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.policy,
        scheduler_reserve_full_isl=(
            _RESERVES_FULL_ISL[log.engine] if reserves is None else reserves
        ),
    )
