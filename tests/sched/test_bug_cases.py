"""Faults that schedulers and KV caches elsewhere had, each with the values that are right here.

Where the recorded engine itself has the fault, both answers are tested: `quirks: as_engine`, which
reproduces it, and `quirks: fixed`. Every step takes one second unless said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simserve.kv.manager import PagedKVCacheManager
from simserve.sched.queues import FcfsQueue, PriorityQueue
from simserve.types import Kind, Request, TraceRequest
from tests.engine.rig import Step, World, build, cached_keys, request, run

QUIRKS = ("as_engine", "fixed")


def manager(num_gpu_blocks: int, **options: Any) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        num_gpu_blocks=num_gpu_blocks, block_size=16, max_model_len=8192, **options
    )


def live(trace: TraceRequest) -> Request:
    return Request(trace, 8192)


def snapshot(kv: PagedKVCacheManager, *requests: Request) -> tuple[Any, ...]:
    tables = [[list(table) for table in kv.get_block_ids(r)] for r in requests]
    counts = kv.pool.ref_counts.tolist()
    return list(kv.pool.free_queue), counts, cached_keys(kv), kv.evicted_cached_blocks, tables


# -- requests that can never run -------------------------------------------------------------------


def test_a_request_larger_than_the_pool_is_rejected_and_the_next_completes() -> None:
    # 49 usable blocks of 16 = 784 tokens; 1,002 can never be held.
    world = run([request("big", 0.0, 1002, 4), request("small", 0.0, 10, 4)], num_gpu_blocks=50)
    assert "49 usable blocks of 16 tokens" in world.log.rejections["big"]
    assert world.engine.status == "completed"
    assert world.log.token_s == {"small": [1.0, 2.0, 3.0, 4.0]}


def test_as_engine_a_request_larger_than_the_pool_hangs_all_behind_it() -> None:
    world = run(
        [request("big", 0.0, 1002, 4), request("small", 0.0, 10, 4)],
        num_gpu_blocks=50,
        admit_as_engine=True,
    )
    assert world.engine.status == "deadlock"
    assert [r.request_id for r in world.scheduler.unfinished()] == ["big", "small"]


@pytest.mark.parametrize(
    ("prompt_len", "output_len", "fits"),
    [(144, 1, True), (145, 1, False), (140, 5, True), (140, 6, False)],
)
def test_block_0_is_reserved_and_the_last_token_needs_no_slot(
    prompt_len: int, output_len: int, fits: bool
) -> None:
    # 10 blocks with the null block: 9 usable, 144 tokens.
    world = run([request("a", 0.0, prompt_len, output_len)], num_gpu_blocks=10)
    assert world.engine.status == "completed"
    assert ("a" in world.log.finished) == fits
    assert ("9 usable blocks" in world.log.rejections.get("a", "")) == (not fits)


def test_a_prompt_beyond_the_budget_without_chunking_ends_as_a_deadlock() -> None:
    # Configurations that allow it are refused; by hand it must end, not run for ever.
    world = run(
        [request("a", 0.0, 600, 1)], max_num_batched_tokens=512, enable_chunked_prefill=False
    )
    assert world.engine.status == "deadlock"
    assert [r.request_id for r in world.scheduler.unfinished()] == ["a"]


# -- budget, threshold, max_num_seqs ---------------------------------------------------------------


@pytest.mark.parametrize(("quirks", "chunks"), [("as_engine", [8, 8, 4]), ("fixed", [20])])
def test_without_chunking_no_prompt_is_cut_by_the_threshold(quirks: str, chunks: list[int]) -> None:
    world = run(
        [request("a", 0.0, 20, 1)],
        max_num_batched_tokens=32,
        max_model_len=32,
        long_prefill_token_threshold=8,
        enable_chunked_prefill=False,
        quirks=quirks,
    )
    assert [step.num_tokens for step in world.log.steps] == [(n,) for n in chunks]


def test_a_threshold_above_the_budget_changes_nothing() -> None:
    requests = [request("a", 0.0, 100, 3), request("b", 0.5, 40, 3)]
    without, beyond = (
        run(requests, max_num_batched_tokens=32, long_prefill_token_threshold=threshold)
        for threshold in (0, 64)
    )
    assert without.log.shares() == beyond.log.shares()


def test_the_threshold_caps_each_request_in_a_step() -> None:
    world = run(
        [request("long", 0.0, 100, 2), request("short", 0.0, 10, 3)],
        max_num_batched_tokens=32,
        long_prefill_token_threshold=8,
    )
    shares = world.log.shares()
    assert shares[:3] == [
        {"long": 8, "short": 8},
        {"long": 8, "short": 2},
        {"long": 8, "short": 1},
    ]
    assert world.log.token_s["short"][0] == 2.0
    assert world.log.token_s["long"][0] == 13.0  # 12 chunks of 8 and one of 4


def test_the_budget_that_remains_is_used_up() -> None:
    world = run(
        [request("a", 0.0, 4, 1), request("b", 0.0, 8, 1)], block_size=4, max_num_batched_tokens=8
    )
    assert world.log.shares() == [{"a": 4, "b": 4}, {"b": 4}]


def test_without_chunking_a_prompt_waits_for_a_budget_that_holds_it() -> None:
    world = run(
        [request("a", 0.0, 40, 1), request("b", 0.0, 40, 1)],
        max_num_batched_tokens=64,
        max_model_len=64,
        enable_chunked_prefill=False,
    )
    assert world.log.shares() == [{"a": 40}, {"b": 40}]


def test_max_num_seqs_counts_all_that_run() -> None:
    world = run(
        [request(name, 0.0, 8, n) for name, n in zip("abc", (3, 5, 2), strict=True)], max_num_seqs=2
    )
    assert max(step.num_running for step in world.log.steps) == 2
    # The third comes in when the first has left, not earlier.
    assert [step.start_s for step in world.log.steps if "c" in step.ids] == [3.0, 4.0]


def test_a_single_slot_passes_on_without_another_arrival() -> None:
    world = run([request("a", 0.0, 16, 1), request("b", 0.1, 16, 1)], max_num_seqs=1)
    assert world.log.token_s == {"a": [1.0], "b": [2.0]}


# -- preemption ------------------------------------------------------------------------------------


def test_two_requests_in_a_pool_for_one_both_finish_and_the_older_never_waits() -> None:
    # 9 usable blocks, each wants 8.
    world = run([request("a", 0.0, 64, 64), request("b", 0.0, 64, 64)], num_gpu_blocks=10)
    assert world.engine.status == "completed"
    assert set(world.log.itl_s("a")) == {1.0}
    assert world.log.finished["a"].num_preemptions == 0
    assert world.log.finished["b"].num_preemptions == 1
    assert world.kv.num_free_blocks == 9


def three_of_priorities(quirks: str) -> World:
    """`low` prefills in chunks of 4; then `mid`, after it in the list, finds no block at t = 11."""
    return run(
        [
            request("low", 0.0, 60, 2, priority=9),
            request("mid", 0.5, 4, 12, priority=1),
            request("high", 1.5, 40, 2, priority=0),
        ],
        block_size=4,
        num_gpu_blocks=18,
        policy="priority",
        enable_prefix_caching=False,
        max_num_batched_tokens=6,
        long_prefill_token_threshold=4,
        quirks=quirks,
    )


def preempting(world: World) -> Step:
    step = next(step for step in world.log.steps if step.plan.preempted_ids)
    assert step.plan.preempted_ids == ["low"]
    assert step.start_s == 11.0
    return step


def test_as_engine_a_victim_scheduled_in_the_same_step_stays_as_a_ghost() -> None:
    step = preempting(three_of_priorities("as_engine"))
    # It holds no blocks and yields nothing, but its tokens count; the one after `mid` is skipped.
    assert step.shares == {"low": 4, "mid": 1}
    assert step.plan.kinds == {"low": Kind.GHOST}
    assert step.starts[0] == 0
    assert "low" not in step.plan.new_blocks
    assert step.emitted == (0, 1)
    assert step.num_running == 2


def test_fixed_a_victims_tokens_and_budget_are_given_back_and_nobody_is_skipped() -> None:
    step = preempting(three_of_priorities("fixed"))
    # Of the budget of 6 `mid` takes 1: a whole chunk is left for `high`.
    assert step.shares == {"mid": 1, "high": 4}
    assert step.plan.kinds == {}


def test_fixed_what_a_victim_would_have_computed_is_not_found_in_the_cache() -> None:
    world = run(
        [request("low", 0.0, 47, 3, priority=5), request("high", 0.5, 4, 6, priority=0)],
        block_size=2,
        num_gpu_blocks=29,
        policy="priority",
        max_num_batched_tokens=64,
        long_prefill_token_threshold=7,
        quirks="fixed",
    )
    assert world.log.finished["low"].num_preemptions == 1
    steps = [step for step in world.log.steps if "low" in step.shares]
    # It was taken out of the step that would have computed its tokens 42 to 46.
    assert [step.starts[list(step.shares).index("low")] for step in steps][5:] == [35, 42, 47, 48]


@pytest.mark.parametrize("quirks", QUIRKS)
def test_everybody_finishes_under_both_quirks(quirks: str) -> None:
    world = three_of_priorities(quirks)
    assert world.engine.status == "completed"
    assert {name: len(times) for name, times in world.log.token_s.items()} == {
        "low": 2,
        "mid": 12,
        "high": 2,
    }


def test_a_preempted_request_goes_before_later_arrivals() -> None:
    first, second, third = (
        live(request(name, t, 4, 4)) for name, t in zip("abc", (0, 1, 2), strict=True)
    )
    fcfs, priority = FcfsQueue(), PriorityQueue()
    for queue in (fcfs, priority):
        queue.add(third)
        queue.put_back(second)
        queue.put_back(first)
        assert [r.request_id for r in queue] == ["a", "b", "c"]
    # By priority and arrival an earlier waiter keeps its place; first come, first served puts the
    # one preempted last in front.
    fcfs, priority = FcfsQueue(), PriorityQueue()
    for queue in (fcfs, priority):
        queue.add(first)
        queue.put_back(second)
    assert [r.request_id for r in fcfs] == ["b", "a"]
    assert [r.request_id for r in priority] == ["a", "b"]


def test_priority_orders_the_queue_and_does_not_preempt_for_a_slot() -> None:
    world = run(
        [
            request("low", 0.0, 4, 5, priority=5),
            request("low2", 0.5, 4, 2, priority=5),
            request("high", 1.5, 4, 2, priority=0),
        ],
        max_num_seqs=1,
        policy="priority",
    )
    assert world.log.finished["low"].num_preemptions == 0
    assert [world.log.token_s[name][0] for name in ("low", "high", "low2")] == [1.0, 6.0, 8.0]


def test_a_resumed_request_computes_what_its_hit_lacks() -> None:
    world = run([request("a", 0.0, 64, 64), request("b", 0.0, 64, 64)], num_gpu_blocks=10)
    (resumed,) = [s for s in world.log.steps if Kind.RESUMED in s.plan.kinds.values()]
    place = resumed.ids.index("b")
    hit = resumed.plan.lookups.hits
    known = 64 + sum(time_s < resumed.end_s for time_s in world.log.token_s["b"])
    assert hit % 16 == 0
    assert (resumed.starts[place], resumed.num_tokens[place]) == (hit, known - hit)


# -- allocation ------------------------------------------------------------------------------------


def test_a_failed_allocation_changes_nothing_and_can_succeed_later() -> None:
    kv = manager(6)
    a, b = live(request("a", 0.0, 48, 9)), live(request("b", 0.0, 32, 9))
    assert kv.allocate_slots(a, 48) is not None
    assert kv.allocate_slots(b, 32) is not None
    b.num_computed_tokens = b.num_tokens = 32
    before = snapshot(kv, a, b)
    assert kv.allocate_slots(b, 1) is None
    assert snapshot(kv, a, b) == before
    kv.forget(a)
    assert kv.allocate_slots(b, 1) is not None
    assert len(kv.get_block_ids(b)[0]) == 3
    kv.forget(b)
    assert kv.num_free_blocks == 5


def test_the_rest_of_the_last_block_is_used_before_a_new_one() -> None:
    kv = manager(3)
    a = live(request("a", 0.0, 32, 4))
    assert kv.allocate_slots(a, 20) is not None
    a.num_computed_tokens = 20
    assert kv.num_free_blocks == 0
    assert not any(kv.allocate_slots(a, 12) or ())
    assert kv.num_free_blocks == 0


def test_hits_that_wait_in_the_free_queue_are_not_free_twice() -> None:
    # 4 usable blocks, all free, 3 of them hits; 2 new ones are needed as well.
    kv = manager(5)
    first = live(request("first", 0.0, (("doc", 48),), 1))
    kv.allocate_slots(first, 48)
    kv.forget(first)
    second = live(request("second", 0.0, (("doc", 48), ("own", 32)), 1))
    hit = kv.get_computed_blocks(second)
    assert hit is not None
    assert (hit.num_tokens, kv.num_free_blocks) == (48, 4)
    before = snapshot(kv, second)
    assert kv.allocate_slots(second, 32, hit) is None
    assert snapshot(kv, second) == before


def test_freeing_twice_frees_once() -> None:
    kv = manager(5)
    a = live(request("a", 0.0, 40, 1))
    kv.allocate_slots(a, 40)
    kv.free(a)
    kv.free(a)
    kv.forget(a)
    assert sorted(kv.pool.free_queue) == [1, 2, 3, 4]
    assert not kv.pool.ref_counts.any()


def test_block_0_is_never_handed_out() -> None:
    kv = manager(5)
    a = live(request("a", 0.0, 64, 1))
    kv.allocate_slots(a, 64)
    assert sorted(kv.get_block_ids(a)[0]) == [1, 2, 3, 4]


# -- the prefix cache ------------------------------------------------------------------------------


def test_a_fully_cached_prompt_keeps_a_token_to_compute() -> None:
    def second(prompt_len: int) -> tuple[int, int]:
        prompt = (("doc", prompt_len),)
        world = run([request("1", 0.0, prompt, 1), request("2", 5.0, prompt, 1)])
        step = world.log.steps[-1]
        return step.starts[0], step.num_tokens[0]

    assert second(32) == (16, 16)
    assert second(33) == (32, 1)


def test_a_hit_is_looked_up_anew_at_every_try() -> None:
    # `grower` evicts the document's two cached blocks, last first, while `head` waits for blocks.
    document = ("doc", 32)
    world = run(
        [
            request("first", 0.0, (document,), 1),
            request("grower", 1.0, 16, 130),
            request("head", 1.5, (document, ("own", 100)), 2),
        ],
        num_gpu_blocks=11,
    )
    waiting = [step for step in world.log.steps if step.plan.lookups.queries == 132]
    assert list(dict.fromkeys(s.plan.lookups.hits for s in waiting)) == [32, 16, 0]
    admitted = waiting[-1]
    assert admitted.plan.kinds == {"head": Kind.NEW}
    assert admitted.shares == {"head": 132}


def test_a_prompt_with_a_long_hit_is_one_short_chunk() -> None:
    prefix = ("doc", 496)
    world = run(
        [
            request("1", 0.0, (prefix,), 1),
            request("2", 5.0, (prefix, ("own", 24)), 2),
        ],
        max_num_batched_tokens=512,
    )
    shares = [step.shares for step in world.log.steps if "2" in step.ids]
    assert shares == [{"2": 24}, {"2": 1}]


def test_the_same_prompt_twice_in_one_step_shares_all_but_the_last_block() -> None:
    prompt = (("doc", 64),)
    world = build([request("a", 0.0, prompt, 2), request("b", 0.0, prompt, 2)])
    world.engine.env.run(until=0.5)
    a, b = world.scheduler.running
    table_a, table_b = (list(world.kv.get_block_ids(r)[0]) for r in (a, b))
    assert table_a[:3] == table_b[:3]
    assert table_a[3] != table_b[3]
    counts = world.kv.pool.ref_counts
    assert [int(counts[block]) for block in (*table_a, table_b[3])] == [2, 2, 2, 1, 1]
    # Both last blocks lie under one key, the first one first.
    assert list(cached_keys(world.kv).values())[-1] == [table_a[3], table_b[3]]
    world.run()
    assert world.log.shares()[0] == {"a": 64, "b": 16}
    assert world.kv.num_free_blocks == world.kv.num_gpu_blocks - 1


def test_blocks_can_be_hit_from_the_schedule_call_on_that_allocates_them() -> None:
    # The second arrives while the first's only chunk runs, and hits what it has allocated.
    prompt = (("doc", 64),)
    world = run([request("a", 0.0, prompt, 2), request("b", 0.5, prompt, 1)])
    assert world.log.shares()[1] == {"a": 1, "b": 16}
    # Chunk by chunk: what is not yet scheduled cannot be hit.
    world = run(
        [request("a", 0.0, prompt, 2), request("b", 0.5, prompt, 1)], max_num_batched_tokens=32
    )
    assert world.log.steps[1].shares == {"a": 32}
    assert world.log.steps[2].shares == {"a": 1, "b": 16}


def test_an_evicted_block_is_a_miss() -> None:
    kv = manager(4)
    x = live(request("x", 0.0, (("doc", 48),), 1))
    kv.allocate_slots(x, 48)
    kv.forget(x)
    other = live(request("other", 0.0, 48, 1))
    kv.allocate_slots(other, 48)
    kv.forget(other)
    again = live(request("again", 0.0, (("doc", 48),), 1))
    hit = kv.get_computed_blocks(again)
    assert hit is not None
    assert hit.num_tokens == 0


def test_a_chain_is_evicted_from_its_end() -> None:
    world = run(
        [
            request("chain", 0.0, (("doc", 48),), 1),
            request("one", 1.0, 10, 1),
            request("again", 2.0, (("doc", 48),), 1),
        ],
        num_gpu_blocks=4,
    )
    first, one, again = world.log.steps
    assert [list(table) for table in first.plan.new_blocks["chain"]] == [[1, 2, 3]]
    assert [list(table) for table in one.plan.new_blocks["one"]] == [[3]]
    assert again.plan.lookups.hits == 32


def test_blocks_without_a_key_are_reused_in_plain_lru_order() -> None:
    # A cached block is evicted when its turn comes, though unkeyed blocks freed later are there.
    shorts = [request(f"short{i}", 1.0 + i, 3, 1) for i in range(4)]
    world = run([request("cached", 0.0, 16, 1), *shorts], num_gpu_blocks=5)
    evicted = [step.num_evicted_blocks for step in world.log.steps]
    assert evicted == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((tuple(range(16)), 16), (tuple(range(256, 272)), 16)),
        ((tuple([-1] * 16), 16), (tuple([-2] * 16), 16)),
        ((-1, 16), (-2, 16)),
        ((1, 16), ("1", 16)),
        ((2**64 + 5, 16), (5, 16)),
    ],
)
def test_different_tokens_never_share_a_block(one: Any, other: Any) -> None:
    world = run([request("a", 0.0, (one, ("x", 1)), 1), request("b", 5.0, (other, ("x", 1)), 1)])
    assert world.log.steps[-1].plan.lookups.hits == 0
    world = run([request("a", 0.0, (one, ("x", 1)), 1), request("b", 5.0, (one, ("y", 1)), 1)])
    assert world.log.steps[-1].plan.lookups.hits == 16


@pytest.mark.parametrize(("quirks", "counted"), [("as_engine", 6), ("fixed", 1)])
def test_lookups_of_a_blocked_request(quirks: str, counted: int) -> None:
    # `b` is tried in the five steps in which `a` holds the pool, and then admitted.
    world = run(
        [request("a", 0.0, 60, 6), request("b", 0.5, 60, 1)], num_gpu_blocks=6, quirks=quirks
    )
    lookups = np.array([step.plan.lookups for step in world.log.steps])
    of_a, of_b = lookups[0], lookups[1:].sum(axis=0)
    assert of_a.tolist() == [1, 60, 0]
    assert of_b.tolist() == [counted, counted * 60, 0]
