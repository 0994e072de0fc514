"""What pictures and pages draw of a run: curves with no more points than a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.arrow import column
from simserve.metrics.quantiles import Sample, percentiles
from simserve.metrics.result import RunResult
from simserve.metrics.tables import token_times

__all__ = [
    "LATENCIES",
    "MAX_POINTS",
    "Distribution",
    "distributions",
    "is_wide",
    "preemption_times",
    "thinned",
]

MAX_POINTS = 1_500
"""Points of a curve: about two per pixel of its width."""

MAX_CLASSES = 6
"""With more, curves could not be told apart: all are drawn as one."""

LATENCIES = {
    "ttft": "Time to first token (TTFT)",
    "itl": "Inter-token latency (ITL)",
    "e2el": "Whole request (E2EL)",
}
"""Latencies with a distribution worth looking at, and what they are called above a picture."""

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Distribution(NamedTuple):
    """A cumulative distribution as corners of a staircase that begins at share 0."""

    name: str
    values: Floats
    shares: Floats
    p99: float


def distributions(
    result: RunResult, metric: str, *, by_class: bool = True, most: int = MAX_POINTS
) -> list[Distribution]:
    """Cumulative distributions of `ttft`, `itl` or `e2el` (ms) over completed requests.

    One a class if wanted and there are two to six classes, else one of all; without empty ones.
    """
    groups = _groups(result, by_class)
    if metric == "itl":
        times = token_times(result.requests_table, result.steps_table)
        samples = [(name, times.itl(mask).scaled(1000.0)) for name, mask in groups]
    else:
        values = column(result.requests_table, f"{metric}_ms")
        known = ~np.isnan(values)
        samples = [(name, Sample.of(values[mask & known])) for name, mask in groups]
    return [_distribution(name, sample, most) for name, sample in samples if sample.size]


def _groups(result: RunResult, by_class: bool) -> list[tuple[str, Mask]]:
    """Names and masks over requests."""
    requests = result.requests_table
    completed = np.array(requests["status"].to_pylist(), dtype=object) == "completed"
    classes = np.array(requests["class"].to_pylist(), dtype=object)
    names = sorted({name for name in classes if name is not None})
    if not by_class or not 2 <= len(names) <= MAX_CLASSES:
        return [("all", completed)]
    return [(name, completed & (classes == name)) for name in names]


def _distribution(name: str, sample: Sample, most: int) -> Distribution:
    order = np.argsort(sample.values, kind="stable")
    values, ranks = sample.values[order], np.cumsum(sample.weights[order])
    if len(values) > most:
        # Evenly spaced ranks, and the tail, where the interesting values are, in full.
        even = np.searchsorted(ranks, np.linspace(0, ranks[-1], most), side="right")
        tail = np.arange(len(values) - most // 4, len(values))
        kept = np.unique(np.concatenate((np.minimum(even, len(values) - 1), tail)))
        values, ranks = values[kept], ranks[kept]
    return Distribution(
        name,
        np.concatenate((values[:1], values)),
        np.concatenate(([0.0], ranks / ranks[-1])),
        percentiles(sample, [99.0])[0] or 0.0,
    )


def preemption_times(result: RunResult) -> Floats:
    """Starts of the steps in which somebody was preempted (s), thinned."""
    preempted = column(result.steps_table, "num_preempted") > 0
    when = column(result.steps_table, "start_s")[preempted]
    return when[thinned(len(when), MAX_POINTS)]


def thinned(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` of the places 0 … count − 1, evenly spaced."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))


def is_wide(values: Sequence[NDArray[Any]]) -> tuple[bool, bool]:
    """Whether values call for a logarithmic axis, and for ticks at decades only."""
    points = np.concatenate([np.zeros(0), *values])
    if not len(points):
        return False, False
    smallest, largest = float(points.min()), float(points.max())
    return smallest > 0 and largest > 20 * smallest, largest > 500 * smallest
