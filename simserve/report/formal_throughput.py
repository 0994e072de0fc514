"""Throughput in windows of one second, for its percentiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.arrow import column
from simserve.metrics.options import Scalar
from simserve.metrics.tables import token_times
from simserve.report.formal_facts import Lookup

__all__ = ["MEASURES", "REQUIRED", "Throughput", "measuring_window", "windowed_throughput"]

MEASURES = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
}
"""Keys of the summary, and what they are called."""
REQUIRED = (
    "status",
    "arrival_time_s",
    "ended_s",
    "first_token_s",
    "input_length",
    "token_run_first_step",
    "token_run_num_steps",
    "token_run_num_tokens",
)
"""Columns of requests.parquet that it takes."""

Floats = NDArray[np.float64]


class Throughput(NamedTuple):
    """Values per second, each of shape [windows]."""

    num_windows: int
    values: dict[str, Floats]
    """By key of `MEASURES`."""


def measuring_window(lookup: Lookup) -> tuple[float, float] | None:
    """Start and end on the engine's clock (s): those asked for, else the first arrival and the end
    of the last step. None: not recorded."""
    arrivals, ends = lookup.column("arrival_time_s"), lookup.step_column("end_s")
    if arrivals is None or not len(arrivals) or ends is None or not len(ends):
        return None
    start, end = float(arrivals.min()), float(ends.max())
    if lookup.window:
        summary = lookup.parts.summary
        start = _number(summary["window.start_s"] or 0.0)
        # An end that varies over repetitions was not asked for: it is where each of them ended.
        if "window.end_s_ci95_low" not in summary:
            end = _number(summary.get("window.end_s") or end)
    return (start, end) if np.isfinite((start, end)).all() else None


def _number(value: Scalar) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def windowed_throughput(lookup: Lookup, start_s: float, end_s: float) -> Throughput:
    """Throughput in each whole second from `start_s` on, counted as the summary counts it: a
    request when it completes, its prompt with the first token, a token when it comes out.

    Without a measuring window that was asked for, only what completed counts; within one, all but
    what failed.
    """
    requests, steps = lookup.parts.requests, lookup.parts.steps
    assert requests is not None
    assert steps is not None
    num_windows = int(end_s - start_s)
    completed = lookup.completed()
    counted = ~lookup.has_status("rejected", "aborted") if lookup.window else completed
    times = token_times(requests, steps)

    def per_second(when_s: Floats, weights: NDArray[np.int64]) -> Floats:
        """Sums of `weights` by the second in which they fall."""
        inside = (when_s >= start_s) & (when_s <= start_s + num_windows)
        # What happens just when the last window ends belongs to it.
        places = np.minimum((when_s[inside] - start_s).astype(np.int64), num_windows - 1)
        sums: Floats = np.bincount(places, weights[inside], num_windows).astype(np.float64)
        return sums

    if num_windows < 1:
        return Throughput(0, {})
    ended, first = column(requests, "ended_s"), column(requests, "first_token_s")
    output = per_second(times.ends_s, times.tokens_per_step(counted))
    prompts = per_second(first[counted], column(requests, "input_length")[counted])
    done = per_second(ended[completed], np.ones(int(completed.sum()), dtype=np.int64))
    values = (done, output, prompts + output)
    return Throughput(num_windows, dict(zip(MEASURES, values, strict=True)))
