"""Pictures of one run, one matter each, for pages and notebooks. Each returns a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simserve.metrics.result import RunResult
from simserve.report.curves import LATENCIES, distributions
from simserve.report.panels import (
    draw_batches,
    draw_cache,
    draw_decodes,
    draw_distributions,
    draw_queues,
)
from simserve.report.style import COLOURS, dress, png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "draw_against",
    "draw_batch_composition",
    "draw_latencies",
    "draw_load",
    "relative_errors",
]

PERCENTILES = ("p50", "p95", "p99")


def draw_latencies(result: RunResult) -> bytes:
    """Distributions of TTFT, ITL and E2EL side by side, one curve a class."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(16, 4.8), dpi=100, layout="constrained")
        for axes, (metric, title) in zip(figure.subplots(1, 3), LATENCIES.items(), strict=True):
            what = "gaps" if metric == "itl" else "requests"
            draw_distributions(axes, distributions(result, metric), title, what)
        return png(figure)


def draw_load(result: RunResult) -> bytes:
    """Running and waiting requests, and KV cache in use, over time."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(10, 6.4), dpi=100, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        draw_queues(result, above)
        draw_cache(result, below)
        above.set_xlabel("")
        return png(figure)


def draw_batch_composition(result: RunResult) -> bytes:
    """Decode and prefill tokens of every step, stacked over time; below, decode alone."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(10, 6.4), dpi=100, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        draw_batches(result, above)
        draw_decodes(result, below)
        above.set_xlabel("")
        return png(figure)


def draw_against(real: RunResult, simulated: RunResult) -> bytes:
    """A simulation against the real run: their distributions, and how far percentiles are off."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(13, 9), dpi=100, layout="constrained")
        *three, last = figure.subplots(2, 2).flat
        for axes, (metric, title) in zip(three, LATENCIES.items(), strict=True):
            curves = [
                curve._replace(name=name)
                for name, run in (("real", real), ("simulated", simulated))
                for curve in distributions(run, metric, by_class=False)
            ]
            draw_distributions(axes, curves, title, "gaps" if metric == "itl" else "requests")
        _draw_errors(last, real, simulated)
        return png(figure)


def _draw_errors(axes: Axes, real: RunResult, simulated: RunResult) -> None:
    """How far each percentile is off, as dots on one axis; the best ones stand on the zero line."""
    dress(axes, "Simulated against real", "error (%)", "")
    names = [(metric, percentile) for metric in LATENCIES for percentile in PERCENTILES]
    errors = relative_errors(real, simulated, [f"{p}_{metric}_ms" for metric, p in names])
    for place, ((metric, _), error) in enumerate(zip(names, errors, strict=True)):
        if error is not None:
            colour = COLOURS[list(LATENCIES).index(metric)]
            axes.plot([0.0, 100 * error], [place, place], color=colour, linewidth=1.0)
            axes.plot([100 * error], [place], "o", color=colour, markersize=6)
    axes.axvline(0.0, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(names)), [f"{metric.upper()} {p}" for metric, p in names])
    axes.invert_yaxis()
    axes.margins(x=0.15)


def relative_errors(
    real: RunResult, simulated: RunResult, keys: Sequence[str]
) -> list[float | None]:
    """(simulated − real) / real of numbers of the summaries; None where one has no such number."""
    errors: list[float | None] = []
    for key in keys:
        pair = [run.summary_dict.get(key) for run in (real, simulated)]
        measured, priced = (float(v) if isinstance(v, int | float) else None for v in pair)
        errors.append((priced - measured) / measured if measured and priced is not None else None)
    return errors
