"""A history told in runs of equal steps comes to the same, bit for bit, as told step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# A run: the duration of each of its steps (ms), and how many of its requests end with it.
RUNS = st.lists(
    st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 2)), max_size=12
)


def tell(told: Any, runs: list[tuple[list[int], int]], at_once: bool) -> Any:
    """Two requests arrive before each run; the oldest ones end."""
    live: list[str] = []
    for number, (durations, num_ending) in enumerate(runs):
        for k in range(2):
            live.append(f"{number}.{k}")
            told.arrive(live[-1], at=max(told.now - 0.001, 0.0), class_="xy"[k])
        ending = live[:num_ending]
        seconds = [duration / 1000.0 for duration in durations]
        pieces = [seconds] if at_once else [[s] for s in seconds]
        offset = 0
        for piece in pieces:
            stop = offset + len(piece)
            told.step(
                piece,
                dict.fromkeys(live, 1),
                finished=ending if stop == len(seconds) else [],
                free=[90 - offset - k for k in range(len(piece))],
                parts={"gpu_s": [0.5 * s for s in piece]},
                stop="max_num_seqs" if number % 2 else "empty",
                waiting=number,
            )
            offset = stop
        live = live[num_ending:]
    return told.result(window_s=(0.05, None), goodput={"ttft": 20.0}, save_detailed=True)


@given(runs=RUNS)
@settings(max_examples=40, deadline=None)
def test_summary_and_tables_are_equal(
    story: Callable[..., Any], runs: list[tuple[list[int], int]]
) -> None:
    one, other = (tell(story(), runs, at_once) for at_once in (True, False))
    assert one.summary_dict == other.summary_dict
    assert one.steps_table.equals(other.steps_table)
    assert one.requests_table.equals(other.requests_table)


def test_the_files_are_equal_byte_for_byte(story: Callable[..., Any], tmp_path: Path) -> None:
    runs = [([5, 7, 9, 11], 1), ([3, 3, 3], 0), ([8], 2), ([1, 2, 3, 4, 5], 2)]
    for name, at_once in (("runs", True), ("steps", False)):
        tell(story(), runs, at_once).save(tmp_path / name)
    for file in ("summary.json", "requests.parquet", "steps.parquet", "config.yaml"):
        assert (tmp_path / "runs" / file).read_bytes() == (tmp_path / "steps" / file).read_bytes()


@pytest.mark.parametrize("num_records", [511, 512, 513, 1025])
def test_records_are_packed_without_loss(story: Callable[..., Any], num_records: int) -> None:
    told = story()
    told.arrive("a")
    for k in range(num_records):
        told.step(0.001, {"a": 1}, waiting=k, parts={"gpu_s": [0.1]} if k % 600 else {})
    table = told.result().steps_table
    assert table["num_waiting"].to_pylist() == list(range(num_records))
    parts = [0.1 if k % 600 else None for k in range(num_records)]
    assert table["parts.gpu_s"].to_pylist() == parts
