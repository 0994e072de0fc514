"""A run as a trace in Chrome's format, which Perfetto opens: steps, requests, KV use, preemptions.

The format: a JSON object with a list of events, times in microseconds. `X` is a slice with a
duration, `C` a counter, `i` an instant, `M` a name. Several runs stand one below the other on one
clock, each as a process for its steps and one for its requests.

Source: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from simserve.metrics.arrow import column
from simserve.metrics.result import RunResult
from simserve.report.division import Divider, Part

__all__ = ["trace_events", "write_timeline"]

Event = dict[str, Any]

NAMES = {
    Part.ARRIVING: "waits for a step",
    Part.QUEUED: "queued",
    Part.PREFILL: "prefill",
    Part.HELD: "held",
    Part.PREEMPTED: "preempted",
    Part.RECOMPUTED: "prefill after preemption",
    Part.DECODE: "decode",
    Part.STALLED: "stalled",
}
COUNTERS = {
    "requests": {"running": "num_running", "waiting": "num_waiting"},
    "KV cache (%)": {"in use": "kv_cache_usage"},
    "tokens": {"decode": "num_decode_tokens", "prefill": "num_prefill_tokens"},
}
STEP_FACTS = ("num_scheduled", "num_decode_tokens", "num_prefill_tokens", "num_free_blocks")


def write_timeline(runs: Mapping[str, RunResult]) -> str:
    """The JSON of a trace of runs by their names; equal runs give equal text."""
    lines = ",\n".join(
        json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in trace_events(runs)
    )
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def trace_events(runs: Mapping[str, RunResult]) -> Iterator[Event]:
    """All events, run by run."""
    for number, (name, result) in enumerate(runs.items()):
        steps, requests = 2 * number + 1, 2 * number + 2
        for process, what in ((steps, "engine"), (requests, "requests")):
            title = f"{name}: {what}"
            yield _meta("process_name", process, 0, {"name": title})
            yield _meta("process_sort_index", process, 0, {"sort_index": process})
        yield from _steps(result, steps)
        yield from _counters(result, steps)
        yield from _requests(result, requests)


def _steps(result: RunResult, process: int) -> Iterator[Event]:
    """A slice a step, and an instant where somebody was preempted."""
    yield _meta("thread_name", process, 1, {"name": "steps"})
    table = result.steps_table
    parts = [name for name in table.column_names if name.startswith("parts.")]
    rows = table.select(
        ["step_id", "start_s", "end_s", "num_preempted", "admission_stop", *STEP_FACTS, *parts]
    )
    for row in rows.to_pylist():
        start = _us(row["start_s"])
        kind = "prefill" if row["num_prefill_tokens"] else "decode"
        if row["num_prefill_tokens"] and row["num_decode_tokens"]:
            kind = "mixed"
        facts = {key: row[key] for key in ("step_id", *STEP_FACTS, "admission_stop")}
        facts |= {name: row[name] for name in parts if row[name] is not None}
        yield _slice(kind, process, 1, start, _us(row["end_s"]), facts)
        if row["num_preempted"]:
            yield {
                "name": f"{row['num_preempted']} preempted",
                "ph": "i",
                "s": "p",
                "pid": process,
                "tid": 1,
                "ts": start,
            }


def _counters(result: RunResult, process: int) -> Iterator[Event]:
    """Counters at the start of every step, where they change."""
    starts = column(result.steps_table, "start_s").tolist()
    for title, series in COUNTERS.items():
        columns = [column(result.steps_table, name).tolist() for name in series.values()]
        before = None
        for start, *values in zip(starts, *columns, strict=True):
            now = [round(100 * v, 2) for v in values] if "%" in title else values
            if now != before:
                args = dict(zip(series, now, strict=True))
                yield {
                    "name": title,
                    "ph": "C",
                    "pid": process,
                    "tid": 0,
                    "ts": _us(start),
                    "args": args,
                }
            before = now


def _requests(result: RunResult, process: int) -> Iterator[Event]:
    """Each request as a slice with its parts below, on the first lane that is free."""
    divider = Divider(result)
    facts = result.requests_table.select(
        ["request_id", "class", "status", "input_length", "output_length", "cached_tokens"]
    ).to_pylist()
    divisions = [divider.divide(row).merged() for row in range(len(facts))]
    known = [row for row, division in enumerate(divisions) if len(division.parts)]
    lanes = _lanes(
        (divisions[row].start_s[0].item(), divisions[row].end_s[-1].item()) for row in known
    )
    for lane in range(max(lanes, default=-1) + 1):
        yield _meta("thread_name", process, lane + 1, {"name": f"lane {lane + 1}"})
        yield _meta("thread_sort_index", process, lane + 1, {"sort_index": lane + 1})
    for row, lane in zip(known, lanes, strict=True):
        pieces = divisions[row]
        first, last = _us(pieces.start_s[0]), _us(pieces.end_s[-1])
        yield _slice(facts[row]["request_id"], process, lane + 1, first, last, facts[row])
        for part, start, end, step, tokens in zip(
            *(array.tolist() for array in pieces), strict=True
        ):
            args = {"step_id": step} if step >= 0 else {}
            args |= {"num_tokens": tokens} if tokens > 0 else {}
            yield _slice(NAMES[Part(part)], process, lane + 1, _us(start), _us(end), args)


def _lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """A lane for each span, so that spans of one lane do not overlap and lanes are few.

    >>> _lanes([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)])
    [0, 1, 0]
    """
    spans = list(spans)
    lanes = [0] * len(spans)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for place in sorted(range(len(spans)), key=lambda place: spans[place]):
        start, end = spans[place]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lanes[place]))
    return lanes


def _slice(
    name: str, process: int, thread: int, start: float, end: float, args: Mapping[str, Any]
) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": round(end - start, 3),
        "args": dict(args),
    }


def _meta(name: str, process: int, thread: int, args: Mapping[str, Any]) -> Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(args)}


def _us(seconds: float) -> float:
    return round(1e6 * float(seconds), 3)
