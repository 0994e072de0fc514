"""The clock and the loop: arrivals, aborts, ends, and that nothing runs for ever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from simserve.cost.formula import FormulaCost
from simserve.engine.inbox import Abort, Reset
from simserve.engine.loop import Process
from simserve.errors import SimserveError, TraceError
from simserve.protocols import Price
from simserve.types import Kind, StepRun, TraceRequest
from simserve.workload.source import OpenLoop
from tests.engine.rig import World, build, request, run


class Priced:
    """A cost model made of a function, that remembers what it was asked."""

    def __init__(self, seconds: Any) -> None:
        self.seconds = seconds
        self.runs: list[StepRun] = []

    def price(self, run: StepRun) -> Price:
        self.runs.append(run)
        return Price(np.full(run.count, self.seconds(run.plan)), {})


# -- arrivals --------------------------------------------------------------------------------------


def test_ten_thousand_arrivals_do_not_drift() -> None:
    requests = [request(str(i), i * 0.005, 4, 1) for i in range(10_000)]
    world = run(requests, cost=FormulaCost(0.001), leap=True)
    taken = list(world.log.arrived_s.values())
    assert taken == [r.arrival_s for r in requests]
    assert taken[-1] == 9_999 * 0.005 == pytest.approx(49.995, abs=1e-12)
    assert len(world.log.finished) == 10_000


@pytest.mark.parametrize("leap", [False, True])
@pytest.mark.parametrize(("arrival_s", "first_token_s"), [(4.0, 5.0), (4.3, 6.0), (5.0, 6.0)])
def test_an_arrival_in_a_step_joins_the_next_and_waits_from_its_own_time(
    leap: bool, arrival_s: float, first_token_s: float
) -> None:
    world = run([request("a", 0.0, 4, 20), request("b", arrival_s, 4, 2)], leap=leap)
    assert world.log.token_s["b"][0] == first_token_s
    assert world.log.arrived_s["b"] == first_token_s - 1.0


@pytest.mark.parametrize("bad_s", [math.nan, math.inf, -1.0, 0.5])
def test_arrivals_that_would_turn_the_clock_back_are_errors(bad_s: float) -> None:
    requests = [request("a", 1.0, 4, 1), request("b", bad_s, 4, 1)]
    with pytest.raises(TraceError, match=r"'b': arrival_s"):
        run(requests)


class Timeless(OpenLoop):
    """A user's workload whose next arrival is not a time."""

    def __init__(self, due: float) -> None:
        super().__init__([request("a", 0.0, 4, 1)])
        self.due = due

    def next_arrival(self) -> float | None:
        return self.due


@pytest.mark.parametrize("due", [math.nan, math.inf, -math.inf])
def test_a_workload_without_a_next_time_is_an_error(due: float) -> None:
    world = build(workload=Timeless(due))
    # Without the check nothing happens for ever, at time 0, or requests are taken for ever.
    ticks = world.engine.env.process(tick(world, 100))
    with pytest.raises(SimserveError, match=f"its next request at {due} s"):
        world.engine.env.run(ticks)


def tick(world: World, count: int) -> Process:
    for _ in range(count):
        yield world.engine.env.timeout(0)


def test_a_request_after_a_pause_starts_at_once() -> None:
    world = run([request("a", 0.0, 4, 1), request("b", 100.25, 4, 1)])
    assert world.log.token_s["b"] == [101.25]


# -- one step at a time ----------------------------------------------------------------------------


@pytest.mark.parametrize("leap", [False, True])
def test_steps_never_overlap_and_there_is_one_for_all_that_share_a_deadline(leap: bool) -> None:
    # 512 requests at once, all ended from outside at one moment: no step of theirs lives on.
    requests = [request(f"{i}", 0.0, 8, 400) for i in range(512)]
    aborts = [Abort(10.5, f"{i}") for i in range(512)]
    late = request("late", 10.25, 8, 3)
    world = run(
        [*requests, late],
        aborts=aborts,
        leap=leap,
        max_num_seqs=600,
        max_num_batched_tokens=8192,
        num_gpu_blocks=60_000,
    )
    assert [(s.start_s, s.end_s) for s in world.log.steps] == [(i, i + 1.0) for i in range(14)]
    assert world.log.token_s["late"] == [12.0, 13.0, 14.0]


def test_a_step_without_tokens_is_never_run() -> None:
    # As engine, a request that cannot be scheduled gives empty steps; the clock goes on to the
    # next event and the model is not asked.
    cost = Priced(lambda plan: 1.0)
    world = run(
        [request("stuck", 0.0, 100, 1), request("b", 7.5, 4, 1)],
        num_gpu_blocks=3,
        cost=cost,
        admit_as_engine=True,
        max_steps=50,
    )
    empty = [step for step in world.log.steps if not step.ids]
    assert empty
    assert all(step.start_s == step.end_s for step in empty)
    assert all(run.plan.request_ids for run in cost.runs)
    assert 7.5 in {step.start_s for step in world.log.steps}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_that_takes_no_time_is_an_error(seconds: float, async_scheduling: bool) -> None:
    with pytest.raises(SimserveError, match="every step with tokens must take time"):
        run(
            [request("a", 0.0, 4, 3)],
            cost=Priced(lambda plan: seconds),
            async_scheduling=async_scheduling,
        )


def test_a_duration_that_the_clock_cannot_tell_is_an_error() -> None:
    with pytest.raises(SimserveError, match="every step with tokens must take time"):
        run([request("a", 1e9, 4, 3)], cost=Priced(lambda plan: 1e-9))


# -- aborts ----------------------------------------------------------------------------------------


def free_again(world: World) -> bool:
    pool = world.kv.pool
    everything = sorted(pool.free_queue) == list(range(1, world.kv.num_gpu_blocks))
    return everything and not pool.ref_counts.any()


@pytest.mark.parametrize("leap", [False, True])
@pytest.mark.parametrize("abort_s", [2.5, 3.0])
def test_an_abort_in_the_step_that_finishes_comes_too_late(leap: bool, abort_s: float) -> None:
    world = run([request("a", 0.0, 40, 3)], aborts=[Abort(abort_s, "a")], leap=leap)
    assert world.log.finished.keys() == {"a"}
    assert world.log.aborted_s == {}
    assert free_again(world)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("abort_s", [0.0, 0.5, 1.0, 4.5, 9.0])
def test_an_abort_frees_once_wherever_the_request_is(
    async_scheduling: bool, abort_s: float
) -> None:
    world = run(
        [request("a", 0.0, 40, 8), request("b", 0.0, 40, 8)],
        aborts=[Abort(abort_s, "b"), Abort(abort_s, "b"), Abort(abort_s, "nobody")],
        async_scheduling=async_scheduling,
        max_num_seqs=1 if abort_s == 4.5 else 4,
    )
    assert world.engine.status == "completed"
    assert len(world.log.token_s["a"]) == 8
    assert free_again(world)


def test_requests_ended_while_waiting_give_their_places_back() -> None:
    requests = [request(str(i), 0.0, 8, 50) for i in range(6)]
    aborts = [Abort(2.5, str(i)) for i in range(5)]
    world = run(requests, aborts=aborts, max_num_seqs=2)
    assert world.log.aborted_s == dict.fromkeys("01234", 3.0)
    assert world.log.token_s["5"][0] == 4.0
    assert world.log.finished.keys() == {"5"}
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 0)


def test_the_cache_is_reset_only_when_unused() -> None:
    prompt = (("doc", 33),)
    requests = [request(str(i), 5.0 * i, prompt, 2) for i in range(4)]

    def hits(*resets: float) -> list[int]:
        world = run(requests, resets=[Reset(time_s) for time_s in resets])
        return [s.plan.lookups.hits for s in world.log.steps if Kind.NEW in s.plan.kinds.values()]

    assert hits() == [0, 32, 32, 32]
    assert hits(3.0) == [0, 0, 32, 32]
    assert hits(0.0, 3.0, 3.5) == [0, 0, 32, 32]  # empty before, and empty again
    assert hits(0.5, 5.5) == [0, 32, 32, 32]  # taken in while a request holds blocks


# -- ends ------------------------------------------------------------------------------------------


def test_a_stalled_engine_ends_as_a_deadlock() -> None:
    world = run(
        [request("big", 0.0, 100, 1), request("b", 0.0, 4, 1)],
        num_gpu_blocks=4,
        admit_as_engine=True,
    )
    assert world.engine.status == "deadlock"
    assert [r.request_id for r in world.scheduler.unfinished()] == ["big", "b"]


@pytest.mark.parametrize("prompt_len", [4, 20])
def test_an_engine_that_stalls_with_two_steps_in_flight_ends_or_waits(prompt_len: int) -> None:
    # After its one token "a" is scheduled once more or passed over, and "big" never.
    requests = [request("a", 0.0, prompt_len, 2), request("big", 0.0, 100, 1)]
    options: dict[str, Any] = {"num_gpu_blocks": 4, "admit_as_engine": True}
    world = run(requests, async_scheduling=True, **options)
    assert world.engine.status == "deadlock"
    assert world.engine.num_steps == len(world.log.steps)
    assert [r.request_id for r in world.scheduler.unfinished()] == ["big"]
    # An abort makes room for a request that comes later still.
    later = [*requests, request("late", 30.0, 4, 1)]
    world = run(later, async_scheduling=True, aborts=[Abort(20.0, "big")], **options)
    assert world.engine.status == "completed"
    assert world.log.token_s["late"] == [31.0]


@pytest.mark.parametrize("budget", [64, 32])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_of_max_model_len_never_makes_a_step_of_less_than_a_token(
    async_scheduling: bool, budget: int
) -> None:
    world = run(
        [request("full", 0.0, 64, 5), request("b", 1.0, 4, 3)],
        max_model_len=64,
        max_num_batched_tokens=budget,
        admit_as_engine=True,
        async_scheduling=async_scheduling,
    )
    assert all(n > 0 for step in world.log.steps for n in step.num_tokens)
    in_one_go = budget == 64  # else its last token is never computed
    assert world.engine.status == ("completed" if in_one_go else "deadlock")
    assert len(world.log.token_s["full"]) == in_one_go
    assert len(world.log.token_s["b"]) == 3


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_that_runs_in_a_circle_ends_as_a_livelock(async_scheduling: bool) -> None:
    world = run(
        [request("big", 0.0, 100, 1)],
        num_gpu_blocks=4,
        enable_prefix_caching=False,
        max_num_batched_tokens=32,
        admit_as_engine=True,
        async_scheduling=async_scheduling,
    )
    assert world.engine.status == "livelock"


@pytest.mark.parametrize("leap", [False, True])
def test_max_steps_ends_a_run(leap: bool) -> None:
    world = run([request("a", 0.0, 4, 50)], max_steps=7, leap=leap)
    assert world.engine.status == "max_steps"
    assert world.engine.num_steps == len(world.log.steps) == 7


def test_nothing_to_do_is_a_completed_run() -> None:
    world = run([])
    assert (world.engine.status, world.engine.now, world.log.steps) == ("completed", 0.0, [])


# -- closed loops ----------------------------------------------------------------------------------


class Chain:
    """One request after the other: each is sent a think time after the one before has ended."""

    num_requests = None

    def __init__(self, requests: Sequence[TraceRequest], think_time_s: float) -> None:
        self.left = list(requests)
        self.think_time_s = think_time_s
        self.due: float | None = 0.0
        self.ended: list[tuple[str, float, bool]] = []

    def next_arrival(self) -> float | None:
        return self.due if self.left else None

    def take(self) -> TraceRequest:
        self.due = None
        return self.left.pop(0)

    def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
        self.ended.append((request_id, now_s, completed))
        self.due = now_s + self.think_time_s


@pytest.mark.parametrize("leap", [False, True])
@pytest.mark.parametrize("think_time_s", [0.0, 0.5, 3.0])
def test_a_closed_loop_sends_the_next_when_the_last_has_ended(
    leap: bool, think_time_s: float
) -> None:
    requests = [request("a", 0.0, 4, 2), request("huge", 0.0, 9_000, 1), request("b", 0.0, 4, 3)]
    workload = Chain(requests, think_time_s)
    world = run(workload=workload, leap=leap, aborts=[Abort(1000.0, "a")])
    sent_s = 2.0 + 2 * think_time_s
    assert workload.ended == [
        ("a", 2.0, True),
        ("huge", 2.0 + think_time_s, False),
        ("b", sent_s + 3.0, True),
    ]
    assert world.log.token_s["b"] == [sent_s + i for i in (1.0, 2.0, 3.0)]
    assert world.engine.status == "completed"


def test_a_late_answer_wakes_an_engine_that_sleeps_over_many_steps() -> None:
    # An abort at 5.0 makes the closed loop send at 5.5, while a long run of steps is in progress.
    class Both(Chain):
        def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
            super().finished(request_id, now_s, completed)
            self.due = now_s + 0.5

    def world(leap: bool) -> World:
        requests = [request("x", 0.0, 4, 200), request("y", 0.0, 4, 2)]
        return run(workload=Both(requests, 0.0), leap=leap, aborts=[Abort(5.0, "x")])

    assert world(True).log.steps == world(False).log.steps
    assert world(True).log.token_s["y"] == [6.5, 7.5]


# -- queueing theory -------------------------------------------------------------------------------


def single_server(rate: float, num_requests: int, seed: int) -> tuple[list[TraceRequest], World]:
    """One request at a time; its only step takes an exponential time of mean 1."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, num_requests))
    service = dict(enumerate(rng.exponential(1.0, num_requests)))
    requests = [request(str(i), float(t), 4, 1) for i, t in enumerate(arrivals)]
    cost = Priced(lambda plan: service[int(plan.request_ids[0])])
    return requests, run(requests, cost=cost, max_num_seqs=1, enable_prefix_caching=False)


def test_a_single_server_queue_has_the_mean_sojourn_time_of_theory() -> None:
    rate, num_requests = 0.5, 8_000
    requests, world = single_server(rate, num_requests, seed=1)
    sojourns = np.array([world.log.token_s[r.request_id][0] - r.arrival_s for r in requests])
    # M/M/1: 1 / (mu - lambda) = 2 s. Batch means, because neighbours are correlated.
    means = sojourns.reshape(40, -1).mean(axis=1)
    error = means.std(ddof=1) / np.sqrt(len(means))
    assert abs(sojourns.mean() - 2.0) < 2.6 * error
    assert error < 0.15


def test_littles_law_is_exact() -> None:
    requests, world = single_server(0.8, 500, seed=2)
    arrivals = sorted(r.arrival_s for r in requests)
    ends = sorted(times[-1] for times in world.log.token_s.values())
    # Time-average of the number in the system, summed up between events, times the span.
    events = sorted([(t, 1) for t in arrivals] + [(t, -1) for t in ends])
    area, inside, before = 0.0, 0, 0.0
    for time_s, change in events:
        area += inside * (time_s - before)
        inside, before = inside + change, time_s
    sojourns = sum(world.log.token_s[r.request_id][-1] - r.arrival_s for r in requests)
    assert inside == 0
    assert area == pytest.approx(sojourns, rel=1e-12)


def test_an_overload_looks_the_same_up_to_the_last_arrival_however_long_the_run() -> None:
    # Four times the load: whether the queue drains afterwards must not change what was before.
    requests = [request(str(i), 0.25 * i, 4, 1) for i in range(200)]
    drained = run(requests, max_num_seqs=1)
    stopped = run(requests, max_num_seqs=1, max_steps=50)
    assert drained.engine.status == "completed"
    assert stopped.engine.status == "max_steps"
    assert drained.log.steps[:50] == stopped.log.steps
    assert stopped.log.steps[-1].num_waiting > 140
    assert drained.log.steps[-1].num_waiting == 0


# -- the probe for preemption ----------------------------------------------------------------------


@pytest.mark.parametrize("leap", [False, True])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_preemption_is_one_long_gap_and_not_a_second_first_token(
    leap: bool, enable_prefix_caching: bool
) -> None:
    # Two requests of 64 + 1,000 tokens want 133 blocks; 100 are usable.
    requests = [request("a", 0.0, 64, 1000), request("b", 0.0, 64, 1000)]
    world = run(
        requests,
        num_gpu_blocks=101,
        enable_prefix_caching=enable_prefix_caching,
        leap=leap,
        max_num_batched_tokens=2048,
    )
    assert world.engine.status == "completed"
    assert world.engine.num_steps == len(world.log.steps) == 1263
    assert (world.log.ttft_s("a"), world.log.ttft_s("b")) == (1.0, 1.0)
    assert set(world.log.itl_s("a")) == {1.0}
    gaps = world.log.itl_s("b")
    assert len(gaps) == 999
    assert sorted(gaps)[-2:] == [1.0, 264.0]
    assert world.log.finished["a"].num_preemptions == 0
    assert world.log.finished["b"].num_preemptions == 1
