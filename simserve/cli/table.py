"""A run's summary as tables on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simserve.metrics.options import Scalar
from simserve.report.outcomes import NONE_COMPLETED, cached_share, rejections

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_run"]

Summary = Mapping[str, Scalar]

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

_ORIGINS = ("decisions", "timing")
"""Whose rules formed the steps, and whose times they have: two things."""


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
    reasons = _reasons(directory) if summary.get("rejected") else []
    print_summary(summary, console, metrics=metrics, percentiles=percentiles, reasons=reasons)
    console.print(f"run directory: {directory}", highlight=False, soft_wrap=True)
    if picture is not None:
        console.print(f"picture:       {picture}", highlight=False, soft_wrap=True)


def print_summary(
    summary: Summary,
    console: Console,
    *,
    metrics: Sequence[str] | None = None,
    percentiles: Sequence[float] | None = None,
    reasons: Iterable[str] = (),
) -> None:
    """Print latencies, then counts and rates, of a flat summary with vLLM's keys.

    Args:
        summary: one entry of summary.json; a value of None is shown as a dash.
        console: where to print.
        metrics: latencies to show. None: TTFT, ITL, TPOT and E2EL.
        percentiles: columns to show beside the mean. None: 50, 95, 99.
        reasons: why requests were rejected.
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
    for name, value in _facts(summary, reasons).items():
        facts.add_row(name, value)
    console.print(facts)


def _facts(summary: Summary, reasons: Iterable[str]) -> dict[str, str]:
    """What stands below the latencies, in order. Nobody asked for goodput: it is left out."""
    facts = {
        "requests": _requests(summary, reasons),
        _clock(summary): f"{_number(summary.get('duration'))} s",
    }
    num_repetitions = summary.get("num_repetitions", 1)
    if num_repetitions != 1:
        facts = {"repetitions": f"{num_repetitions}: all numbers are means over them"} | facts
    if summary.get("num_steps") is not None:
        facts["steps"] = _count(summary["num_steps"])
    for key, (name, unit) in _RATES.items():
        if summary.get(key) is not None:
            facts[name] = f"{_number(summary[key])} {unit}"
    facts |= _cache(summary)
    facts |= _drafts(summary)
    facts["preemptions"] = _count(summary.get("num_preemptions"))
    return facts | {key: str(summary[key]) for key in _ORIGINS if summary.get(key) is not None}


def _clock(summary: Summary) -> str:
    return "measured time" if summary.get("timing") == "measured" else "simulated time"


def _requests(summary: Summary, reasons: Iterable[str]) -> str:
    parts = [f"{_count(summary.get('completed'))} completed"]
    parts += [
        f"{_count(summary[key])} {key}"
        for key in ("rejected", "aborted", "running", "queued")
        if summary.get(key)
    ]
    none = [] if summary.get("completed") else [NONE_COMPLETED]
    return "\n".join([", ".join(parts), *none, *reasons])


def _reasons(directory: Path) -> list[str]:
    """Why requests were rejected, of a run directory."""
    from pyarrow.parquet import read_table

    from simserve.metrics.table_file import REQUESTS

    errors = read_table(directory / REQUESTS, columns=["error"])["error"].to_pylist()
    return list(rejections(filter(None, errors)))


def _cache(summary: Summary) -> dict[str, str]:
    """Every prompt once, then vLLM's counter, which counts a waiting request at every try."""
    hits, queries = summary.get("prefix_cache_hits"), summary.get("prefix_cache_queries")
    if hits is None:
        return {"cached prompt tokens": "prefix caching off"}
    cached, prompts = (_count(summary.get(f"total_{key}_tokens")) for key in ("cached", "input"))
    share = cached_share(summary)
    percent = "" if share is None else f" ({100 * share:.1f} %)"
    note = summary.get("prefix_cache_note")
    return {
        "cached prompt tokens": f"{cached} of {prompts}{percent}" + (f"\n{note}" if note else ""),
        "prefix_cache_hits": f"{_count(hits)} of {_count(queries)} prefix_cache_queries "
        "(vLLM's counters: each try of a waiting request counts)",
    }


def _drafts(summary: Summary) -> dict[str, str]:
    """How many of the tokens that were drafted came out."""
    drafted, rate = (
        summary.get(f"spec_decode_{key}") for key in ("num_draft_tokens", "draft_acceptance_rate")
    )
    if not drafted or not isinstance(rate, float):
        return {}
    accepted = _count(summary.get("spec_decode_num_accepted_tokens"))
    return {"accepted draft tokens": f"{accepted} of {_count(drafted)} ({100 * rate:.1f} %)"}


def _count(value: object) -> str:
    """A count; the mean of several may be a fraction."""
    return _number(int(value) if isinstance(value, float) and value.is_integer() else value)


def _number(value: object) -> str:
    """Integers in full; floats to two decimals, tiny ones to three digits; None as a dash."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:,.2f}"
    return "–" if value is None else str(value)
