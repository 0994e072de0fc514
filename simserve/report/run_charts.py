"""The charts of a run's page: what they show, as data for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simserve.metrics.arrow import column
from simserve.metrics.result import RunResult
from simserve.report.activity import decode_name, envelope, over_time, reach_of_batches
from simserve.report.curves import (
    LATENCIES,
    Distribution,
    distributions,
    is_wide,
    preemption_times,
    thinned,
)
from simserve.report.page import Chart, plain

__all__ = ["against_charts", "distribution_charts", "load_charts", "request_chart"]

CURVE_POINTS = 400
SLICES = 300
MAX_REQUESTS = 2_000
"""Points of the scatter plot."""


def distribution_charts(result: RunResult) -> list[Chart]:
    """TTFT, ITL and E2EL, one curve a class."""
    return [
        _distribution(title, distributions(result, metric, most=CURVE_POINTS), metric)
        for metric, title in LATENCIES.items()
    ]


def against_charts(real: RunResult, simulated: RunResult) -> list[Chart]:
    """The same of a real run and its simulation."""
    return [
        _distribution(
            title,
            [
                curve._replace(name=name)
                for name, run in (("real", real), ("simulated", simulated))
                for curve in distributions(run, metric, by_class=False, most=CURVE_POINTS)
            ],
            metric,
        )
        for metric, title in LATENCIES.items()
    ]


def _distribution(title: str, curves: Sequence[Distribution], metric: str) -> Chart:
    wide = is_wide([curve.values for curve in curves])[0]
    return {
        "title": title,
        "x": {"label": "ms", "log": wide},
        "y": {"label": "share of gaps" if metric == "itl" else "share of requests", "zero": True},
        "cumulative": True,
        "series": [
            {
                "name": curve.name,
                "colour": place,
                "dash": place % 2 == 1,
                "shape": "step",
                "x": plain(curve.values),
                "y": plain(curve.shares),
            }
            for place, curve in enumerate(curves)
        ],
    }


def load_charts(result: RunResult) -> list[Chart]:
    """Queues, KV cache and batches over time."""
    time = {"label": "time (s)"}

    def series(key: str, name: str, colour: int) -> dict[str, Any]:
        when, low, mean, high = envelope(over_time(result, key), SLICES)
        lines = {"x": plain(when), "y": plain(mean), "low": plain(low), "high": plain(high)}
        return {"name": name, "colour": colour, "shape": "step", **lines}

    decode = series("decode_tokens", decode_name(result), 4)
    prefill = series("prefill_tokens", "prefill", 0)
    top = [a + b for a, b in zip(decode["y"], prefill["y"], strict=True)]
    both = {"y": top, "base": decode["y"]}
    decodes, totals = (over_time(result, name) for name in ("decode_tokens", "num_tokens"))
    when, *highs = map(plain, reach_of_batches(decodes, totals, SLICES))
    shades = [
        {"colour": colour, "x": when, "y": high, "base": base}
        for colour, base, high in ((4, [0.0] * len(when), highs[0]), (0, *highs))
    ]
    stack = [{**prefill, "shape": "area", **both}, {**decode, "shape": "area"}]
    return [
        {
            "title": "Requests in the engine",
            "x": time,
            "y": {"label": "requests", "zero": True},
            "series": [series("num_running", "running", 0), series("num_waiting", "waiting", 1)],
        },
        {
            "title": "KV cache in use",
            "x": time,
            "y": {"label": "share of blocks", "zero": True, "max": 1},
            "series": [series("kv_cache_usage", "in use", 2)],
            "marks": {"name": "preemption", "colour": 1, "x": plain(preemption_times(result))},
        },
        {
            "title": "Tokens per step",
            "x": time,
            "y": {"label": "tokens", "zero": True},
            "series": stack,
            "shades": shades,
        },
        {
            "title": "Decode tokens per step",
            "x": time,
            "y": {"label": "tokens", "zero": True},
            "series": [decode],
        },
    ]


def request_chart(result: RunResult) -> Chart:
    """TTFT of each request over its arrival, coloured by class."""
    table = result.requests_table
    ttft = column(table, "ttft_ms")
    rows = np.flatnonzero(~np.isnan(ttft))
    kept = rows[thinned(len(rows), MAX_REQUESTS)]
    facts = table.select(["request_id", "class", "input_length", "output_length"]).take(kept)
    texts = [
        f"{fact['request_id']}: {fact['input_length']:,} + {fact['output_length']:,} tokens"
        for fact in facts.to_pylist()
    ]
    classes = np.array([name or "requests" for name in facts["class"].to_pylist()], dtype=object)
    names = sorted(set(classes))
    if len(names) > 7:
        classes, names = np.full(len(classes), "requests", dtype=object), ["requests"]
    arrival_s = column(table, "arrival_time_s")
    some = f", {len(kept):,} of {len(rows):,} requests" if len(kept) < len(rows) else ""
    return {
        "title": f"Time to first token by arrival{some}",
        "wide": True,
        "hover": "points",
        "x": {"label": "arrival (s)"},
        "y": {"label": "TTFT (ms)", "log": is_wide([ttft[kept]])[0]},
        "series": [
            {
                "name": name,
                "colour": place,
                "shape": "points",
                "x": plain(arrival_s[kept][classes == name]),
                "y": plain(ttft[kept][classes == name]),
                "text": [text for text, one in zip(texts, classes, strict=True) if one == name],
            }
            for place, name in enumerate(names)
        ],
    }
