"""A simulation put together by hand, and a recorder that expands everything to single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import simpy

from simserve.cost.formula import FormulaCost
from simserve.engine.admission import Admission
from simserve.engine.inbox import Abort, Inbox, Reset
from simserve.engine.loop import Engine, EngineParts
from simserve.engine.loop_async import AsyncEngine
from simserve.executor.simulated import SimulatedExecutor
from simserve.kv.groups import FullAttention, Group
from simserve.kv.identity import Stretch
from simserve.kv.manager import PagedKVCacheManager
from simserve.protocols import StepRecord
from simserve.sched.params import SchedulerParams
from simserve.sched.steady import DecodesInStep
from simserve.sched.vllm import VllmScheduler
from simserve.sched.vllm_async import VllmAsyncScheduler
from simserve.types import Lookups, Request, StepOutput, StepPlan, TraceRequest
from simserve.workload.source import OpenLoop

__all__ = [
    "GappedCost",
    "Log",
    "Step",
    "World",
    "build",
    "cached_keys",
    "request",
    "run",
    "state_of",
]

ONE_SECOND = FormulaCost(1.0)
"""Every step takes a second."""


class GappedCost(FormulaCost):
    """Besides, the loop takes time between steps and to take in a request."""

    def __init__(
        self, base_s: float, after_request_s: float, take_in_s: float, first_s: float = 0.0
    ) -> None:
        super().__init__(base_s)
        self._after_request_s = after_request_s
        self._take_in_s = take_in_s
        self._first_s = first_s

    def after_step_s(self, plan: StepPlan) -> float:
        return self._after_request_s * len(plan.request_ids)

    def take_in_s(self, request: TraceRequest, first: bool) -> float:
        return self._take_in_s + self._first_s * first


def request(
    request_id: str, arrival_s: float, prompt: Any, output_len: int, **more: Any
) -> TraceRequest:
    """`prompt`: a number of tokens of the request's own, or segments."""
    parts = ((f"{request_id}/prompt", prompt),) if isinstance(prompt, int) else prompt
    return TraceRequest(
        request_id=request_id, arrival_s=arrival_s, prompt=parts, output_len=output_len, **more
    )


@dataclass(frozen=True)
class Step:
    """One schedule() call and its update."""

    start_s: float
    end_s: float
    ids: tuple[str, ...]
    starts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    emitted: tuple[int, ...]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_evicted_blocks: int
    lookups: Lookups
    admission_stop: str
    plan: StepPlan = field(compare=False, repr=False)

    @property
    def shares(self) -> dict[str, int]:
        """Tokens by request."""
        return dict(zip(self.ids, self.num_tokens, strict=True))


class Log:
    """A recorder that writes everything down, a row a step and a row a token."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.arrived_s: dict[str, float] = {}
        self.rejections: dict[str, str] = {}
        self.aborted_s: dict[str, float] = {}
        self.finished: dict[str, Request] = {}
        self.token_s: dict[str, list[float]] = {}

    def arrived(self, request: TraceRequest, now_s: float) -> None:
        self.arrived_s[request.request_id] = now_s

    def rejected(self, request: TraceRequest, reason: str, now_s: float) -> None:
        self.rejections[request.request_id] = reason

    def aborted(self, request: Request, now_s: float) -> None:
        self.aborted_s[request.request_id] = now_s

    def stepped(self, record: StepRecord) -> None:
        plan, count = record.run
        start_s = record.start_s
        emitted = tuple(int(n) for n in record.output.num_emitted)
        for k, end_s in enumerate(record.result.ends_s):
            starts = tuple(
                start + k * n for start, n in zip(plan.starts, plan.num_tokens, strict=True)
            )
            self.steps.append(
                Step(
                    start_s,
                    end_s,
                    tuple(plan.request_ids),
                    starts,
                    tuple(plan.num_tokens),
                    emitted,
                    record.num_running,
                    record.num_waiting,
                    int(record.num_free_blocks[k]),
                    int(record.num_evicted_blocks[k]),
                    plan.lookups,
                    plan.admission_stop,
                    plan,
                )
            )
            for request_id, tokens in zip(plan.request_ids, emitted, strict=True):
                self.token_s.setdefault(request_id, []).extend([end_s] * tokens)
            start_s = end_s + record.result.gap_s
        assert len(record.num_free_blocks) == len(record.num_evicted_blocks) == count
        assert len(record.result.ends_s) == count
        for ended in record.output.finished:
            self.finished[ended.request_id] = ended

    def ended(self, status: str, now_s: float, unfinished: Sequence[Request]) -> None: ...

    # Also an observer, for runs that must see every single step.

    def scheduled(self, plan: StepPlan, now_s: float) -> None: ...

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None: ...

    def reset(self, succeeded: bool, now_s: float) -> None: ...

    def shares(self) -> list[dict[str, int]]:
        """Tokens by request, step by step."""
        return [step.shares for step in self.steps]

    def ttft_s(self, request_id: str) -> float:
        """From the engine taking a request in to its first token; arrivals here are punctual."""
        return self.token_s[request_id][0] - self.arrived_s[request_id]

    def itl_s(self, request_id: str) -> list[float]:
        """Gaps between the tokens of a request."""
        return [b - a for a, b in pairwise(self.token_s[request_id])]


@dataclass
class World:
    """Everything of one simulation."""

    engine: Engine
    scheduler: DecodesInStep
    kv: PagedKVCacheManager
    log: Log

    def run(self) -> World:
        """To the end."""
        self.engine.env.run(self.engine.process)
        return self

    @property
    def state(self) -> tuple[Any, ...]:
        """What must not depend on how the engine got here."""
        return state_of(self.kv)


def state_of(kv: PagedKVCacheManager) -> tuple[Any, ...]:
    """Which blocks are free, referenced, cached and evicted."""
    pool = kv.pool
    return (
        list(pool.free_queue),
        pool.ref_counts.tolist(),
        kv.num_cached_keys,
        pool.evicted_cached_blocks,
        cached_keys(kv),
    )


_paths: dict[Any, int] = {}
"""A number for every identity path ever seen, so that worlds can be compared."""


def cached_keys(kv: PagedKVCacheManager) -> dict[tuple[int, int, int], list[int]]:
    """The blocks under every identity (path, group, index), oldest first."""
    assert kv.num_cached_keys >= 0, "what waits to be committed is, by looking"
    found = {}
    stack: list[tuple[int, Any, Stretch]] = [(0, key, s) for key, s in kv._trie._roots.items()]
    while stack:
        above, key, stretch = stack.pop()
        path = _paths.setdefault((above, key), len(_paths) + 1)
        stack += [(path, below, child) for below, child in (stretch.children or {}).items()]
        for group, named in enumerate(stretch.cached):
            for index in range(len(named)):
                if left := kv.pool._left(stretch, group, index):
                    found[path, group, index] = left
    return found


def build(
    requests: Sequence[TraceRequest] = (),
    *,
    num_gpu_blocks: int = 1001,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
    groups: Sequence[Group] = (FullAttention(),),
    drop_last_hit: bool = False,
    cost: Any = ONE_SECOND,
    drafter: Any = None,
    workload: Any = None,
    aborts: Sequence[Abort] = (),
    resets: Sequence[Reset] = (),
    admit_as_engine: bool = False,
    async_scheduling: bool = False,
    scheduler_class: type[DecodesInStep] | None = None,
    leap: bool = False,
    max_steps: int | None = None,
    log: Log | None = None,
    observer: Any = None,
    **params: Any,
) -> World:
    """A world that has not begun. `params` are those of `SchedulerParams`."""
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "max_model_len": 8192, **params}
    kv = PagedKVCacheManager(
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=limits["max_model_len"],
        enable_prefix_caching=enable_prefix_caching,
        groups=groups,
        drop_last_hit=drop_last_hit,
    )
    if scheduler_class is None:
        scheduler_class = VllmAsyncScheduler if async_scheduling else VllmScheduler
    scheduler = scheduler_class(SchedulerParams(**limits), kv)
    log = log or Log()
    source = workload or OpenLoop(requests)
    parts = EngineParts(
        workload=source,
        inbox=Inbox(source, aborts, resets),
        scheduler=scheduler,
        kv=kv,
        executor=SimulatedExecutor(cost, drafter, plans_ahead=async_scheduling),
        recorder=log,
        admission=Admission(limits["max_model_len"], kv, as_engine=admit_as_engine),
        max_model_len=limits["max_model_len"],
        leap=leap,
        max_steps=max_steps,
        observer=observer,
    )
    engine = (AsyncEngine if async_scheduling else Engine)(simpy.Environment(), parts)
    return World(engine, scheduler, kv, log)


def run(requests: Sequence[TraceRequest] = (), **options: Any) -> World:
    """A world that has ended."""
    return build(requests, **options).run()
