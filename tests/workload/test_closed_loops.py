"""Traces in which requests wait for others: they do so in every kind of run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from simserve import run
from simserve.metrics.rundir import read_run
from simserve.sweep.runner import run_sweep
from simserve.workload.stats import read_columns
from simserve.workload.trace import open_trace, write_trace

TraceFile = Callable[..., Path]

THINK_S = 2.0
BASE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "scheduler": {"max_num_seqs": 8},
    "kv_cache": {"num_gpu_blocks": 100},
    "executor": {"cost": {"kind": "formula", "base_s": 0.1}},
    "metrics": {"plot": False},
}
STARTS_S = {"s": 0.0, "t": 0.125}
"""Two sessions of two turns: 9 tokens, which take 0.9 s, and 1 token."""


def _simserve() -> Iterable[Mapping[str, Any]]:
    for name, at in STARTS_S.items():
        one = {"session": name, "arrival_s": at, "prompt_len": 8}
        yield {**one, "request_id": name, "turn": 0, "output_len": 9}
        yield {**one, "turn": 1, "output_len": 1, "parent": name, "think_time_s": THINK_S}


def _mooncake() -> Iterable[Mapping[str, Any]]:
    for name, at in STARTS_S.items():
        one = {"session_id": name, "input_length": 8}
        yield {**one, "timestamp": at * 1000, "output_length": 9}
        yield {**one, "delay": THINK_S * 1000, "output_length": 1}


def _llmservingsim() -> Iterable[Mapping[str, Any]]:
    first = {"input_toks": 8, "output_toks": 9, "tool_duration_ns": THINK_S * 1e9}
    calls = [first, {"input_toks": 8, "output_toks": 1}]
    for name, at in STARTS_S.items():
        yield {"session_id": name, "arrival_time_ns": int(at * 1e9), "sub_requests": calls}


def _dynamo() -> Iterable[Mapping[str, Any]]:
    def ended(name: str, at: float, end: float, output_tokens: int) -> Mapping[str, Any]:
        request = {"request_received_ms": int(at * 1000), "input_tokens": 8}
        return {
            "schema": "dynamo.request.trace.v1",
            "event_type": "request_end",
            "event_time_unix_ms": int(end * 1000),
            "agent_context": {"session_id": name},
            "request": {**request, "output_tokens": output_tokens},
        }

    # Where they were recorded, first turns took 0.05 s.
    firsts = [ended(name, at, at + 0.05, 9) for name, at in STARTS_S.items()]
    later = {name: at + 0.05 + THINK_S for name, at in STARTS_S.items()}
    return firsts + [ended(name, at, at + 0.05, 1) for name, at in later.items()]


FORMATS = {
    "simserve": _simserve,
    "mooncake": _mooncake,
    "llmservingsim": _llmservingsim,
    "dynamo": _dynamo,
}


def trace_of(trace_file: TraceFile, format: str) -> dict[str, Any]:
    rows = "".join(json.dumps(row) + "\n" for row in FORMATS[format]())
    options = {"closed_loop": True} if format == "dynamo" else {}
    path = str(trace_file(rows, f"{format}.jsonl"))
    return {"path": path, "format": format, "options": options}


def sessions_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Turns by session, in order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["turn"]):
        found.setdefault(row["session"], []).append(row)
    return found


def assert_waits(rows: Iterable[Mapping[str, Any]], think_s: float = THINK_S) -> None:
    sessions = sessions_of(rows)
    assert sessions
    for first, second in sessions.values():
        assert second["arrival_time_s"] == pytest.approx(first["last_token_s"] + think_s, abs=1e-9)


@pytest.mark.parametrize("format", FORMATS)
class TestEveryFormat:
    @pytest.mark.parametrize(
        ("changes", "think_s", "starts_s"),
        [
            ({}, THINK_S, [0.0, 0.125]),
            ({"speedup": 4}, THINK_S / 4, [0.0, 0.03125]),
            ({"end_s": 3.0}, THINK_S, [0.0, 0.125]),
            ({"start_s": 0.0625}, THINK_S, [0.0625]),
            ({"spread_ties_s": 0.1}, THINK_S, [0.0, 0.125]),
        ],
        ids=["as it is", "faster", "up to a time", "from a time on", "no ties to spread"],
    )
    def test_a_turn_starts_after_the_end_of_the_one_before(
        self,
        trace_file: TraceFile,
        format: str,
        changes: dict[str, Any],
        think_s: float,
        starts_s: list[float],
    ) -> None:
        trace = trace_of(trace_file, format) | changes
        rows = run({**BASE, "workload": {"trace": trace}}).requests_table.to_pylist()
        if "start_s" in changes and format == "dynamo":
            # Its later turns have times of their own: one whose parent is cut off stays, alone.
            (lost,) = [row for row in rows if row["session"] == "s"]
            assert lost["arrival_time_s"] == STARTS_S["s"] + 0.05 + THINK_S - changes["start_s"]
            rows.remove(lost)
        assert_waits(rows, think_s)
        assert [turns[0]["arrival_time_s"] for turns in sessions_of(rows).values()] == starts_s

    def test_with_so_many_in_flight_a_turn_waits_for_its_slot_too(
        self, trace_file: TraceFile, format: str
    ) -> None:
        workload = {"trace": trace_of(trace_file, format), "max_concurrency": 1}
        rows = run({**BASE, "workload": workload}).requests_table.to_pylist()
        assert_waits(rows)
        (s, _), (t, _) = sessions_of(rows).values()
        assert t["arrival_time_s"] == s["last_token_s"]

    def test_in_every_repetition(self, trace_file: TraceFile, format: str) -> None:
        metrics = {**BASE["metrics"], "repetitions": 2}
        config = {**BASE, "metrics": metrics, "workload": {"trace": trace_of(trace_file, format)}}
        result = run(config)
        assert_waits(result.requests_table.to_pylist())
        durations_s = [summary["duration"] for summary in result.repetitions]
        last_s = max(row["last_token_s"] for row in result.requests_table.to_pylist())
        assert durations_s == pytest.approx([last_s] * 2)


def test_at_every_point_of_a_sweep_in_processes_of_its_own(
    trace_file: TraceFile, tmp_path: Path
) -> None:
    scenarios = {
        format: {
            f"workload.trace.{key}": value for key, value in trace_of(trace_file, format).items()
        }
        for format in ("mooncake", "dynamo")
    }
    path = tmp_path / "sweep.yaml"
    workload = {"trace": {"path": "by scenario"}}
    sweep = {"type": "scenarios", "scenarios": scenarios}
    path.write_text(json.dumps({**BASE, "workload": workload, "sweep": sweep}))
    assert run_sweep(path, out=tmp_path / "out", jobs=2).num_failed == 0
    for format in scenarios:
        assert_waits(read_run(tmp_path / "out" / format).requests_table.to_pylist())


class TestTurnsThatSayWhenTheyArrive:
    """A turn arrives with the one before it at the earliest, wherever its own time would put it."""

    ROWS = (
        {"request_id": "alone", "arrival_s": 1, "prompt_len": 8, "output_len": 1},
        {"request_id": "s", "session": "s", "arrival_s": 5, "prompt_len": 8, "output_len": 9},
        {"session": "s", "arrival_s": 0, "prompt_len": 8, "output_len": 1, "turn": 1}
        | {"parent": "s", "think_time_s": THINK_S},
    )

    @pytest.mark.parametrize("changes", [{}, {"max_isl": 8}, {"start_s": 2}, {"end_s": 9}], ids=str)
    def test_they_wait_whatever_is_left_out(
        self, trace_file: TraceFile, changes: dict[str, Any]
    ) -> None:
        path = str(trace_file("".join(json.dumps(row) + "\n" for row in self.ROWS)))
        config = {**BASE, "workload": {"trace": {"path": path, **changes}}}
        rows = run(config).requests_table.to_pylist()
        assert_waits(row for row in rows if row["session"])
        assert len(rows) == (2 if "start_s" in changes else 3)

    def test_what_is_written_can_be_read_again(self, trace_file: TraceFile, tmp_path: Path) -> None:
        trace = open_trace(trace_file("".join(json.dumps(row) + "\n" for row in self.ROWS)))
        requests = list(trace.requests())
        assert [(r.request_id, r.arrival_s) for r in requests] == [
            ("alone", 0),
            ("s", 4),
            ("r3", 4),
        ]
        write_trace(tmp_path / "again.jsonl", requests)
        assert list(open_trace(tmp_path / "again.jsonl").requests()) == requests

    def test_nor_do_they_tie_or_make_a_rate(self, trace_file: TraceFile) -> None:
        trace = open_trace(trace_file("".join(json.dumps(row) + "\n" for row in _mooncake())))
        report, stats = trace.report, read_columns(trace.requests()).stats()
        assert (report.num_requests, report.num_waiting, report.num_ties) == (4, 2, 0)
        assert report.rate_per_s == stats.rate_rps == 1 / STARTS_S["t"]
        assert (stats.num_requests, stats.num_ties) == (4, 0)
        assert not any("arrival time" in warning for warning in report.warnings)
