"""Runs a scheduler in the engine, one second a step, and writes down what it decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from simserve.cost.formula import FormulaCost
from simserve.engine.admission import Admission
from simserve.engine.inbox import Inbox
from simserve.engine.loop import Engine, EngineParts
from simserve.executor.simulated import SimulatedExecutor
from simserve.kv.manager import PagedKVCacheManager
from simserve.protocols import StepRecord
from simserve.registry import resolve
from simserve.sched.base import BaseScheduler
from simserve.sched.params import SchedulerParams
from simserve.types import Request, StepOutput, StepPlan, TraceRequest
from simserve.workload.source import OpenLoop

KINDS = ("vllm", "fcfs_static", "prefill_first", "sarathi", "sjf")

Row = tuple[list[str], list[int]]
"""A step: ids in the order scheduled, tokens of each."""


def request(
    request_id: str, prompt: Any, output: int, at: float = 0.0, **trace: Any
) -> TraceRequest:
    """`prompt`: a number of tokens of the request's own, or segments."""
    parts = ((f"{request_id}/prompt", prompt),) if isinstance(prompt, int) else prompt
    return TraceRequest(
        request_id=request_id, arrival_s=at, prompt=parts, output_len=output, **trace
    )


@dataclass
class Trail:
    """An observer and recorder: everything a run decided."""

    scheduler: BaseScheduler
    kv: Any
    steps: list[Row] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    preempted: list[list[str]] = field(default_factory=list)
    finished: list[tuple[str, int]] = field(default_factory=list)
    """(request id, number of the step in which it ended)."""
    first_token: dict[str, int] = field(default_factory=dict)
    added_before: dict[str, int] = field(default_factory=dict)
    """Number of the step before which a request was taken in."""
    prompt_lens: dict[str, int] = field(default_factory=dict)
    rejected_ids: list[str] = field(default_factory=list)
    status: str = ""

    def arrived(self, request: TraceRequest, now_s: float) -> None:
        self.added_before[request.request_id] = len(self.plans)
        self.prompt_lens[request.request_id] = request.prompt_len

    def rejected(self, request: TraceRequest, reason: str, now_s: float) -> None:
        self.rejected_ids.append(request.request_id)

    def aborted(self, request: Request, now_s: float) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def ended(self, status: str, now_s: float, unfinished: Sequence[Request]) -> None: ...

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        self.plans.append(plan)
        self.steps.append((list(plan.request_ids), list(plan.num_tokens)))
        self.stops.append(plan.admission_stop)
        self.preempted.append(list(plan.preempted_ids))

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None:
        for request_id, count in zip(plan.request_ids, output.num_emitted, strict=True):
            if count:
                self.first_token.setdefault(request_id, plan.step)
        self.finished += [(r.request_id, plan.step) for r in output.finished]

    def reset(self, succeeded: bool, now_s: float) -> None: ...


def simulate(
    kind: str,
    requests: Sequence[TraceRequest],
    *,
    num_gpu_blocks: int = 101,
    block_size: int = 4,
    enable_prefix_caching: bool = False,
    as_engine: bool = False,
    max_steps: int = 5000,
    kv: Any = None,
    trail: type[Trail] = Trail,
    **params: Any,
) -> Trail:
    """Run to the end. `params` are those of `SchedulerParams`."""
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 3, "max_model_len": 32} | params
    kv = kv or PagedKVCacheManager(
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=limits["max_model_len"],
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = resolve("schedulers", kind)(SchedulerParams(**limits), kv)
    record = trail(scheduler, kv)
    source = OpenLoop(requests)
    parts = EngineParts(
        workload=source,
        inbox=Inbox(source),
        scheduler=scheduler,
        kv=kv,
        executor=SimulatedExecutor(FormulaCost(1.0)),
        recorder=record,
        admission=Admission(limits["max_model_len"], kv, as_engine=as_engine),
        max_model_len=limits["max_model_len"],
        max_steps=max_steps,
        observer=record,
    )
    engine = Engine(simpy.Environment(), parts)
    engine.env.run(engine.process)
    record.status = engine.status
    return record


def assert_only(
    kind: str, expected: list[Row], requests: Sequence[TraceRequest], **run: Any
) -> None:
    """`kind` decides just as written, and no other kind does, under the limits nearest to these."""
    assert simulate(kind, requests, **run).steps == expected
    run.pop("options", None)
    for other in KINDS:
        if other != kind:
            limits = run | _needs(other, run)
            assert simulate(other, requests, **limits).steps != expected, other


def _needs(kind: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """What a kind insists on."""
    if kind == "sarathi":
        return {"enable_chunked_prefill": True}
    whole_prompts = kind in ("fcfs_static", "prefill_first")
    if whole_prompts or not run.get("enable_chunked_prefill", True):
        return {"max_num_batched_tokens": 32, "long_prefill_token_threshold": 0}
    return {}
