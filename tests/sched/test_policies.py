"""What every kind of scheduler keeps, on random workloads that press it for blocks and budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.registry import check_protocol, resolve
from simserve.types import Kind, StepOutput, StepPlan, TraceRequest
from tests.sched.harness import KINDS, Trail, request, simulate

SMALL = [kind for kind in KINDS if kind != "vllm"]


class Watched(Trail):
    """Checks every step as it is decided."""

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        super().scheduled(plan, now_s)
        params = self.scheduler.params
        ghosts = {i for i, kind in plan.kinds.items() if kind == Kind.GHOST}
        assert len(set(plan.request_ids)) == len(plan.request_ids)
        assert plan.total_num_tokens <= params.max_num_batched_tokens
        assert all(count >= 1 for count in plan.num_tokens)
        assert self.scheduler.num_running <= params.max_num_seqs
        assert not (set(plan.request_ids) & set(plan.preempted_ids)) - ghosts
        assert not plan.preempted_ids or Kind.NEW not in plan.kinds.values()
        if not self.scheduler.num_waiting and not plan.preempted_ids:
            assert plan.admission_stop == "empty"
        self.check_blocks()

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None:
        super().updated(plan, output, now_s)
        self.check_blocks()

    def check_blocks(self) -> None:
        """Every block is free or in a table, as often as it is counted."""
        uses: dict[int, int] = {}
        for running in self.scheduler.running:
            (table,) = self.kv.get_block_ids(running)
            assert len(table) * self.kv.block_size >= running.num_computed_tokens
            for block in table:
                uses[block] = uses.get(block, 0) + 1
        counts = self.kv.pool.ref_counts.tolist()
        assert {b: n for b, n in enumerate(counts) if n} == uses
        assert len(uses) + self.kv.num_free_blocks == self.kv.num_gpu_blocks - 1


@st.composite
def workloads(draw: st.DrawFn) -> list[TraceRequest]:
    arrivals = sorted(draw(st.lists(st.integers(0, 15), min_size=1, max_size=12)))
    rows = []
    for i, at in enumerate(arrivals):
        own = draw(st.integers(1, 16))
        shared = draw(st.sampled_from([0, 0, 4, 9]))
        parts = (("template", shared), (f"r{i}", own)) if shared else ((f"r{i}", own),)
        output = draw(st.integers(1, 7))
        rows.append(request(f"{i}", parts, output, at=at / 2, priority=draw(st.integers(0, 2))))
    return rows


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    workload=workloads(),
    num_gpu_blocks=st.integers(10, 24),
    block_size=st.sampled_from([4, 5, 8]),
    caching=st.booleans(),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 40),
)
def test_invariants(
    kind: str,
    workload: list[TraceRequest],
    num_gpu_blocks: int,
    block_size: int,
    caching: bool,
    max_num_seqs: int,
    budget: int,
) -> None:
    whole_prompts = kind in ("fcfs_static", "prefill_first")
    run = simulate(
        kind,
        workload,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        enable_prefix_caching=caching,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget + 32 if whole_prompts else budget,
        trail=Watched,
    )
    assert run.status == "completed"
    assert not run.rejected_ids
    assert sorted(i for i, _ in run.finished) == sorted(r.request_id for r in workload)
    assert run.kv.num_free_blocks == num_gpu_blocks - 1
    if kind in RULES:
        RULES[kind](run)


def _static_never_joins(run: Trail) -> None:
    ended = dict(run.finished)
    batch: list[str] = []
    for step, plan in enumerate(run.plans):
        if plan.kinds:
            preempted = {i for plan in run.plans[:step] for i in plan.preempted_ids}
            assert all(ended[i] < step or i in preempted for i in batch)
            batch = list(plan.request_ids)
            assert list(plan.kinds) == batch
        assert set(plan.request_ids) <= set(batch)


def _prefill_first_never_mixes(run: Trail) -> None:
    for plan in run.plans:
        assert len(plan.kinds) in (0, len(plan.request_ids))
        assert all(plan.samples)


def _sarathi_never_stalls(run: Trail) -> None:
    """From its first token on, a request is in every step but after a preemption."""
    ended = dict(run.finished)
    first = run.first_token
    preempted = {i for plan in run.plans for i in plan.preempted_ids}
    bound = run.scheduler.params.max_num_batched_tokens
    for step, plan in enumerate(run.plans):
        due = [i for i in first if first[i] < step <= ended[i] and i not in preempted]
        if len(due) <= bound:
            assert set(due) <= set(plan.request_ids)


def _sjf_keeps_the_bound(run: Trail) -> None:
    """Nobody is admitted before one who came r steps earlier with r tokens and still waits."""
    admitted: dict[str, int] = {}
    order: list[str] = []
    for plan in run.plans:
        for i in plan.kinds:
            if i not in admitted:
                admitted[i] = plan.step
                order.append(i)
    for place, late in enumerate(order):
        for early in order[place + 1 :]:
            assert run.added_before[late] - run.added_before[early] < run.prompt_lens[early]


RULES: dict[str, Callable[[Trail], None]] = {
    "fcfs_static": _static_never_joins,
    "prefill_first": _prefill_first_never_mixes,
    "sarathi": _sarathi_never_stalls,
    "sjf": _sjf_keeps_the_bound,
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_request_larger_than_the_pool_ends_in_a_standstill(kind: str) -> None:
    """3 usable blocks of 4 tokens, let in as the engine would: nothing loops for ever."""
    grows = simulate(kind, [request("a", 4, 20)], num_gpu_blocks=4, as_engine=True)
    assert grows.status == "deadlock"
    assert grows.scheduler.num_running == 1
    assert len(grows.steps) == 10  # 12 tokens are computed, and the 10th token does not come
    too_long = simulate(kind, [request("a", 16, 1)], num_gpu_blocks=4, as_engine=True)
    assert too_long.status == "deadlock"


@pytest.mark.parametrize("kind", SMALL)
def test_a_request_larger_than_the_pool_is_rejected(kind: str) -> None:
    run = simulate(kind, [request("a", 4, 20), request("b", 4, 2)], num_gpu_blocks=4)
    assert run.rejected_ids == ["a"]
    assert run.steps == [(["b"], [4]), (["b"], [1])]


@pytest.mark.parametrize("kind", SMALL)
def test_an_abort_frees_the_place_and_the_blocks(kind: str) -> None:
    run = simulate(kind, [request(name, 8, 9) for name in "abcd"], max_steps=2)
    for name in "ad":
        assert run.scheduler.abort(name) is not None
        assert run.scheduler.abort(name) is None
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (2, 0)
    assert run.scheduler.schedule().finished_ids == ["a", "d"]


@pytest.mark.parametrize("kind", KINDS)
def test_built_in_schedulers_have_all_methods(kind: str) -> None:
    check_protocol(resolve("schedulers", kind), "schedulers")
