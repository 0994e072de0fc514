"""Workload sources: open loop, closed loop and the concurrency cap, driven by hand."""

from __future__ import annotations

import heapq
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.errors import TraceError
from simserve.protocols import Workload
from simserve.types import TraceRequest
from simserve.workload.arrivals import ConstantArrivals, PoissonArrivals
from simserve.workload.lengths import ConstantLength, UniformLength
from simserve.workload.sessions import SyntheticSessions, generate_sessions
from simserve.workload.source import ConcurrencyCap, OpenLoop, Sessions


def request(
    name: str, arrival_s: float = 0.0, parent: str | None = None, think_time_s: float = 0.0
) -> TraceRequest:
    return TraceRequest(
        request_id=name,
        arrival_s=arrival_s,
        prompt=((name, 8),),
        output_len=1,
        parent=parent,
        think_time_s=think_time_s,
    )


def drive(workload: Workload, service_s: float = 1.0) -> list[tuple[str, float]]:
    """Serve every request for `service_s` from its arrival; (id, arrival) in the order taken."""
    log: list[tuple[str, float]] = []
    ends: list[tuple[float, int, str]] = []
    while True:
        arrival_s = workload.next_arrival()
        if ends and (arrival_s is None or ends[0][0] <= arrival_s):
            end_s, _, name = heapq.heappop(ends)
            workload.finished(name, end_s)
            continue
        if arrival_s is None:
            return log
        taken = workload.take()
        assert taken.arrival_s == arrival_s
        log.append((taken.request_id, arrival_s))
        heapq.heappush(ends, (arrival_s + service_s, len(log), taken.request_id))


# --- open loop


def test_open_loop_hands_out_the_requests_as_they_are() -> None:
    requests = [request("a"), request("b", 1), request("c", 1, parent="a")]
    source = OpenLoop(iter(requests), num_requests=3)
    assert source.num_requests == 3
    taken = []
    while source.next_arrival() is not None:
        taken.append(source.take())
    assert all(got is given for got, given in zip(taken, requests, strict=True))
    assert source.next_arrival() is None
    with pytest.raises(IndexError):
        source.take()


def test_open_loop_reads_one_request_ahead() -> None:
    num_read = 0

    def read() -> Iterator[TraceRequest]:
        nonlocal num_read
        while True:
            num_read += 1
            yield request(str(num_read), num_read)

    source = OpenLoop(read())
    assert source.num_requests is None
    for _ in range(5):
        source.take()
    assert num_read == 6


@pytest.mark.parametrize("arrival_s", [float("nan"), float("inf"), -1.0, 1.1e12])
def test_arrivals_that_are_no_times_are_refused(arrival_s: float) -> None:
    with pytest.raises(TraceError, match="'bad': arrival_s"):
        OpenLoop([request("bad", arrival_s)])
    with pytest.raises(TraceError, match="'bad': arrival_s"):
        OpenLoop([request("good"), request("bad", arrival_s)]).take()
    with pytest.raises(TraceError, match="'bad': arrival_s"):
        Sessions([[request("bad", arrival_s)]])


def test_arrivals_that_go_backwards_are_refused() -> None:
    with pytest.raises(TraceError, match=r"'b': arrival_s: 1.0 is earlier than 2.0 of 'a'"):
        OpenLoop([request("a", 2.0), request("b", 1.0)]).take()
    with pytest.raises(TraceError, match=r"'b': arrival_s"):
        Sessions([[request("a", 2.0)], [request("b", 1.0)]]).take()


# --- closed loop


def test_a_turn_starts_think_time_after_the_one_before_has_ended() -> None:
    chat = [request("a"), request("b", 0, "a", 2.0), request("c", 0, "b", 0.5)]
    source = Sessions([chat], num_requests=3)
    assert source.take().request_id == "a"
    assert source.next_arrival() is None
    source.finished("a", 10.0)
    assert source.next_arrival() == 12.0
    assert source.take().arrival_s == 12.0
    source.finished("b", 20.0)
    assert source.take().arrival_s == 20.5
    source.finished("c", 21.0)
    assert source.next_arrival() is None
    assert source.num_requests == 3


def test_sessions_interleave_by_time_and_ties_keep_the_order_of_the_stream() -> None:
    first = [request("a"), request("a2", 0, "a", 1.0)]
    second = [request("b", 1.0), request("b2", 0, "b", 0.0)]
    third = [request("c", 2.0)]
    assert drive(Sessions([first, second, third])) == [
        ("a", 0.0),
        ("b", 1.0),
        ("a2", 2.0),
        ("b2", 2.0),
        ("c", 2.0),
    ]


def test_branches_start_together() -> None:
    source = Sessions([[request("a"), request("b", 0, "a", 1.0), request("c", 0, "a", 0.5)]])
    assert drive(source) == [("a", 0.0), ("c", 1.5), ("b", 2.0)]


def test_turns_after_a_failed_one_are_counted_as_not_sent() -> None:
    chat = [request("a"), request("b", 0, "a"), request("c", 0, "b"), request("d", 0, "b")]
    source = Sessions([chat, [request("x", 5.0)]])
    source.take()
    source.finished("a", 1.0, completed=False)
    assert source.num_not_sent == 3
    assert source.next_arrival() == 5.0
    assert source.take().request_id == "x"
    assert source.next_arrival() is None


@pytest.mark.parametrize(
    ("later", "field"),
    [
        (request("b"), "parent"),
        (request("b", 0, "gone"), "parent"),
        (request("b", 0, "a", float("nan")), "think_time_s"),
        (request("b", 0, "a", -1.0), "think_time_s"),
        (request("b", 0, "a", 2e12), "think_time_s: must be from 0 to 1e\\+12 seconds"),
    ],
)
def test_bad_turns_are_refused(later: TraceRequest, field: str) -> None:
    with pytest.raises(TraceError, match=f"'b': {field}"):
        Sessions([[request("a"), later]])


def test_closed_loop_sends_every_turn_after_its_parent() -> None:
    spec = SyntheticSessions(
        num_sessions=200,
        arrival=PoissonArrivals(rate=2),
        num_turns=UniformLength(min=1, max=6),
        prompt_len=ConstantLength(value=8),
        output_len=ConstantLength(value=8),
        think_time_s=1.5,
        think_time="exponential",
    )
    turns = {r.request_id: r for session in generate_sessions(spec) for r in session}
    log = drive(Sessions(generate_sessions(spec)), service_s=0.7)
    starts = dict(log)
    assert set(starts) == set(turns)
    assert [start for _, start in log] == sorted(starts.values())
    for name, turn in turns.items():
        if turn.parent is not None:
            assert starts[name] == starts[turn.parent] + 0.7 + turn.think_time_s


def test_memory_does_not_grow_with_the_number_of_sessions() -> None:
    def sessions(count: int) -> Iterator[list[TraceRequest]]:
        for i in range(count):
            yield [request(f"{i}", i), request(f"{i}b", i, f"{i}")]

    def peak(count: int) -> int:
        tracemalloc.start()
        source = Sessions(sessions(count))
        while source.next_arrival() is not None:
            taken = source.take()
            source.finished(taken.request_id, taken.arrival_s + 0.1)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(4000)  # what Python keeps for good, such as its lists of free tuples
    assert peak(4000) < 2 * peak(400)


# --- the cap


def test_a_request_without_a_slot_is_sent_when_one_frees() -> None:
    source = ConcurrencyCap(OpenLoop([request("a"), request("b", 1), request("c", 2)], 3), 2)
    assert source.num_requests == 3
    assert [source.take().request_id, source.take().request_id] == ["a", "b"]
    assert source.next_arrival() is None
    with pytest.raises(IndexError, match="slot"):
        source.take()
    source.finished("b", 5.0)
    assert source.next_arrival() == 5.0
    assert source.take().arrival_s == 5.0


def test_slots_go_to_the_waiting_in_order_each_when_it_frees() -> None:
    source = ConcurrencyCap(OpenLoop([request(name) for name in "abcd"]), 2)
    source.take()
    source.take()
    source.finished("a", 3.0)
    source.finished("b", 4.0)
    assert [source.take().arrival_s, source.take().arrival_s] == [3.0, 4.0]


def test_a_request_that_finds_a_slot_keeps_its_arrival() -> None:
    late = request("b", 9.0)
    source = ConcurrencyCap(OpenLoop([request("a"), late]), 1)
    source.take()
    source.finished("a", 3.0)
    assert source.next_arrival() == 9.0
    assert source.take() is late


@given(
    st.lists(st.floats(0, 20), min_size=1, max_size=30).map(sorted),
    st.integers(1, 5),
    st.floats(0.1, 5),
)
def test_the_cap_is_a_queue_with_that_many_servers(
    arrivals: list[float], max_concurrency: int, service_s: float
) -> None:
    requests = [request(str(i), arrival_s) for i, arrival_s in enumerate(arrivals)]
    log = drive(ConcurrencyCap(OpenLoop(requests), max_concurrency), service_s)
    free_s = [0.0] * max_concurrency
    for (name, sent_s), given_request in zip(log, requests, strict=True):
        assert name == given_request.request_id
        assert sent_s == max(given_request.arrival_s, heapq.heappop(free_s))
        heapq.heappush(free_s, sent_s + service_s)


def test_the_cap_passes_ends_on_to_a_closed_loop() -> None:
    def chats() -> list[list[TraceRequest]]:
        return [
            [request("a"), request("a2", 0, "a", 0.25)],
            [request("b"), request("b2", 0, "b", 0.25)],
        ]

    log = drive(ConcurrencyCap(Sessions(chats()), 1))
    assert log == [("a", 0.0), ("b", 1.0), ("a2", 2.0), ("b2", 3.0)]
    inner = Sessions(chats())
    capped = ConcurrencyCap(inner, 1)
    capped.take()
    capped.finished("a", 1.0, completed=False)
    assert inner.num_not_sent == 1


def test_the_cap_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="max_concurrency"):
        ConcurrencyCap(OpenLoop([]), 0)


def test_constant_arrivals_reach_the_engine_without_drift() -> None:
    times_s = next(ConstantArrivals(rate=200).times(None, 10_000))  # type: ignore[arg-type]
    source = OpenLoop(request(str(i), t) for i, t in enumerate(times_s.tolist()))
    assert drive(source)[-1][1] == pytest.approx(49.995, abs=1e-9)
