"""Whatever arrives, no rule of bookkeeping is broken: random workloads, checked at every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.engine.inbox import Abort
from simserve.executor.drafts import MadeUpDrafter
from simserve.kv.groups import FullAttention, Group, SlidingWindow
from simserve.kv.manager import PagedKVCacheManager
from simserve.types import Kind, Request, StepOutput, StepPlan, TraceRequest
from tests.engine.rig import Log, World, build, run
from tests.engine.workloads import MAX_MODEL_LEN, limits, requests

GROUPS: list[list[Group]] = [
    [FullAttention()],
    [SlidingWindow(20)],
    [FullAttention(), SlidingWindow(20), SlidingWindow(20)],
]


class Auditor(Log):
    """A log that, as observer, checks the books after every schedule() and every update()."""

    world: World

    def __init__(self, num_requests: int) -> None:
        super().__init__()
        self.num_requests = num_requests
        self.computed: dict[str, int] = {}
        self.emitted: Counter[str] = Counter()

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        params = self.world.scheduler.params
        assert plan.total_num_tokens <= params.max_num_batched_tokens
        assert self.world.scheduler.num_running <= params.max_num_seqs
        assert len(set(plan.request_ids)) == len(plan.request_ids)
        for row in plan.scheduled:
            assert row.num_tokens > 0
            request = self.world.scheduler.requests[row.request_id]
            if row.kind in (Kind.NEW, Kind.RESUMED):
                table = self.world.kv.get_block_ids(request)
                assert tuple(map(list, row.new_blocks)) == tuple(map(list, table))
            elif row.kind is Kind.RUNNING:
                assert row.start == self.computed[row.request_id]
            self.computed[row.request_id] = row.start + row.num_tokens
        self.audit()

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None:
        for request_id, count in zip(plan.request_ids, output.num_emitted, strict=True):
            self.emitted[request_id] += count
        for request in self.world.scheduler.requests.values():
            self.computed[request.request_id] = request.num_computed_tokens
        self.audit()

    def audit(self) -> None:
        world = self.world
        scheduler, pool = world.scheduler, world.kv.pool
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        queued = {r.request_id for r in running} | {r.request_id for r in waiting}
        assert len(queued) == len(running) + len(waiting) == len(scheduler.requests)
        assert queued == set(scheduler.requests)
        check_blocks(world.kv, running, waiting)
        assert (pool.ref_counts >= 0).all()
        free = list(pool.free_queue)
        assert len(set(free)) == len(free) == world.kv.num_free_blocks
        assert 0 not in free
        used = int((pool.ref_counts[1:] > 0).sum())
        assert used + len(free) == world.kv.num_gpu_blocks - 1
        assert all(pool.ref_counts[block] == 0 for block in free)

    def stepped(self, record: Any) -> None:
        super().stepped(record)
        scheduler = self.world.scheduler
        live = scheduler.num_running + scheduler.num_waiting
        ended = len(self.finished) + len(self.aborted_s)
        assert len(self.arrived_s) == ended + live


def check_blocks(kv: PagedKVCacheManager, running: list[Request], waiting: list[Request]) -> None:
    """Reference counts are the numbers of tables that hold a block; only cached ones are shared."""
    holders: Counter[int] = Counter()
    for request in waiting:
        assert not any(kv.get_block_ids(request))
    for request in running:
        for table in kv.get_block_ids(request):
            blocks = [block for block in table if block]
            assert len(set(blocks)) == len(blocks)
            holders.update(blocks)
    for block, count in holders.items():
        assert kv.pool.ref_counts[block] == count
        if count > 1:
            assert kv.pool._keys[block] != 0
    assert int(kv.pool.ref_counts.sum()) == sum(holders.values())


def audited(workload: list[TraceRequest], **options: Any) -> World:
    log = Auditor(len(workload))
    world = build(workload, log=log, observer=log, **options)
    log.world = world
    return world.run()


def check_outcome(world: World, workload: list[TraceRequest]) -> None:
    log = world.log
    assert isinstance(log, Auditor)
    assert world.engine.status == "completed"
    assert not log.rejections
    assert len(workload) == len(log.finished) + len(log.aborted_s)
    assert world.kv.num_free_blocks == world.kv.num_gpu_blocks - 1
    for trace in workload:
        if trace.request_id in log.aborted_s:
            continue
        times = log.token_s[trace.request_id]
        assert len(times) == log.emitted[trace.request_id] == trace.output_len
        gaps = log.itl_s(trace.request_id)
        ttft_s, e2e_s = times[0] - trace.arrival_s, times[-1] - trace.arrival_s
        assert len(gaps) == trace.output_len - 1
        assert ttft_s > 0
        assert ttft_s + sum(gaps) == pytest.approx(e2e_s, rel=0, abs=1e-9)
        if log.finished[trace.request_id].num_preemptions == 0:
            assert 0 <= log.finished[trace.request_id].num_cached_tokens < trace.prompt_len


def check(workload: list[TraceRequest], **options: Any) -> None:
    first, second = audited(workload, **options), run(workload, **options)
    check_outcome(first, workload)
    assert first.log.steps == second.log.steps
    assert first.log.token_s == second.log.token_s
    assert first.state == second.state


@settings(max_examples=60)
@given(
    requests(distinct=True),
    limits(),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 11)), max_size=3),
)
def test_books_are_kept(
    workload: list[TraceRequest],
    options: dict[str, Any],
    async_scheduling: bool,
    aborts: list[tuple[float, int]],
) -> None:
    options["aborts"] = [Abort(time_s, str(i)) for time_s, i in aborts]
    check(workload, async_scheduling=async_scheduling, **options)


@settings(max_examples=25)
@given(requests(distinct=True), limits(), st.sampled_from(GROUPS), st.booleans())
def test_books_are_kept_with_several_groups(
    workload: list[TraceRequest],
    options: dict[str, Any],
    groups: list[Group],
    async_scheduling: bool,
) -> None:
    options["num_gpu_blocks"] = options["num_gpu_blocks"] * len(groups) + len(groups)
    check(workload, groups=groups, async_scheduling=async_scheduling, **options)


@settings(max_examples=40)
@given(requests(distinct=True), limits(), st.integers(1, 4), st.sampled_from(["ngram", "eagle"]))
def test_books_are_kept_with_drafts(
    workload: list[TraceRequest], options: dict[str, Any], k: int, method: str
) -> None:
    options["num_lookahead_tokens"] = k if method == "eagle" else 0
    options["drop_last_hit"] = method == "eagle"
    options["num_gpu_blocks"] += 2 * k + 2
    options["drafter"] = MadeUpDrafter(
        method=method,
        num_speculative_tokens=k,
        accepted=lambda i, so_far: (int(i) * 3 + so_far) % (k + 1),
        draft_len=lambda i, so_far: (int(i) + so_far * 2) % (k + 1),
        max_model_len=MAX_MODEL_LEN,
    )
    check(workload, **options)
