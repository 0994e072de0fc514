"""Multi-turn sessions: what a turn contains, their order, and how a trace is cut into sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.errors import TraceError
from simserve.types import TraceRequest, output_segment
from simserve.workload.arrivals import BurstArrivals, ConstantArrivals, PoissonArrivals
from simserve.workload.lengths import ConstantLength, UniformLength
from simserve.workload.prefix_tree import PrefixTree
from simserve.workload.sessions import (
    Session,
    SyntheticSessions,
    generate_sessions,
    group_sessions,
    in_arrival_order,
)
from simserve.workload.synthetic import SharedPrefix


def conversations(num_sessions: int = 50, seed: int = 0) -> SyntheticSessions:
    return SyntheticSessions(
        num_sessions=num_sessions,
        arrival=PoissonArrivals(rate=1),
        num_turns=UniformLength(min=1, max=5),
        prompt_len=UniformLength(min=10, max=100),
        output_len=UniformLength(min=10, max=100),
        think_time_s=3.0,
        think_time="exponential",
        seed=seed,
    )


def request(name: str, arrival_s: float, parent: str | None = None) -> TraceRequest:
    return TraceRequest(
        request_id=name, arrival_s=arrival_s, prompt=((name, 8),), output_len=1, parent=parent
    )


def names(session: Session) -> list[str]:
    return [turn.request_id for turn in session]


def test_a_turn_contains_the_prompt_and_the_output_before_it() -> None:
    for session in generate_sessions(conversations()):
        assert session[0].parent is None
        for before, turn in pairwise(session):
            assert turn.prompt[:-1] == (
                *before.prompt,
                (output_segment(before.request_id), before.output_len),
            )
            assert (turn.parent, turn.turn) == (before.request_id, before.turn + 1)
            assert turn.session == before.session


def test_a_second_turn_finds_prompt_and_output_but_for_the_last_token() -> None:
    first = TraceRequest(request_id="a", arrival_s=0, prompt=(("user0", 64),), output_len=32)
    second = TraceRequest(
        request_id="b",
        arrival_s=1,
        prompt=(*first.prompt, *first.output_parts, ("user1", 16)),
        output_len=1,
    )
    assert second.prompt_len == 112
    tree = PrefixTree(block_size=16)
    assert [tree.hit_len(first), tree.hit_len(second)] == [0, 80]  # 95 computed: 5 full blocks


def test_a_shared_prefix_comes_first_in_every_turn() -> None:
    spec = SyntheticSessions(
        num_sessions=6,
        arrival=ConstantArrivals(rate=1),
        num_turns=ConstantLength(value=2),
        prompt_len=ConstantLength(value=10),
        output_len=ConstantLength(value=5),
        shared_prefix=SharedPrefix(num_groups=2, prefix_len=ConstantLength(value=100)),
    )
    sessions = list(generate_sessions(spec))
    assert (
        sorted(s[0].prompt[0] for s in sessions) == [("prefix0", 100)] * 3 + [("prefix1", 100)] * 3
    )
    assert {s[1].prompt_len for s in sessions} == {100 + 10 + 5 + 10}


def test_the_number_of_requests_is_known_beforehand() -> None:
    spec = conversations()
    assert sum(map(len, generate_sessions(spec))) == spec.turns().sum()
    assert spec.turns().min() == 1
    assert spec.turns().max() == 5


def test_open_loop_turns_come_by_think_time_in_arrival_order() -> None:
    spec = conversations()
    requests = list(in_arrival_order(generate_sessions(spec)))
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    assert len(requests) == spec.turns().sum()
    by_id = {r.request_id: r for r in requests}
    for turn in requests:
        if turn.parent is not None:
            gap_s = turn.arrival_s - by_id[turn.parent].arrival_s
            assert gap_s == pytest.approx(turn.think_time_s)


def test_equal_arrivals_keep_the_order_of_the_sessions() -> None:
    spec = SyntheticSessions(
        num_sessions=3,
        arrival=BurstArrivals(size=3, gap_s=1),
        num_turns=ConstantLength(value=2),
        prompt_len=ConstantLength(value=4),
        output_len=ConstantLength(value=4),
    )
    merged = in_arrival_order(generate_sessions(spec))
    assert names(list(merged)) == ["s0/t0", "s0/t1", "s1/t0", "s1/t1", "s2/t0", "s2/t1"]


def test_only_overlapping_sessions_are_held() -> None:
    num_read = 0

    def read() -> Iterator[Session]:
        nonlocal num_read
        for session in generate_sessions(conversations(1000)):
            num_read += 1
            yield session

    merged = in_arrival_order(read())
    for _ in range(100):
        next(merged)
    assert num_read < 100


def test_grouping_undoes_the_merge() -> None:
    sessions = list(generate_sessions(conversations()))
    assert list(group_sessions(in_arrival_order(sessions))) == sessions


@given(st.randoms(use_true_random=False))
def test_grouping_does_not_depend_on_the_order_of_a_session_in_the_file(shuffler: object) -> None:
    requests = [request("a", 0), request("b", 1, "a"), request("c", 2, "b"), request("d", 0.5)]
    shuffler.shuffle(requests)  # type: ignore[attr-defined]
    assert [names(s) for s in group_sessions(requests)] == [["a", "b", "c"], ["d"]]


def test_a_session_may_branch_and_an_orphan_starts_its_own() -> None:
    requests = [
        request("a", 0),
        request("b", 1, "a"),
        request("x", 2, "gone"),
        request("c", 3, "a"),
        request("d", 4, "b"),
    ]
    assert [names(s) for s in group_sessions(requests)] == [["a", "b", "c", "d"], ["x"]]


def test_circles_and_twins_are_errors() -> None:
    with pytest.raises(TraceError, match=r"'b'.*circle"):
        list(group_sessions([request("r", 0), request("a", 0, "b"), request("b", 0, "a")]))
    with pytest.raises(TraceError, match=r"'a': request_id: occurs twice"):
        list(group_sessions([request("a", 0), request("a", 0)]))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: conversations(0), "num_sessions"),
        (lambda: conversations(seed=-1), "seed"),
        (lambda: _with(think_time_s=float("inf")), "think_time_s"),
        (lambda: _with(think_time="slow"), "think_time"),
        (
            lambda: _with(
                shared_prefix=SharedPrefix(
                    num_groups=2, prompts_per_group=3, prefix_len=ConstantLength(value=1)
                )
            ),
            "num_sessions",
        ),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()


def _with(**changes: object) -> SyntheticSessions:
    one = ConstantLength(value=1)
    arguments: dict[str, object] = {
        "num_sessions": 2,
        "arrival": ConstantArrivals(rate=1),
        "num_turns": one,
        "prompt_len": one,
        "output_len": one,
    }
    return SyntheticSessions(**{**arguments, **changes})  # type: ignore[arg-type]
