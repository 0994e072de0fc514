"""Serves requests on a tiny model by hand-built parts, and keeps the tokens that each one gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("torch")

from simserve.engine.admission import Admission
from simserve.engine.inbox import Inbox
from simserve.engine.loop import EngineParts
from simserve.engine.simulation import simulate
from simserve.executor.real.attention import AttentionPath
from simserve.executor.real.decoder_shape import DecoderShape
from simserve.executor.real.executor import RealExecutor
from simserve.executor.real.kernels import Kernels
from simserve.executor.real.machine import Machine, MachineOptions
from simserve.executor.real.pace import Pace, TimedScheduler
from simserve.kv.manager import PagedKVCacheManager
from simserve.metrics.recorder import RunData, RunRecorder
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm import VllmScheduler
from simserve.sched.vllm_async import VllmAsyncScheduler
from simserve.types import StepResult, StepRun, TraceRequest
from simserve.workload.source import OpenLoop

__all__ = ["Schedule", "Watched", "open_machine", "request", "serve"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that decides which tokens are computed when, and where they are kept."""

    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    threshold: int = 0
    chunked: bool = True
    caching: bool = True
    block_size: int = 16
    num_gpu_blocks: int = 64
    max_model_len: int = 64
    mixed: Literal["varlen", "split"] = "varlen"
    attention: Literal["auto", "v1", "v2", "article"] = "auto"
    kv_layout: Literal["nhd", "packed"] = "nhd"
    policy: Literal["fcfs", "priority"] = "fcfs"
    lookahead: int = 0
    """Slots ahead of running requests."""
    plans_ahead: bool = False
    """Asynchronous scheduling."""


class Watched(RealExecutor):
    """Looks at every running request's row after each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: dict[str, np.ndarray[Any, Any]] = {}

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        result = super().submit(run, start_s)
        ids = self.rows.ids.cpu().numpy()
        self.seen |= {name: ids[row].copy() for name, row in self.rows.of.items()}
        return result


def request(name: str, arrival_s: float, prompt: Any, output_len: int, **more: Any) -> TraceRequest:
    """`prompt`: a number of tokens of the request's own, or segments."""
    parts = ((f"{name}/prompt", prompt),) if isinstance(prompt, int) else tuple(prompt)
    return TraceRequest(
        request_id=name, arrival_s=arrival_s, prompt=parts, output_len=output_len, **more
    )


def open_machine(
    shape: DecoderShape,
    schedule: Schedule,
    *,
    device: Literal["cuda", "cpu"] = "cpu",
    dtype: str = "float64",
    replays: bool = False,
    kernels: Kernels | None = None,
    **more: Any,
) -> Machine:
    """A machine for one schedule, its KV cache full of NaN."""
    options: dict[str, Any] = {
        "device": device,
        "path": AttentionPath(schedule.attention, schedule.kv_layout, schedule.mixed),
        "replays": replays,
        "dtype": dtype,
        "kv_dtype": "auto",
        "block_size": schedule.block_size,
        "num_gpu_blocks": schedule.num_gpu_blocks,
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": schedule.max_num_seqs,
        "max_num_batched_tokens": schedule.max_num_batched_tokens,
        "max_model_len": schedule.max_model_len,
    } | more
    machine = Machine(shape, MachineOptions(**options), kernels)
    for caches in (*machine.caches, *(machine.draft.caches if machine.draft else ())):
        for cache in caches:
            cache.fill_(float("nan"))
    return machine


def serve(
    machine: Machine, schedule: Schedule, requests: Sequence[TraceRequest], **options: Any
) -> tuple[dict[str, list[int]], RunData]:
    """Run all requests to their end; the tokens that each was given, and what was recorded."""
    kv = PagedKVCacheManager(
        num_gpu_blocks=schedule.num_gpu_blocks,
        block_size=schedule.block_size,
        max_model_len=schedule.max_model_len,
        enable_prefix_caching=schedule.caching,
    )
    params = SchedulerParams(
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        max_num_seqs=schedule.max_num_seqs,
        max_model_len=schedule.max_model_len,
        long_prefill_token_threshold=schedule.threshold,
        enable_chunked_prefill=schedule.chunked,
        policy=schedule.policy,
        num_lookahead_tokens=schedule.lookahead,
        quirks="fixed",
    )
    scheduler_class = VllmAsyncScheduler if schedule.plans_ahead else VllmScheduler
    scheduler = TimedScheduler(scheduler_class(params, kv))
    executor = Watched(machine, scheduler, Pace("virtual"), **options)
    source = OpenLoop(list(requests), len(requests))
    recorder = RunRecorder(num_gpu_blocks=kv.num_gpu_blocks, block_size=kv.block_size)
    parts = EngineParts(
        workload=source,
        inbox=Inbox(source),
        scheduler=scheduler,
        kv=kv,
        executor=executor,
        recorder=recorder,
        admission=Admission(schedule.max_model_len, kv, as_engine=False),
        max_model_len=schedule.max_model_len,
    )
    outcome = simulate(parts, async_scheduling=schedule.plans_ahead)
    assert outcome.status == "completed", outcome.complaint
    tokens = {
        one.request_id: executor.seen[one.request_id][one.prompt_len :][: one.output_len].tolist()
        for one in requests
    }
    return tokens, recorder.data()
