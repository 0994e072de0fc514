"""How a result shows itself in Jupyter: a table of latencies, their distributions, what is odd."""

from __future__ import annotations

import io
from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from simserve.metrics.arrow import column
from simserve.metrics.quantiles import Sample
from simserve.metrics.tables import token_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simserve.metrics.result import RunResult

__all__ = ["as_html", "draw"]

TABLE_METRICS = ("ttft", "itl", "tpot", "e2el")
TABLE_STATISTICS = ("mean", "p50", "p95", "p99")
FACTS = {
    "completed": "",
    "failed": "",
    "duration": " s",
    "output_throughput": " tokens/s",
    "num_preemptions": "",
}
"""With their units."""
DRAWN = ("ttft", "itl", "e2el")
WIDE = 20.0
"""From this ratio of the largest value to the smallest on, an axis is logarithmic."""


def as_html(result: RunResult) -> str:
    """The table, a picture if a request completed, and the warnings."""
    head = "".join(f"<th>{name} (ms)</th>" for name in TABLE_STATISTICS)
    rows = "".join(
        f"<tr><th>{metric.upper()}</th>"
        + "".join(f"<td>{_shown(result, f'{name}_{metric}_ms')}</td>" for name in TABLE_STATISTICS)
        + "</tr>"
        for metric in TABLE_METRICS
    )
    facts = ", ".join(f"{key} {_shown(result, key)}{unit}" for key, unit in FACTS.items())
    if (num_repetitions := result.summary_dict.get("num_repetitions", 1)) != 1:
        facts += f"; means over {num_repetitions} repetitions, curves of the first"
    picture = draw(result)
    image = (
        f'<img alt="distributions" src="data:image/png;base64,{b64encode(picture).decode()}">'
        if picture
        else ""
    )
    notes = "".join(f"<p>{escape(warning)}</p>" for warning in result.warnings)
    return f"<table><tr><th></th>{head}</tr>{rows}</table><p>{facts}</p>{image}{notes}"


def _shown(result: RunResult, key: str) -> str:
    value = result.summary_dict.get(key)
    if value is None:
        return "–"
    return f"{value:,.2f}" if isinstance(value, float) else escape(str(value))


def draw(result: RunResult) -> bytes | None:
    """Cumulative distributions of TTFT, ITL and E2EL over completed requests, as a PNG in the
    user's own style; None: no request completed."""
    samples = {metric: _sample(result, metric) for metric in DRAWN}
    if not samples["ttft"].size:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(DRAWN), sharey=True)
    for axes, (metric, sample) in zip(panels, samples.items(), strict=True):
        _draw_distribution(axes, sample, metric.upper())
    panels[0].set_ylabel("share")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _sample(result: RunResult, metric: str) -> Sample:
    """Milliseconds; ITL: every gap."""
    requests = result.requests_table
    completed = np.array([status == "completed" for status in requests["status"].to_pylist()], bool)
    if metric == "itl":
        return token_times(requests, result.steps_table).itl(completed).scaled(1000.0)
    values = column(requests, f"{metric}_ms")
    return Sample.of(values[completed & ~np.isnan(values)])


def _draw_distribution(axes: Axes, sample: Sample, name: str) -> None:
    axes.set_xlabel(f"{name} (ms)")
    axes.grid(alpha=0.3)
    if not sample.size:
        return
    axes.ecdf(sample.values, sample.weights, compress=True)
    low, high = sample.values.min(), sample.values.max()
    if low > 0 and high > WIDE * low:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:,g}")
