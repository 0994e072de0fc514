"""The page of a run: what users felt, what the engine did, and where requests spent their time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from simserve.metrics.arrow import column
from simserve.metrics.options import Scalar
from simserve.metrics.result import RunResult
from simserve.report.activity import OVER_TIME
from simserve.report.division import Divider, Part
from simserve.report.explanation import GLYPHS
from simserve.report.figures import relative_errors
from simserve.report.outcomes import NONE_COMPLETED, cached_share, rejections
from simserve.report.page import Cell, Page, shown
from simserve.report.run_charts import (
    against_charts,
    distribution_charts,
    load_charts,
    request_chart,
)

__all__ = ["run_page"]

MAX_LISTED = 200
"""Rows of the table of requests: the slowest ones."""

METRICS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2el": "E2EL",
    "queue_time": "queue time",
}
REQUEST_FACTS = (
    "arrival_time_s",
    "input_length",
    "cached_tokens",
    "output_length",
    "num_preemptions",
    "queue_time_ms",
    "ttft_ms",
    "max_itl_ms",
    "e2el_ms",
)
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
TILES = {
    "duration": ("{} s", "from first arrival to end"),
    "request_throughput": ("{}", "requests/s"),
    "request_goodput": ("{}", "requests/s that met every objective"),
    "output_throughput": ("{}", "output tokens/s"),
    "p99_ttft_ms": ("{} ms", "p99 TTFT"),
    "p99_itl_ms": ("{} ms", "p99 ITL"),
    "num_preemptions": ("{}", "preemptions"),
}
SHARES = {
    "max_kv_cache_usage": "of KV blocks in use at most",
}
GROUP_TILES = {
    "group.completed": "requests of users completed",
    "group.mean_num_requests": "requests of the engine each, mean",
    "max_num_running": "sequences at a time at most",
    "num_computed_tokens": "tokens computed",
    "max_kv_blocks": "KV blocks in use at most",
    "max_unshared_kv_blocks": "KV blocks at most, if none were shared",
}
COLOURS = {
    Part.ARRIVING: 6,
    Part.QUEUED: 1,
    Part.PREFILL: 0,
    Part.HELD: 7,
    Part.PREEMPTED: 3,
    Part.RECOMPUTED: 5,
    Part.DECODE: 2,
    Part.STALLED: 4,
}


def run_page(runs: Mapping[str, RunResult]) -> str:
    """HTML of a run by its name; of a real run and its simulation, if there are two."""
    name, run = next(iter(runs.items()))
    summary = run.summary_dict
    page = Page(str(summary.get("label") or name), _subtitle(run))
    status = summary.get("status")
    if status != "completed":
        page.text(f"The run's status is {status}: numbers are of what was done by then.", "note")
    for note in _notes(run):
        page.text(note, "note")
    if (num_repetitions := summary.get("num_repetitions", 1)) != 1:
        page.text(
            f"Numbers are means over {num_repetitions} repetitions; curves and requests are those "
            "of the first.",
            "quiet",
        )
    _tiles(page, summary)
    if len(runs) == 2:
        _against(page, *runs.values())
    _latencies(page, run)
    if "group.num_prompts" in summary:
        _groups(page, summary)
    page.heading("The engine over time")
    page.text(f"{OVER_TIME[0].upper()}{OVER_TIME[1:]}.", "quiet")
    page.charts(load_charts(run), "pairs")
    _requests(page, run)
    page.heading("Configuration")
    page.folded("every setting, defaults written out", run.config)
    return page.render()


def _notes(run: RunResult) -> Iterator[str]:
    """What should not be overlooked."""
    summary = run.summary_dict
    if summary["num_prompts"] and not summary["completed"]:
        yield NONE_COMPLETED
    if summary.get("rejected"):
        yield from rejections(filter(None, run.requests_table["error"].to_pylist()))
    yield from run.warnings
    if note := summary.get("prefix_cache_note"):
        yield str(note)


def _subtitle(run: RunResult) -> str:
    summary, env = run.summary_dict, run.env
    facts = [
        f"{summary[key]}" if prefix is None else f"{prefix} {summary[key]}"
        for key, prefix in (
            ("model_id", None),
            ("gpu", None),
            ("decisions", "decisions of"),
            ("timing", "timing:"),
            ("seed", "seed"),
        )
        if summary.get(key) is not None
    ]
    if env.get("simserve"):
        facts.append(f"simserve {env['simserve']}")
    return " · ".join(facts)


def _tiles(page: Page, summary: Mapping[str, Scalar]) -> None:
    tiles = {f"of {shown(summary['num_prompts'])} requests completed": shown(summary["completed"])}
    if stopped := summary.get("completed_by_stop"):
        tiles["of them ended by a token"] = shown(stopped)
    for key in ("rejected", "aborted"):
        if summary.get(key):
            tiles[key] = shown(summary[key])
    for key, (form, name) in TILES.items():
        if summary.get(key) is not None:
            tiles[name] = form.format(shown(summary[key]))
    for key, name in SHARES.items():
        share = summary.get(key)
        if isinstance(share, float):
            tiles[name] = f"{100 * share:.1f} %"
    if (cached := cached_share(summary)) is not None:
        tiles["of prompt tokens came from the prefix cache"] = f"{100 * cached:.1f} %"
    page.tiles(tiles)
    if cached is not None:
        hits, queries = (shown(summary.get(f"prefix_cache_{key}")) for key in ("hits", "queries"))
        page.text(
            f"vLLM's counters prefix_cache_hits and prefix_cache_queries: {hits} of {queries} "
            "tokens; a request that waits is counted again at every try.",
            "quiet",
        )


def _latencies(page: Page, run: RunResult) -> None:
    summary = run.summary_dict
    page.heading("Latencies")
    rows = []
    classes = sorted({key.split(".")[1] for key in summary if key.startswith("class.")})
    for prefix, name in (("", "all"), *((f"class.{one}.", one) for one in classes)):
        for metric, title in METRICS.items():
            if f"{prefix}mean_{metric}_ms" in summary:
                values = [summary.get(f"{prefix}{s}_{metric}_ms") for s in STATISTICS]
                rows.append([title, name, *values])
    page.charts(distribution_charts(run))
    page.table(["latency (ms)", "requests", *STATISTICS], rows)


def _groups(page: Page, summary: Mapping[str, Scalar]) -> None:
    """Requests of users that were several of the engine."""
    page.heading("Requests of several sequences")
    page.tiles({name: shown(summary[key]) for key, name in GROUP_TILES.items()})
    rows = [
        [METRICS[metric], *(summary.get(f"group.{s}_{metric}_ms") for s in STATISTICS)]
        for metric in ("ttft", "e2el")
    ]
    page.table(["latency (ms)", *STATISTICS], rows)


def _against(page: Page, real: RunResult, simulated: RunResult) -> None:
    page.heading("Simulated against real")
    page.charts(against_charts(real, simulated))
    keys = {
        f"{percentile}_{metric}_ms": f"{METRICS[metric]} {percentile} (ms)"
        for metric in ("ttft", "itl", "e2el")
        for percentile in ("p50", "p95", "p99")
    }
    keys |= {"request_throughput": "requests/s", "output_throughput": "output tokens/s"}
    errors = relative_errors(real, simulated, list(keys))
    rows = [
        [
            name,
            real.summary_dict.get(key),
            simulated.summary_dict.get(key),
            None if error is None else round(100 * error, 2),
        ]
        for (key, name), error in zip(keys.items(), errors, strict=True)
    ]
    page.table(["", "real", "simulated", "error (%)"], rows)


def _requests(page: Page, run: RunResult) -> None:
    page.heading("Requests")
    page.charts([request_chart(run)])
    table = run.requests_table
    e2el = np.nan_to_num(column(table, "e2el_ms"), nan=np.inf)
    is_rejected = np.array([status == "rejected" for status in table["status"].to_pylist()], bool)
    slowest = np.lexsort((-e2el, is_rejected))[:MAX_LISTED]
    if len(slowest) < table.num_rows:
        page.text(f"The {len(slowest)} slowest of {table.num_rows:,} requests.", "quiet")
    legend = "".join(
        f'<span><i style="background:var(--c{COLOURS[part]})"></i>{GLYPHS[part][1]}</span>'
        for part in Part
    )
    page.html(f'<div class="bar-legend">{legend}</div>')
    divider = Divider(run)
    rows = [
        _request_row(facts, divider, int(row))
        for row, facts in zip(slowest, table.take(slowest).to_pylist(), strict=True)
    ]
    header = [
        "request",
        "where its time went",
        "class",
        "status",
        "arrival (s)",
        "prompt",
        "cached",
        "output",
    ]
    header += ["preemptions", "queue (ms)", "TTFT (ms)", "longest gap (ms)", "E2EL (ms)", "error"]
    page.table(header, rows)


def _request_row(facts: Mapping[str, Any], divider: Divider, row: int) -> list[object]:
    division = divider.divide(row)
    total = float(division.duration_s.sum())
    parts = [(part, division.seconds(part)) for part in Part]
    bar = "".join(
        f'<i style="width:{100 * seconds / total:.1f}%;background:var(--c{COLOURS[part]})" '
        f'title="{GLYPHS[part][1]}: {shown(1000 * seconds)} ms"></i>'
        for part, seconds in parts
        if seconds > 0
    )
    waiting = sum(s for part, s in parts if part not in (Part.PREFILL, Part.DECODE))
    share = waiting / total if total else None
    cell = Cell(f'<span class="bar">{bar}</span>', share)
    head = [facts["request_id"], cell, facts["class"] or "", facts["status"]]
    return [*head, *(facts[key] for key in REQUEST_FACTS), facts["error"] or ""]
