"""The second half of a formal report: what was measured, and how."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from simserve.report.formal_facts import Fact, Lookup, Section, figure, missing
from simserve.report.formal_throughput import (
    MEASURES,
    REQUIRED,
    Throughput,
    measuring_window,
    windowed_throughput,
)

__all__ = ["measured", "method"]

LATENCIES = {"ttft": "TTFT (ms)", "itl": "ITL (ms)", "e2el": "E2E (ms)"}
PERCENTILES = (50, 95, 99)
LONGEST_S = 1e7
"""Up to here, about four months, a measuring window is divided into seconds."""
STARTS = {
    "empty": "cold: the prefix cache was empty",
    "warm": "warm: the prefix cache held what serving the same requests once before had left",
    "off": "cold: there is no prefix cache",
}
CLOCKS = {
    "virtual": "virtual: time without work is passed over",
    "realtime": "realtime: arrivals are waited for",
}


def measured(lookup: Lookup) -> list[Section]:
    """Latencies and throughput, then cache and scheduler."""
    facts, rows = _latencies(lookup)
    more_facts, more_rows = _throughput(lookup)
    table = [["", "mean", *(f"p{p}" for p in PERCENTILES)], *rows, *more_rows]
    return [
        Section("Latency and throughput", [*facts, *more_facts], [table]),
        Section("KV cache and scheduler", _cache(lookup)),
    ]


def _latencies(lookup: Lookup) -> tuple[list[Fact], list[list[str]]]:
    """Rows as far as they are recorded, and a fact for each number that is not."""
    facts, rows = [], []
    for metric, title in LATENCIES.items():
        keys = [f"{lookup.window}{s}_{metric}_ms" for s in ("mean", *_percentile_names())]
        absent = [key for key in keys if key not in lookup.parts.summary]
        facts += [missing(f"{title.partition(' ')[0]} {key}", "summary.json") for key in absent]
        rows.append([title, *(_cell(lookup, key) for key in keys)])
    return facts, rows


def _percentile_names() -> Iterable[str]:
    return (f"p{percentile}" for percentile in PERCENTILES)


def _cell(lookup: Lookup, key: str) -> str:
    """A number, with its interval over repetitions if there are several."""
    summary = lookup.parts.summary
    if key not in summary:
        return "**missing**"
    low, high = summary.get(f"{key}_ci95_low"), summary.get(f"{key}_ci95_high")
    interval = "" if low is None or high is None else f" ({figure(low)} to {figure(high)})"
    return f"{figure(summary[key])}{interval}"


def _throughput(lookup: Lookup) -> tuple[list[Fact], list[list[str]]]:
    found = _windows(lookup)
    if isinstance(found, Fact):
        empty = ["**missing**"] * len(PERCENTILES)
        keys = [f"{lookup.window}{key}" for key in MEASURES]
        return [found], [
            [name, _cell(lookup, key), *empty]
            for name, key in zip(MEASURES.values(), keys, strict=True)
        ]
    facts, rows = [], []
    for key, name in MEASURES.items():
        if f"{lookup.window}{key}" not in lookup.parts.summary:
            facts.append(missing(f"mean {name}", f"summary.json: {lookup.window}{key}"))
        values = np.percentile(found.values[key], PERCENTILES)
        mean = _cell(lookup, f"{lookup.window}{key}")
        rows.append([name, mean, *(figure(float(value)) for value in values)])
    windows = f"percentiles over {found.num_windows:,} windows of 1 s inside the measuring window"
    return [*facts, Fact("throughput", windows + _of_the_first(lookup))], rows


def _windows(lookup: Lookup) -> Throughput | Fact:
    """Throughput by the second, or why it cannot be told."""
    name, parts = "throughput p50, p95, p99", lookup.parts
    if parts.requests is None or parts.steps is None:
        return missing(name, "requests.parquet, steps.parquet")
    columns = parts.requests.column_names
    absent = [f"requests.parquet: {one}" for one in REQUIRED if one not in columns]
    window = measuring_window(lookup)
    if absent or window is None:
        return missing(name, ", ".join(absent) or "steps.parquet: end_s")
    length = window[1] - window[0]
    if length > LONGEST_S:
        return missing(name, f"the measuring window of {length:.3g} s is too long to be divided")
    found = windowed_throughput(lookup, *window)
    if found.num_windows < 1:
        length = max(length, 0.0)
        return missing(name, f"the measuring window of {length:.3g} s holds no whole second")
    return found


def _of_the_first(lookup: Lookup) -> str:
    return ", of the first repetition" if _num_repetitions(lookup) != 1 else ""


def _num_repetitions(lookup: Lookup) -> int | None:
    """How many there were, not how many were asked for; None: not recorded."""
    if lookup.setting("metrics", "repetitions") is None:
        return None
    count = lookup.parts.summary.get("num_repetitions", 1)
    return count if isinstance(count, int) else None


def _cache(lookup: Lookup) -> list[Fact]:
    """Hits, blocks, preemptions: over the whole run, whatever the measuring window."""
    return [
        _hits(lookup),
        _blocks(lookup),
        _pressure(lookup),
        lookup.summary("preemptions", "num_preemptions"),
        lookup.summary("recomputed tokens", "recomputed_tokens"),
    ]


def _hits(lookup: Lookup) -> Fact:
    keys = ("total_cached_tokens", "prefix_cache_hits", "prefix_cache_queries")
    if lookup.parts.summary.get("prefix_cache_at_start") == "off":
        return Fact("hit tokens", "none: prefix caching was off")
    form = "{} at first admissions; over all lookups {} of {}"
    return lookup.summary("hit tokens", *keys, form=form)


def _blocks(lookup: Lookup) -> Fact:
    size = lookup.setting("kv_cache", "block_size")
    if not isinstance(size, int):
        return missing("KV blocks", "config.yaml: kv_cache.block_size")
    form = f"{{}} of {size} tokens, the null block included"
    return lookup.summary("KV blocks", "num_gpu_blocks", form=form)


def _pressure(lookup: Lookup) -> Fact:
    name, keys = "KV blocks in use", ("min_free_blocks", "evicted_cached_blocks")
    usage = lookup.parts.summary.get("max_kv_cache_usage")
    if not isinstance(usage, int | float):
        return missing(name, "summary.json: max_kv_cache_usage")
    form = f"{100 * usage:.1f} % at most, {{}} free at least; cached ones evicted: {{}}"
    return lookup.summary(name, *keys, form=form)


def method(lookup: Lookup) -> Section:
    """How the numbers were taken."""
    facts = [
        _status(lookup),
        _named(lookup, "start", "prefix_cache_at_start", STARTS),
        _warm_up(lookup),
        _repetitions(lookup),
        _window(lookup),
        _named(lookup, "clock", "clock", CLOCKS),
    ]
    if lookup.is_real:
        facts += [_compiled(lookup), lookup.known("date (UTC)", "date")]
    warnings = lookup.parts.env.get("warnings")
    if isinstance(warnings, list):
        facts += [Fact("warning of the run", str(one)) for one in warnings]
    return Section("Method", facts)


def _status(lookup: Lookup) -> Fact:
    fact = lookup.known("status", "status")
    if fact.missing or fact.value == "completed":
        return fact
    why = f"the rest of the run (status is {fact.value}: numbers are of what was done by then)"
    return Fact("status", fact.value, why)


def _named(lookup: Lookup, name: str, key: str, meanings: dict[str, str]) -> Fact:
    fact = lookup.known(name, key)
    return Fact(name, meanings.get(fact.value, fact.value), fact.missing)


def _warm_up(lookup: Lookup) -> Fact:
    fact = lookup.known("warm-up", "warm_up")
    window = measuring_window(lookup)
    times = lookup.column("arrival_time_s")
    if fact.missing or not lookup.window or window is None or times is None or not len(times):
        return fact
    before = window[0] - float(times.min())
    count = int((times < window[0]).sum())
    return Fact(
        fact.name,
        f"{fact.value}; then {before:,.3f} s of load before the measuring window, in which "
        f"{count:,} requests came",
    )


def _repetitions(lookup: Lookup) -> Fact:
    count, seed = _num_repetitions(lookup), lookup.setting("seed")
    if count is None or not isinstance(seed, int):
        return missing("repetitions", "config.yaml: metrics.repetitions, seed")
    if count == 1:
        return Fact("repetitions", f"1, seed {seed}")
    return Fact(
        "repetitions",
        f"{count}, seeds {seed} to {seed + count - 1}, each from a start of its own; numbers are "
        "means, in parentheses the 95 % bootstrap interval of the mean; lengths and arrivals are "
        "those of the first",
    )


def _window(lookup: Lookup) -> Fact:
    window = measuring_window(lookup)
    if window is None:
        return missing("measuring window", "requests.parquet: arrival_time_s, steps.parquet")
    if window[1] <= window[0]:
        why = f"config.yaml: metrics.window begins at {window[0]:,.3f} s, the run ended before"
        return missing("measuring window", why)
    what = "as configured" if lookup.window else "the whole run, from the first arrival"
    return Fact("measuring window", f"{window[0]:,.3f} s to {window[1]:,.3f} s, {what}")


def _compiled(lookup: Lookup) -> Fact:
    name, marks = "steps in which something was compiled", lookup.step_column("parts.first_shape")
    if marks is None:
        return missing(name, "steps.parquet: parts.first_shape")
    return Fact(name, f"{int((np.nan_to_num(marks) > 0).sum()):,}")
