"""A run as a trace in Chrome's format, which Perfetto opens: steps, requests, KV use, preemptions.

The format: a JSON object with a list of events, times in microseconds. `X` is a slice with a
duration, `C` a counter, `i` an instant, `M` a name. Several runs stand one below the other on one
clock, each as a process for its steps and one for its requests.

Source: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from simserve.metrics.arrow import column
from simserve.metrics.result import RunResult
from simserve.report.activity import over_time, per_step
from simserve.report.division import Divider, Floats, Part

__all__ = ["Track", "write_timeline"]

T = TypeVar("T")

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
    "tokens": {"decode": "decode_tokens", "prefill": "prefill_tokens"},
}
STEP_FACTS = ("num_scheduled", "decode_tokens", "prefill_tokens", "num_free_blocks")
BLOCK = 1_000
"""Events of a line."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Track(Protocol):
    """Shows how far a long loop is."""

    def __call__(self, items: Sequence[T], what: str) -> Iterable[T]:
        """The same items, one after the other."""


def _silently(items: Sequence[T], what: str) -> Iterable[T]:
    return items


def write_timeline(runs: Mapping[str, RunResult], track: Track = _silently) -> str:
    """The JSON of a trace of runs by their names; equal runs give equal text."""
    events = _events(runs, track)
    lines = iter(lambda: ",".join(islice(events, BLOCK)), "")
    text = ",\n".join(lines)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{text}\n]}}\n'


def _events(runs: Mapping[str, RunResult], track: Track) -> Iterator[str]:
    """All events as JSON, run by run."""
    for number, (name, result) in enumerate(runs.items()):
        steps, requests = 2 * number + 1, 2 * number + 2
        for process, what in ((steps, "engine"), (requests, "requests")):
            title = f"{name}: {what}"
            yield _meta("process_name", process, 0, {"name": title})
            yield _meta("process_sort_index", process, 0, {"sort_index": process})
        yield from _steps(result, steps)
        yield from _counters(result, steps)
        yield from _requests(result, requests, track)


def _steps(result: RunResult, process: int) -> Iterator[str]:
    """A slice a step, and an instant where somebody was preempted."""
    yield _meta("thread_name", process, 1, {"name": "steps"})
    table = result.steps_table
    starts, ends, preempted = (
        column(table, name) for name in ("start_s", "end_s", "num_preempted")
    )
    facts = {"step_id": column(table, "step_id").tolist()}
    facts |= {name: per_step(result, name).tolist() for name in STEP_FACTS}
    facts["admission_stop"] = table["admission_stop"].to_pylist()
    # To a nanosecond; what a step did not do is left out.
    parts = {
        name: np.nan_to_num(column(table, name)).round(9).tolist()
        for name in table.column_names
        if name.startswith("parts.")
    }
    for row, (start, end) in enumerate(zip(_us(starts), _us(ends), strict=True)):
        args = {name: values[row] for name, values in facts.items()}
        args |= {name: values[row] for name, values in parts.items() if values[row]}
        kind = "prefill" if args["prefill_tokens"] else "decode"
        if args["prefill_tokens"] and args["decode_tokens"]:
            kind = "mixed"
        yield _slice(f'"{kind}"', process, 1, start, end, _encode(args))
        if preempted[row]:
            what = {"name": f"{preempted[row]} preempted", "ph": "i", "s": "p"}
            yield _encode({**what, "pid": process, "tid": 1, "ts": start})


def _counters(result: RunResult, process: int) -> Iterator[str]:
    """Counters at the start of every step and of the idle time behind it, where they change."""
    for title, series in COUNTERS.items():
        signals = [over_time(result, name) for name in series.values()]
        digits, scale = (2, 100.0) if "%" in title else (0, 1.0)
        rounded = [np.round(scale * signal.values, digits).tolist() for signal in signals]
        before = None
        for start, *values in zip(_us(signals[0].when_s[:-1]), *rounded, strict=True):
            if values != before:
                now = dict(zip(series, values if digits else map(int, values), strict=True))
                event = {"name": title, "ph": "C", "pid": process, "tid": 0, "ts": start}
                yield _encode({**event, "args": now})
            before = values


def _requests(result: RunResult, process: int, track: Track) -> Iterator[str]:
    """Each request as a slice with its parts below, on the first lane that is free."""
    divider = Divider(result)
    facts = result.requests_table.select(
        ["request_id", "class", "status", "input_length", "output_length", "cached_tokens"]
    ).to_pylist()
    rows = track(range(len(facts)), "dividing requests into pieces")
    divisions = [divider.divide(row).merged() for row in rows]
    known = [row for row, division in enumerate(divisions) if len(division.parts)]
    lanes = _lanes(
        (divisions[row].start_s[0].item(), divisions[row].end_s[-1].item()) for row in known
    )
    for lane in range(max(lanes, default=-1) + 1):
        yield _meta("thread_name", process, lane + 1, {"name": f"lane {lane + 1}"})
        yield _meta("thread_sort_index", process, lane + 1, {"sort_index": lane + 1})
    for row, lane in track(list(zip(known, lanes, strict=True)), "writing requests"):
        pieces = divisions[row]
        starts, ends = _us(pieces.start_s), _us(pieces.end_s)
        name, args = _encode(facts[row]["request_id"]), _encode(facts[row])
        yield _slice(name, process, lane + 1, starts[0], ends[-1], args)
        own = (array.tolist() for array in (pieces.parts, pieces.step, pieces.num_tokens))
        for start, end, part, step, tokens in zip(starts, ends, *own, strict=True):
            args = f'"step_id":{step}' if step >= 0 else ""
            args += f',"num_tokens":{tokens}' if tokens > 0 else ""
            yield _slice(f'"{NAMES[part]}"', process, lane + 1, start, end, f"{{{args}}}")


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


def _slice(name: str, process: int, thread: int, start: float, end: float, args: str) -> str:
    """Most events, written by hand: an encoder takes three times as long.

    `name` and `args` are JSON.
    """
    return (
        f'{{"name":{name},"ph":"X","pid":{process},"tid":{thread},'
        f'"ts":{start},"dur":{round(end - start, 3)},"args":{args}}}'
    )


def _meta(name: str, process: int, thread: int, args: Mapping[str, Any]) -> str:
    return _encode({"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(args)})


def _us(seconds: Floats) -> list[float]:
    return [round(one, 3) for one in (1e6 * seconds).tolist()]
