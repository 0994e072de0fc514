"""A run's summary as tables on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_run", "print_summary"]

Summary = Mapping[str, object]

_LATENCIES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2el": "E2EL",
    "queue_time": "queue time",
}
_SHOWN = ("ttft", "itl", "tpot", "e2el")
_PERCENTILES = (50.0, 95.0, 99.0)
_RATES = {
    "request_throughput": ("request throughput", "requests/s"),
    "request_goodput": ("request goodput", "requests/s"),
    "output_throughput": ("output throughput", "tokens/s"),
    "total_token_throughput": ("total token throughput", "tokens/s"),
}


def print_run(
    summary: Summary,
    *,
    directory: Path,
    picture: Path | None,
    metrics: Sequence[str] | None = None,
    percentiles: Sequence[float] | None = None,
) -> None:
    """Print the summary of a run and where its files are."""
    from rich.console import Console

    console = Console()
    print_summary(summary, console, metrics=metrics, percentiles=percentiles)
    console.print(f"run directory: {directory}", highlight=False, soft_wrap=True)
    if picture is not None:
        console.print(f"picture:       {picture}", highlight=False, soft_wrap=True)


def print_summary(
    summary: Summary,
    console: Console,
    *,
    metrics: Sequence[str] | None = None,
    percentiles: Sequence[float] | None = None,
) -> None:
    """Print latencies, then counts and rates, of a flat summary with vLLM's keys.

    Args:
        summary: one entry of summary.json; a value of None is shown as a dash.
        console: where to print.
        metrics: latencies to show. None: TTFT, ITL, TPOT and E2EL.
        percentiles: columns to show beside the mean. None: 50, 95, 99.
    """
    from rich.table import Table

    chosen = list(dict.fromkeys(_PERCENTILES if percentiles is None else percentiles))
    table = Table(title="latency (ms)", title_justify="left")
    for name in ("", "mean", *(f"p{percentile:g}" for percentile in chosen)):
        table.add_column(name, justify="right" if name else "left")
    for metric in _SHOWN if metrics is None else metrics:
        if f"mean_{metric}_ms" in summary:
            names = ("mean", *(f"p{percentile:g}" for percentile in chosen))
            cells = [_number(summary.get(f"{name}_{metric}_ms")) for name in names]
            table.add_row(_LATENCIES.get(metric, metric), *cells)
    console.print(table)
    facts = Table(show_header=False)
    for name, value in _facts(summary).items():
        facts.add_row(name, value)
    console.print(facts)


def _facts(summary: Summary) -> dict[str, str]:
    """What stands below the latencies, in order. Nobody asked for goodput: it is left out."""
    facts = {
        "requests": _requests(summary),
        _clock(summary): f"{_number(summary.get('duration'))} s",
    }
    if summary.get("num_steps") is not None:
        facts["steps"] = _number(summary["num_steps"])
    for key, (name, unit) in _RATES.items():
        if summary.get(key) is not None:
            facts[name] = f"{_number(summary[key])} {unit}"
    facts["prefix-hit tokens"] = _prefix_hits(summary)
    facts["preemptions"] = _number(summary.get("num_preemptions"))
    return facts


def _clock(summary: Summary) -> str:
    return "measured time" if summary.get("timing") == "measured" else "simulated time"


def _requests(summary: Summary) -> str:
    parts = [f"{_number(summary.get('completed'))} completed"]
    parts += [
        f"{_number(summary[key])} {key}"
        for key in ("rejected", "aborted", "running", "queued")
        if summary.get(key)
    ]
    return ", ".join(parts)


def _prefix_hits(summary: Summary) -> str:
    hits, queries = summary.get("prefix_cache_hits"), summary.get("prefix_cache_queries")
    if hits is None:
        return "prefix caching off"
    text = f"{_number(hits)} of {_number(queries)} looked up"
    rate = summary.get("prefix_cache_hit_rate")
    if isinstance(rate, float):
        text += f" ({100 * rate:.1f} %)"
    note = summary.get("prefix_cache_note")
    return f"{text}\n{note}" if note else text


def _number(value: object) -> str:
    """Integers in full; floats to two decimals, tiny ones to three digits; None as a dash."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:,.2f}"
    return "–" if value is None else str(value)
