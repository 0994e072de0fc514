"""Where a request's time went, on a run of ten steps that is small enough to follow by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.errors import RunDirectoryError
from simserve.metrics.result import RunResult
from simserve.report.blame import Culprit, Ledger
from simserve.report.division import Divider, Division, Part
from simserve.report.explanation import BAR_WIDTH, GLYPHS, Explanation, explain
from simserve.report.timeline import write_timeline
from tests.report.test_run_plot import toy_run

# Steps last 10 ms with decodes alone, 50 ms with a prompt in them.
#   step       0     1     2     3     4     5     6     7     8     9
ENDS_MS = [50, 60, 70, 120, 170, 180, 190, 240, 250, 260]
PREFILL = [99, 0, 0, 100, 150, 0, 0, 300, 0, 0]
#   a          P     D     D     D     D     D
#   b                      *     P100  P50   D     -     P200  D
#   c                                  P100        (preempts b in step 6) P100 in 7, D
# b arrives in step 1; c is there from the beginning of step 2 on and waits for budget.
REQUESTS: dict[str, list[Any]] = {
    "request_id": ["a", "b", "c", "late"],
    "class": ["chat", "document", None, None],
    "status": ["completed", "completed", "completed", "rejected"],
    "error": [None, None, None, "too long"],
    "arrival_time_s": [0.0, 0.055, 0.060, 0.2],
    "queued_s": [0.0, 0.060, 0.060, 0.2],
    "scheduled_s": [0.0, 0.070, 0.120, None],
    "ended_s": [0.180, 0.250, 0.260, 0.2],
    "input_length": [99, 160, 200, 9999],
    "output_length": [6, 4, 3, 0],
    "cached_tokens": [0, 10, 0, None],
    "recomputed_tokens": [0, 151, 0, 0],
    "num_preemptions": [0, 1, 0, 0],
    "ttft_ms": [50.0, 115.0, 180.0, None],
    "e2el_ms": [180.0, 195.0, 200.0, None],
    "token_run_first_step": [[0], [4, 7], [7], []],
    "token_run_num_steps": [[6], [2, 2], [3], []],
    "token_run_num_tokens": [[1], [1, 1], [1], []],
}
CHUNKS: dict[str, list[list[int]]] = {
    "prefill_chunk_step": [[0], [3, 4, 7], [4, 7], []],
    "prefill_chunk_num_tokens": [[99], [100, 50, 200], [100, 100], []],
}


def ten_steps(*, with_chunks: bool = True) -> RunResult:
    ends = np.array(ENDS_MS) / 1000
    steps = {
        "step_id": list(range(10)),
        "start_s": [0.0, *ends[:-1]],
        "end_s": ends.tolist(),
        "num_running": [1] * 10,
        "num_waiting": [0] * 10,
        "kv_cache_usage": [0.5] * 10,
        "num_scheduled": [1] * 10,
        "num_free_blocks": [9] * 10,
        "num_decode_tokens": [1] * 10,
        "num_prefill_tokens": PREFILL,
        "num_tokens": [count + 1 for count in PREFILL],
        "num_preempted": [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        "admission_stop": ["empty"] * 2 + ["blocks"] + ["budget"] * 7,
    }
    columns = {**REQUESTS, **(CHUNKS if with_chunks else {})}
    return RunResult(summary_dict={}, requests_table=pa.table(columns), steps_table=pa.table(steps))


def parts(result: RunResult, row: int) -> list[tuple[str, int]]:
    """Names and milliseconds of a request's merged pieces."""
    pieces = Divider(result).divide(row).merged()
    return [
        (Part(part).name, round(1000 * seconds))
        for part, seconds in zip(pieces.parts.tolist(), pieces.duration_s.tolist(), strict=True)
    ]


def test_a_request_that_others_stall() -> None:
    assert parts(ten_steps(), 0) == [
        ("PREFILL", 50),
        ("DECODE", 30),  # steps 1 and 2, and what step 3 would have taken alone
        ("STALLED", 40),
        ("DECODE", 10),
        ("STALLED", 40),
        ("DECODE", 10),
    ]


def test_a_request_that_is_preempted() -> None:
    assert parts(ten_steps(), 1) == [
        ("ARRIVING", 5),
        ("QUEUED", 10),
        ("PREFILL", 50),
        ("PREFILL", 50),
        ("DECODE", 10),
        ("PREEMPTED", 10),
        ("RECOMPUTED", 50),
        ("DECODE", 10),
    ]


def test_a_request_that_is_held_between_its_chunks() -> None:
    assert parts(ten_steps(), 2) == [
        ("QUEUED", 60),
        ("PREFILL", 50),
        ("HELD", 20),
        ("PREFILL", 50),
        ("DECODE", 20),
    ]


def test_a_request_that_never_ran() -> None:
    assert parts(ten_steps(), 3) == []


def test_without_chunks_a_prompt_is_one_stretch() -> None:
    named = parts(ten_steps(with_chunks=False), 2)
    assert [name for name, _ in named] == ["QUEUED", *["PREFILL"] * 4, "DECODE"]
    assert sum(ms for name, ms in named if name == "PREFILL") == 120


def test_without_a_step_that_only_decodes_nobody_knows_a_stall() -> None:
    result = ten_steps(with_chunks=False)
    steps = result.steps_table
    place = steps.column_names.index("num_prefill_tokens")
    result.steps_table = steps.set_column(place, "num_prefill_tokens", pa.array([7] * 10))
    assert parts(result, 0) == [("PREFILL", 50), ("DECODE", 130)]


def test_a_stall_is_shared_out_by_tokens() -> None:
    ledger = Ledger(Divider(ten_steps()))
    found = ledger.culprits(np.array([3, 4]), np.array([0.04, 0.04]), but=0)
    assert [(one.row, one.num_tokens) for one in found] == [(1, 150), (2, 100)]
    assert [one.seconds for one in found] == pytest.approx([0.04 + 0.04 / 3, 0.08 / 3])
    assert ledger.culprits(np.array([4]), np.array([0.1]), but=1) == [Culprit(2, 0.1, 100)]


def test_the_parts_of_every_request_are_its_latency() -> None:
    """Nothing is counted twice and nothing is left out, preemptions included."""
    result = toy_run(200)
    divider = Divider(result)
    requests = result.requests_table.to_pylist()
    assert result.summary_dict["num_preemptions"]
    for row, facts in enumerate(requests):
        pieces = divider.divide(row)
        assert np.all(pieces.start_s[1:] == pieces.end_s[:-1])
        assert pieces.start_s[0] == facts["arrival_time_s"]
        assert 1000 * pieces.duration_s.sum() == pytest.approx(facts["e2el_ms"])


def test_a_paragraph_says_it_in_words() -> None:
    told = explain(ten_steps(), "b").paragraph
    for sentence in (
        "b (document) brought a prompt of 160 tokens, 10 of them found in the prefix cache",
        "It got 4 tokens in 195 ms, the first after 115 ms.",
        "A step was running when it came, and went on for 5.00 ms.",
        "It queued for 10.0 ms: too few KV blocks were free.",
        "Its prompt was computed in 2 chunks (100, 50 tokens) in steps that took 100 ms.",
        "It was preempted once, stayed out for 10.0 ms and then spent 50.0 ms in steps with "
        "chunks of it; 151 tokens were computed a second time.",
    ):
        assert sentence in told


def test_a_paragraph_names_who_is_to_blame() -> None:
    result = ten_steps()
    assert (
        "2 of them took 80.0 ms longer than a step that only decodes, because they also computed "
        "prompts: that of b (150 tokens, 53.3 ms) and c (100 tokens, 26.7 ms)."
    ) in explain(result, "a").paragraph
    told = explain(result, "c").paragraph
    assert "the step's token budget was spent (83 % of the time)" in told
    assert "Meanwhile prompts were computed: that of b (100 tokens, 50.0 ms)." in told
    assert "In 2 steps (20.0 ms) it got no tokens although it was admitted." in told


def test_a_rejected_request_has_a_reason_and_no_bar() -> None:
    told = explain(ten_steps(), "late")
    assert "It was rejected: too long." in told.paragraph
    assert (told.bar, told.rows) == ("", [])


def test_the_bar_is_the_clock() -> None:
    told = explain(ten_steps(), "c")
    assert len(told.bar) == BAR_WIDTH
    assert told.bar == "░" * 22 + "█" * 18 + "-" * 7 + "█" * 18 + "=" * 7
    assert sum(share for *_, share in told.rows) == pytest.approx(1.0)


@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(Part), st.floats(1e-4, 1.0) | st.just(0.01)),
        min_size=1,
        max_size=60,
    )
)
def test_the_bar_hides_no_part_of_a_percent(pieces: list[tuple[Part, float]]) -> None:
    parts, seconds = zip(*pieces, strict=True)
    ends = np.cumsum(seconds)
    nothing = np.zeros(len(parts), dtype=np.int64)
    division = Division(np.array(parts), np.append(0.0, ends[:-1]), ends, nothing, nothing)
    bar = Explanation("a", "", division).bar
    assert len(bar) == BAR_WIDTH
    for part in set(parts):
        if division.seconds(part) >= 0.0101 * ends[-1]:
            assert GLYPHS[part][0] in bar, part


def test_short_stalls_between_decodes_have_their_share_of_the_bar() -> None:
    parts = np.tile([Part.DECODE, Part.STALLED], 500)
    ends = np.cumsum(np.tile([0.93, 0.07], 500))
    nothing = np.zeros(len(parts), dtype=np.int64)
    division = Division(parts, np.append(0.0, ends[:-1]), ends, nothing, nothing)
    bar = Explanation("a", "", division).bar
    assert bar.count(GLYPHS[Part.STALLED][0]) == 5  # of 72 cells


def test_old_run_directories_are_explained_as_far_as_they_go() -> None:
    told = explain(ten_steps(with_chunks=False), "a").paragraph
    assert "2 of them took 80.0 ms longer" in told
    assert "does not tell in which steps prompts were computed" in told


def test_an_unknown_request_is_an_error() -> None:
    with pytest.raises(RunDirectoryError, match=r"runs/x: has no request 'lat'.*'late'"):
        explain(ten_steps(), "lat", "runs/x")
    with pytest.raises(RunDirectoryError, match="its 4 requests begin with"):
        explain(ten_steps(), "zzzzzz")


# The timeline ---------------------------------------------------------------------------------


def events(**runs: RunResult) -> list[dict[str, Any]]:
    content = json.loads(write_timeline(runs))
    found: list[dict[str, Any]] = content["traceEvents"]
    return found


def test_a_timeline_has_steps_counters_and_preemptions() -> None:
    found = events(toy=ten_steps())
    steps = [e for e in found if e["ph"] == "X" and e["pid"] == 1]
    assert [e["ts"] for e in steps[:3]] == [0, 50_000, 60_000]
    assert [e["dur"] for e in steps[:3]] == [50_000, 10_000, 10_000]
    assert [e["name"] for e in steps[:3]] == ["mixed", "decode", "decode"]
    (instant,) = (e for e in found if e["ph"] == "i")
    assert (instant["name"], instant["ts"]) == ("1 preempted", 180_000)
    assert {e["name"] for e in found if e["ph"] == "C"} == {"requests", "KV cache (%)", "tokens"}


def test_counters_are_zero_where_nothing_runs() -> None:
    result = ten_steps()
    later = [*(np.array(ENDS_MS[:-1]) / 1000), 5.0]
    for name, values in (("start_s", [0.0, *later[:8], 4.0]), ("end_s", later)):
        place = result.steps_table.column_names.index(name)
        result.steps_table = result.steps_table.set_column(place, name, pa.array(values))
    found = [e for e in events(toy=result) if e["ph"] == "C" and e["name"] == "requests"]
    running = [(e["ts"], e["args"]["running"]) for e in found]
    assert running == [(0, 1), (250_000, 0), (4_000_000, 1)]


def test_a_request_holds_its_parts() -> None:
    """Perfetto nests slices of a thread by time: parts lie inside their request, one by one."""
    found = [e for e in events(toy=ten_steps()) if e["ph"] == "X" and e["pid"] == 2]
    (whole,) = (e for e in found if e["name"] == "b")
    end = whole["ts"] + whole["dur"]
    lane = [e for e in found if e["tid"] == whole["tid"] and e is not whole]
    inside = [e for e in lane if whole["ts"] <= e["ts"] < end]
    assert [e["name"] for e in inside] == [
        "waits for a step",
        "queued",
        "prefill",
        "prefill",
        "decode",
        "preempted",
        "prefill after preemption",
        "decode",
    ]
    assert inside[-1]["ts"] + inside[-1]["dur"] == end
    assert inside[2]["args"] == {"step_id": 3, "num_tokens": 100}
    assert whole["args"]["input_length"] == 160


def test_lanes_never_overlap() -> None:
    found = [e for e in events(toy=toy_run(200)) if e["ph"] == "X" and e["pid"] == 2]
    wholes = [e for e in found if "request_id" in e["args"]]
    assert len(wholes) == 200
    for lane in {e["tid"] for e in wholes}:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in wholes if e["tid"] == lane)
        assert all(a[1] <= b[0] + 0.002 for a, b in pairwise(spans))


def test_two_runs_share_a_clock() -> None:
    found = events(real=ten_steps(), simulated=ten_steps())
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {
        1: "real: engine",
        2: "real: requests",
        3: "simulated: engine",
        4: "simulated: requests",
    }
    starts = {pid: [e["ts"] for e in found if e["ph"] == "X" and e["pid"] == pid] for pid in names}
    assert starts[1] == starts[3]
    assert starts[2] == starts[4]
