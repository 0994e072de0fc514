"""Statistics from token runs equal those of an implementation that keeps every token's time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.metrics.tables import token_times

# A step: its duration, and a number for each of five requests that tells what they do in it.
STEP = st.tuples(st.integers(0, 40), st.lists(st.integers(0, 11), min_size=5, max_size=5))
HISTORY = st.lists(STEP, max_size=30)


class Naive:
    """Every emission of every request as (time, tokens), and what became of the request."""

    def __init__(self, num_requests: int) -> None:
        self.events: list[list[tuple[float, int]]] = [[] for _ in range(num_requests)]
        self.outcome = ["queued"] * num_requests

    def gaps(self, row: int) -> list[float]:
        times = [time for time, _ in self.events[row]]
        return [later - earlier for earlier, later in pairwise(times)]

    def rows(self, *outcomes: str) -> list[int]:
        return [row for row, outcome in enumerate(self.outcome) if outcome in outcomes]


def tell(story: Any, history: list[tuple[int, list[int]]], multiple: bool) -> Naive:
    """Play acts: 0 absent, 1 no token, 2 to 8 a token, 9 several (or one), 10 ends, 11 aborted."""
    naive = Naive(5)
    for row in range(5):
        story.arrive(str(row), class_="even" if row % 2 == 0 else "odd")
    for duration, acts in history:
        emits, finished = {}, []
        for row in naive.rows("queued"):
            act = acts[row]
            if act == 11:
                story.abort(str(row))
                naive.outcome[row] = "aborted"
            elif act:
                emits[str(row)] = 0 if act == 1 else 1 + (multiple and act == 9) * (row + 1)
                if act == 10:
                    finished.append(str(row))
                    naive.outcome[row] = "completed"
        story.step(duration / 1000.0, emits, finished=finished)
        for request_id, count in emits.items():
            if count:
                naive.events[int(request_id)].append((story.now, count))
    return naive


@pytest.mark.parametrize("multiple", [False, True], ids=["one token", "several tokens"])
@given(history=HISTORY)
@settings(max_examples=50, deadline=None)
def test_runs_equal_every_token_kept(
    story: Callable[..., Any], multiple: bool, history: list[tuple[int, list[int]]]
) -> None:
    told = story()
    naive = tell(told, history, multiple)
    result = told.result(percentiles=(99.9,), save_detailed=True)
    requests = result.requests_table.to_pylist()
    for row, request in enumerate(requests):
        events, gaps = naive.events[row], naive.gaps(row)
        assert request["status"] == naive.outcome[row]
        assert request["output_length"] == sum(count for _, count in events)
        assert request["first_token_s"] == (events[0][0] if events else None)
        assert request["last_token_s"] == (events[-1][0] if events else None)
        assert request["max_itl_ms"] == (max(gaps) * 1000.0 if gaps else None)
        assert request["itl_ms"] == [gap * 1000.0 for gap in gaps]
        if events:
            total_ms = request["ttft_ms"] + sum(request["itl_ms"])
            assert total_ms == pytest.approx(request["e2el_ms"], abs=1e-6)
    pools = {
        "": naive.rows("completed"),
        "class.even.": [row for row in naive.rows("completed") if row % 2 == 0],
        "class.odd.": [row for row in naive.rows("completed") if row % 2 == 1],
    }
    for prefix, rows in pools.items():
        pool = [gap * 1000.0 for row in rows for gap in naive.gaps(row)]
        for name, percentile in [("p50", 50), ("p95", 95), ("p99", 99), ("p99.9", 99.9)]:
            expected = float(np.percentile(pool, percentile)) if pool else None
            assert result.summary_dict[f"{prefix}{name}_itl_ms"] == expected
        mean = result.summary_dict[f"{prefix}mean_itl_ms"]
        assert mean == (pytest.approx(np.mean(pool), abs=1e-9) if pool else None)


@given(history=HISTORY, bounds=st.tuples(st.integers(0, 600), st.integers(0, 600)))
@settings(max_examples=40, deadline=None)
def test_a_window_takes_the_gaps_that_end_in_it(
    story: Callable[..., Any], history: list[tuple[int, list[int]]], bounds: tuple[int, int]
) -> None:
    told = story()
    naive = tell(told, history, multiple=False)
    start_s, end_s = (bound / 1000.0 for bound in bounds)
    summary = told.summary(window_s=(start_s, end_s))
    pool = []
    for row in naive.rows("completed", "queued"):
        ends = [time for time, _ in naive.events[row]][1:]
        pool += [
            g * 1000.0 for g, e in zip(naive.gaps(row), ends, strict=True) if start_s <= e < end_s
        ]
    assert summary["window.p99_itl_ms"] == (float(np.percentile(pool, 99)) if pool else None)
    tokens = sum(
        count
        for row in naive.rows("completed", "queued")
        for time, count in naive.events[row]
        if start_s <= time < end_s
    )
    assert summary["window.total_output_tokens"] == tokens


@given(history=HISTORY)
@settings(max_examples=20, deadline=None)
def test_token_times_survive_the_tables(
    story: Callable[..., Any], history: list[tuple[int, list[int]]]
) -> None:
    told = story()
    tell(told, history, multiple=True)
    result = told.result()
    again = token_times(result.requests_table, result.steps_table)
    output = result.requests_table["output_length"].to_pylist()
    longest = result.requests_table["max_itl_ms"].to_pylist()
    assert again.num_tokens.tolist() == output
    assert [None if np.isnan(x) else x * 1000.0 for x in again.max_itl_s] == longest
