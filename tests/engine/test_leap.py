"""Runs of equal steps taken at once give what single steps give, whatever arrives meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.cost.formula import FormulaCost
from simserve.engine.inbox import Abort, Reset
from simserve.errors import OutOfDomainError
from simserve.executor.drafts import MadeUpDrafter
from simserve.protocols import Price, StepRecord
from simserve.sched.fcfs_static import FcfsStaticScheduler
from simserve.sched.prefill_first import PrefillFirstScheduler
from simserve.sched.sarathi import SarathiScheduler
from simserve.sched.sjf import SjfScheduler
from simserve.sched.steady import DecodesInStep
from simserve.types import StepRun, TraceRequest
from tests.engine.rig import Log, World, build, request, run
from tests.engine.workloads import MAX_MODEL_LEN, limits, requests

WHOLE_PROMPTS = (PrefillFirstScheduler, FcfsStaticScheduler)
TIMES = st.floats(0, 20, allow_nan=False)


def walk(workload: list[TraceRequest], **options: Any) -> World:
    """A world in which each request is asked in each step."""
    world = build(workload, **options)
    world.scheduler.cohort = None
    return world.run()


def check_same(leaping: World, stepping: World) -> None:
    assert leaping.log.steps == stepping.log.steps
    assert leaping.log.token_s == stepping.log.token_s
    assert leaping.log.aborted_s == stepping.log.aborted_s
    assert leaping.state == stepping.state
    assert (leaping.engine.status, leaping.engine.now) == (
        stepping.engine.status,
        stepping.engine.now,
    )


@settings(max_examples=80)
@given(
    requests(),
    limits(),
    st.lists(st.tuples(TIMES, st.integers(0, 11)), max_size=3),
    st.lists(TIMES, max_size=2),
)
def test_leaps_change_nothing(
    workload: list[TraceRequest],
    options: dict[str, Any],
    aborts: list[tuple[float, int]],
    resets: list[float],
) -> None:
    options["aborts"] = [Abort(time_s, str(i)) for time_s, i in aborts]
    options["resets"] = [Reset(time_s) for time_s in resets]
    check_same(run(workload, leap=True, **options), run(workload, leap=False, **options))


@settings(max_examples=60)
@given(
    requests(),
    limits(),
    st.lists(st.tuples(TIMES, st.integers(0, 11)), max_size=3),
    st.sampled_from([None, 20, 61]),
)
def test_nor_do_they_where_steps_are_planned_ahead(
    workload: list[TraceRequest],
    options: dict[str, Any],
    aborts: list[tuple[float, int]],
    max_steps: int | None,
) -> None:
    options["aborts"] = [Abort(time_s, str(i)) for time_s, i in aborts]
    options |= {"async_scheduling": True, "max_steps": max_steps}
    leaping = run(workload, leap=True, **options)
    check_same(leaping, run(workload, leap=False, **options))
    check_same(leaping, walk(workload, **options))


@settings(max_examples=80)
@given(
    requests(),
    limits(),
    st.lists(st.tuples(TIMES, st.integers(0, 11)), max_size=3),
    st.sampled_from([SarathiScheduler, SjfScheduler, PrefillFirstScheduler, FcfsStaticScheduler]),
)
def test_nor_do_they_under_other_policies(
    workload: list[TraceRequest],
    options: dict[str, Any],
    aborts: list[tuple[float, int]],
    scheduler_class: type[DecodesInStep],
) -> None:
    options["aborts"] = [Abort(time_s, str(i)) for time_s, i in aborts]
    options["scheduler_class"] = scheduler_class
    if scheduler_class is SarathiScheduler:
        options["enable_chunked_prefill"] = True
    elif scheduler_class is SjfScheduler:
        options["policy"] = "fcfs"
    if scheduler_class in WHOLE_PROMPTS or not options["enable_chunked_prefill"]:
        options["long_prefill_token_threshold"] = 0
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], MAX_MODEL_LEN)
    leaping = run(workload, leap=True, **options)
    check_same(leaping, run(workload, leap=False, **options))
    check_same(leaping, walk(workload, **options))


@pytest.mark.parametrize("scheduler_class", [SarathiScheduler, SjfScheduler, *WHOLE_PROMPTS])
def test_every_policy_passes_steady_decodes_over(scheduler_class: type[DecodesInStep]) -> None:
    records: list[int] = []

    class Counting(Log):
        def stepped(self, record: StepRecord) -> None:
            records.append(record.run.count)
            super().stepped(record)

    # Two run, and a third waits behind max_num_seqs: none of them can change a step of decodes.
    workload = [request(str(i), 0.0, 4, 20) for i in range(3)]
    limits = {"max_num_seqs": 2, "max_model_len": 1024, "scheduler_class": scheduler_class}
    run(workload, leap=True, log=Counting(), **limits)
    assert sum(records) == 40
    assert len(records) <= 6


@settings(max_examples=40)
@given(requests(), limits(), st.integers(1, 4), st.sampled_from(["ngram", "eagle"]))
def test_leaps_change_nothing_with_drafts(
    workload: list[TraceRequest], options: dict[str, Any], k: int, method: str
) -> None:
    def drafter() -> MadeUpDrafter:
        return MadeUpDrafter(
            method=method,
            num_speculative_tokens=k,
            accepted=lambda i, so_far: (int(i) + so_far) % (k + 1),
            # Often none at all, so that a step may look like plain decoding.
            draft_len=lambda i, so_far: k if (int(i) + so_far) % 5 == 0 else 0,
            max_model_len=MAX_MODEL_LEN,
        )

    options["num_lookahead_tokens"] = k if method == "eagle" else 0
    options["drop_last_hit"] = method == "eagle"
    # Drafts need slots beyond the last token: give them room.
    options["num_gpu_blocks"] += 2 * k + 2
    check_same(
        run(workload, leap=True, drafter=drafter(), **options),
        run(workload, leap=False, drafter=drafter(), **options),
    )


def test_duplicates_of_one_block_keep_their_order_of_insertion() -> None:
    # The second, further along the same tokens, commits each block before the first does.
    def both(leap: bool) -> World:
        def literal(start: int, stop: int) -> Any:
            return ((tuple(range(start, stop)), stop - start),)

        first = request("behind", 0.0, literal(0, 4), 60, output=literal(4, 64))
        second = request("ahead", 0.0, literal(0, 24), 40, output=literal(24, 64))
        return run([first, second], leap=leap, block_size=4, num_gpu_blocks=60)

    check_same(both(leap=True), both(leap=False))


class Bounded(FormulaCost):
    """Prices no step with a request of more than 30 tokens."""

    def price(self, run: StepRun) -> Price:
        if max(run.plan.starts) + run.count > 30:
            raise OutOfDomainError("too long")
        return super().price(run)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("abort_s", [20.5, None])
def test_only_a_step_that_comes_can_be_refused(
    async_scheduling: bool, abort_s: float | None
) -> None:
    def both(leap: bool) -> World:
        aborts = [] if abort_s is None else [Abort(abort_s, "a")]
        workload = [request("a", 0.0, 4, 40)]
        options = {"aborts": aborts, "async_scheduling": async_scheduling, "leap": leap}
        return run(workload, cost=Bounded(1.0), **options)

    if abort_s is not None:
        check_same(both(leap=True), both(leap=False))
        return
    with pytest.raises(OutOfDomainError):
        both(leap=True)


@pytest.mark.parametrize("arrival_s", [4.0, 4.5, 5.0])
def test_an_arrival_in_or_at_the_end_of_a_step_of_a_run_joins_the_next(arrival_s: float) -> None:
    world = run([request("a", 0.0, 4, 20), request("b", arrival_s, 4, 2)], leap=True)
    # One second a step: the step that begins at 4.0 (arrivals at its start still join) or at 5.0.
    joined = next(step for step in world.log.steps if "b" in step.ids)
    assert joined.start_s == (4.0 if arrival_s == 4.0 else 5.0)
