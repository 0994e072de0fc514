"""Requests that decode in step: who is in, and that a step of theirs is what the walk decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.kv.manager import PagedKVCacheManager
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm import VllmScheduler
from simserve.segments import total_len
from simserve.types import Pace, Request, StepOutput, StepPlan, StepResult, TraceRequest
from tests.engine.rig import cached_keys
from tests.engine.workloads import MAX_MODEL_LEN, limits, requests
from tests.kv.naive import cut
from tests.sched.harness import request


def scheduler(kind: type[VllmScheduler] = VllmScheduler, **options: Any) -> VllmScheduler:
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 64} | options
    blocks = {"num_gpu_blocks": limits.pop("num_gpu_blocks", 101), "block_size": 4}
    kv = PagedKVCacheManager(
        **blocks,
        max_model_len=limits["max_model_len"],
        enable_prefix_caching=limits.pop("enable_prefix_caching", True),
    )
    return kind(SchedulerParams(**limits), kv)


def take_in(sched: VllmScheduler, *traces: TraceRequest) -> list[Request]:
    taken = [Request(trace, sched.params.max_model_len) for trace in traces]
    for one in taken:
        sched.add_request(one)
    return taken


def step(sched: VllmScheduler) -> tuple[StepPlan, StepOutput]:
    """A step after which every request that samples has one token more."""
    plan = sched.schedule()
    return plan, sched.update(plan, StepResult([0.0], {}, [int(s) for s in plan.samples]))


def members(sched: VllmScheduler) -> list[str]:
    """Those whose counts follow the pace; they are the first of the running list."""
    assert sched.cohort is not None
    inside = [r.request_id for r in sched.running if r._pace is not None]
    assert inside == [r.request_id for r in sched.running[: len(sched.cohort)]]
    return inside


class Walking(VllmScheduler):
    """Asks every request in every step."""

    def __init__(self, params: SchedulerParams, kv: Any) -> None:
        super().__init__(params, kv)
        self.cohort = None


# -- the common pace -------------------------------------------------------------------------------


def test_counts_follow_the_pace_and_stay_when_it_is_left() -> None:
    pace = Pace()
    pace.scheduled, pace.updated, pace.placeholders = 7, 6, 1
    one = Request(request("a", 10, 20), 64)
    one.num_computed_tokens, one.num_tokens, one.num_output_placeholders = 10, 11, 1
    assert one.join(pace) == 3
    assert (one.num_computed_tokens, one.num_tokens) == (10, 11)
    pace.scheduled += 5
    pace.updated += 4
    pace.placeholders += 1
    assert (one.num_computed_tokens, one.num_tokens, one.num_output_tokens) == (15, 15, 5)
    assert one.num_output_placeholders == 2
    one.num_tokens += 1
    one.num_computed_tokens -= 2
    one.num_output_placeholders -= 2
    assert (one.num_computed_tokens, one.num_tokens) == (13, 16)
    one.leave()
    one.leave()
    pace.scheduled += 1
    pace.updated += 1
    pace.placeholders += 1
    assert (one.num_computed_tokens, one.num_tokens) == (13, 16)
    assert one.num_output_placeholders == 0


# -- who is in -------------------------------------------------------------------------------------


def test_those_that_decode_at_the_front_are_in() -> None:
    """Budget 32: a and b are whole, c takes 14 of its 40 tokens, then more; d waits behind c."""
    sched = scheduler()
    take_in(sched, request("a", 10, 9), request("b", 8, 9), request("c", 40, 9), request("d", 4, 9))
    step(sched)
    assert members(sched) == []
    step(sched)
    assert members(sched) == ["a", "b"]
    assert [r.request_id for r in sched.running] == ["a", "b", "c", "d"]
    step(sched)
    assert members(sched) == ["a", "b", "c", "d"]


def test_one_that_ends_leaves_the_others_in() -> None:
    sched = scheduler()
    a, b, c = take_in(sched, request("a", 4, 9), request("b", 4, 3), request("c", 4, 9))
    ended = [[r.request_id for r in step(sched)[1].finished] for _ in range(3)]
    assert ended == [[], [], ["b"]]
    assert members(sched) == ["a", "c"]
    assert b.finish_reason == "length"
    assert [r.num_output_tokens for r in (a, b, c)] == [3, 3, 3]
    plan, _ = step(sched)
    assert (plan.request_ids, plan.starts, plan.finished_ids) == (["a", "c"], [6, 6], ["b"])


def test_several_that_end_at_once_end_in_the_order_of_the_running_list() -> None:
    """Their blocks join the free queue in that order: it decides who is evicted."""
    sched = scheduler()
    take_in(sched, *[request(name, 4, 3) for name in "cab"])
    step(sched)
    step(sched)
    _, output = step(sched)
    assert [r.request_id for r in output.finished] == ["c", "a", "b"]
    assert sched.num_running == 0


def test_a_plan_of_theirs_is_complete() -> None:
    """Blocks of four: a and b need one with token 9 and 10."""
    sched = scheduler()
    take_in(sched, request("a", 8, 9), request("b", 7, 9))
    step(sched)
    plan, _ = step(sched)
    assert plan.request_ids == ["a", "b"]
    assert (plan.starts, plan.num_tokens, plan.samples) == ([8, 7], [1, 1], [True, True])
    assert {i: [list(g) for g in groups] for i, groups in plan.new_blocks.items()} == {"a": [[5]]}
    plan, _ = step(sched)
    assert {i: [list(g) for g in groups] for i, groups in plan.new_blocks.items()} == {"b": [[6]]}
    assert (plan.starts, plan.admission_stop) == ([9, 8], "empty")


@pytest.mark.parametrize("when", ["scheduled", "updated"])
def test_an_abort_or_a_preemption_breaks_it_up_and_it_forms_again(when: str) -> None:
    sched = scheduler()
    a, b, c = take_in(sched, *[request(name, 4, 30) for name in "abc"])
    step(sched)
    plan = sched.schedule()
    assert members(sched) == ["a", "b", "c"]
    if when == "updated":
        sched.update(plan, StepResult([0.0], {}, [1, 1, 1]))
    assert sched.abort("b") is b
    assert members(sched) == []
    if when == "scheduled":
        output = sched.update(plan, StepResult([0.0], {}, [1, 1, 1]))
        assert output.num_emitted == [1, 0, 1]
    assert [(r.num_computed_tokens, r.num_tokens) for r in (a, c)] == [(5, 6)] * 2
    step(sched)
    assert members(sched) == ["a", "c"]
    assert [(r.num_computed_tokens, r.num_tokens) for r in (a, c)] == [(6, 7)] * 2


def test_too_few_blocks_preempt_the_last_one() -> None:
    """Four blocks of four; both need a third one with token 9: a gets b's."""
    sched = scheduler(num_gpu_blocks=5, enable_prefix_caching=False)
    a, b = take_in(sched, request("a", 7, 9), request("b", 7, 9))
    step(sched)
    step(sched)
    assert members(sched) == ["a", "b"]
    plan, _ = step(sched)
    assert (plan.request_ids, plan.preempted_ids) == (["a"], ["b"])
    assert members(sched) == []
    assert (a.num_computed_tokens, b.num_computed_tokens, b.num_tokens) == (9, 0, 9)
    step(sched)
    assert members(sched) == ["a"]


def test_a_budget_smaller_than_the_cohort_is_kept() -> None:
    """Eight decode, and the budget is five: the walk gives the first five one each."""
    sched = scheduler(max_num_batched_tokens=5)
    take_in(sched, *[request(str(i), 1, 30) for i in range(8)])
    for _ in range(6):
        plan, _ = step(sched)
        assert plan.total_num_tokens <= 5
    assert plan.request_ids == list("01234")


def test_drafts_end_it_for_good() -> None:
    sched = scheduler()
    take_in(sched, request("a", 4, 30))
    step(sched)
    plan = sched.schedule()
    assert members(sched) == ["a"]
    sched.update(plan, StepResult([0.0], {}, [1], draft_tokens={"a": [7, 7]}))
    assert sched.cohort is None
    plan = sched.schedule()
    assert (plan.num_tokens, plan.draft_tokens) == ([3], {"a": [7, 7]})


def test_a_step_that_yields_nothing_for_one_breaks_it_up() -> None:
    sched = scheduler()
    a, b = take_in(sched, request("a", 4, 30), request("b", 4, 30))
    step(sched)
    plan = sched.schedule()
    output = sched.update(plan, StepResult([0.0], {}, [1, 0]))
    assert output.num_emitted == [1, 0]
    assert members(sched) == []
    assert (a.num_tokens, b.num_tokens) == (6, 5)


def next_turn(
    of: TraceRequest, request_id: str, longest: int, rng: np.random.Generator
) -> TraceRequest:
    """Repeats what one that still decodes says, as far as it fits, and some of its own."""
    parts = cut(of.prompt + of.output_parts, int(rng.integers(1, longest - 2)))
    return replace(
        of,
        request_id=request_id,
        prompt=(*parts, (request_id, 1)),
        output_len=int(rng.integers(1, longest - total_len(parts))),
        output=None,
    )


# -- it decides what the walk decides --------------------------------------------------------------


@settings(max_examples=60)
@given(requests(), limits(), st.integers(0, 1 << 30))
def test_it_decides_as_the_walk(
    workload: list[TraceRequest], options: dict[str, Any], seed: int
) -> None:
    """Step by step, with requests that come, are ended early, and are looked up meanwhile."""
    rng = np.random.default_rng(seed)
    del options["cost"]
    pool = {
        key: options.pop(key) for key in ("num_gpu_blocks", "block_size", "enable_prefix_caching")
    }
    params = SchedulerParams(
        **{"max_num_batched_tokens": 2048, "max_num_seqs": 128, "max_model_len": MAX_MODEL_LEN}
        | options
    )
    pools = [PagedKVCacheManager(**pool, max_model_len=MAX_MODEL_LEN) for _ in range(2)]
    both = [VllmScheduler(params, pools[0]), Walking(params, pools[1])]
    usable = pool["block_size"] * (pool["num_gpu_blocks"] - 1)
    longest = min(usable, MAX_MODEL_LEN)
    coming = [t for t in workload if t.prompt_len + t.output_len <= longest]
    num_turns = 0
    for _ in range(250):
        if both[0].running and num_turns < 20 and rng.random() < 0.2:
            num_turns += 1
            coming.append(next_turn(both[0].running[0].trace, f"turn {num_turns}", longest, rng))
        if coming and rng.random() < 0.3:
            trace = coming.pop()
            for sched in both:
                take_in(sched, trace)
        if both[0].requests and rng.random() < 0.03:
            request_id = str(rng.choice(sorted(both[0].requests)))
            assert [sched.abort(request_id) is not None for sched in both] == [True, True]
        (plan, output), (expected, walked) = step(both[0]), step(both[1])
        assert plan == expected
        assert output.num_emitted == walked.num_emitted
        assert [r.request_id for r in output.finished] == [r.request_id for r in walked.finished]
        assert list(pools[0].pool.free_queue) == list(pools[1].pool.free_queue)
        for one, other in zip(both[0].running, both[1].running, strict=True):
            assert one.request_id == other.request_id
            assert one.num_computed_tokens == other.num_computed_tokens
            assert one.num_tokens == other.num_tokens
        if rng.random() < 0.1:
            assert cached_keys(pools[0]) == cached_keys(pools[1])
        if not coming and not both[0].requests:
            break
    assert cached_keys(pools[0]) == cached_keys(pools[1])
