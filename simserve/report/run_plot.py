"""The picture of a run: how long users waited, and what the engine did meanwhile."""

from __future__ import annotations

from simserve.metrics.result import RunResult
from simserve.report.activity import OVER_TIME
from simserve.report.curves import LATENCIES, distributions
from simserve.report.panels import (
    draw_batches,
    draw_cache,
    draw_decodes,
    draw_distributions,
    draw_queues,
)
from simserve.report.style import QUIET, png, styled

__all__ = ["draw_run"]


def draw_run(result: RunResult) -> bytes:
    """A PNG of 1600 x 1000 pixels: TTFT and ITL distributions, queues, KV cache, batches."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(16, 10), dpi=100)
        left = figure.add_gridspec(2, 1, left=0.05, right=0.47, bottom=0.07, top=0.88, hspace=0.38)
        right = figure.add_gridspec(4, 1, left=0.55, right=0.98, bottom=0.07, top=0.9, hspace=0.32)
        ttft, itl = (figure.add_subplot(left[row]) for row in range(2))
        queues, cache, batch, decodes = (figure.add_subplot(right[row]) for row in range(4))
        figure.suptitle(_headline(result), x=0.05, y=0.97, ha="left", fontsize=15)
        figure.text(0.98, 0.955, OVER_TIME, ha="right", fontsize=10, color=QUIET)
        draw_distributions(ttft, distributions(result, "ttft"), LATENCIES["ttft"])
        draw_distributions(itl, distributions(result, "itl"), LATENCIES["itl"], "gaps")
        draw_queues(result, queues)
        draw_cache(result, cache)
        draw_batches(result, batch)
        draw_decodes(result, decodes)
        for axes in (queues, cache, batch):
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
        return png(figure)


def _headline(result: RunResult) -> str:
    summary = result.summary_dict
    name = summary.get("label") or summary.get("model_id") or summary.get("backend")
    if (num_repetitions := summary.get("num_repetitions", 1)) != 1:
        return f"{name}: the first of {num_repetitions} repetitions"
    text = f"{name}: {summary['completed']:,} of {summary['num_prompts']:,} requests completed"
    if summary.get("status") == "interrupted":
        text = f"{text} until it was interrupted"
    rate = summary.get("output_throughput")
    return text if rate is None else f"{text}, {rate:,.0f} output tokens/s"
