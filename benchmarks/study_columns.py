"""What the tables of the studies show of a case, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from study_cases import Case, Column, key, scenario, setting, share
from study_cells import BUDGET, THRESHOLD

PERCENTILES = ("p50", "p95", "p99")
LONG_TOKENS = 32_000 + 32
"""Of the long request of `study_traces.py`, with its answer."""


def long_throughput(case: Case) -> str:
    """Tokens of the long request over the time that it took."""
    return f"{1e3 * LONG_TOKENS / case.number('class.long.p50_e2el_ms'):,.0f}"


SHORT = {
    **{f"short TTFT {p}": key(f"class.short.{p}_ttft_ms") for p in PERCENTILES},
    **{f"short ITL {p}": key(f"class.short.{p}_itl_ms", 1) for p in PERCENTILES},
    "steps": key("num_steps"),
    "host share": share("schedule|inputs|update"),
}
LONG = {
    "long TTFT": key("class.long.p50_ttft_ms"),
    **{f"long ITL {p}": key(f"class.long.{p}_itl_ms", 1) for p in PERCENTILES},
    "long E2EL": key("class.long.p50_e2el_ms"),
    "long tokens/s": long_throughput,
    "all tokens/s": key("total_token_throughput"),
}
LONG_PREFILL = {
    "long_prefill_budget": {"long one": scenario, "budget": setting(BUDGET)},
    "long_prefill_threshold": {"long one": scenario, "threshold": setting(THRESHOLD)},
    "long_prefill_labels": {"settings": scenario},
}
"""By configuration, what tells its rows apart."""

LONG_CONTEXT = {
    "settings": scenario,
    "duration (s)": key("duration", 2),
    "TTFT p50": key("p50_ttft_ms"),
    "TTFT p99": key("p99_ttft_ms"),
    "ITL p99": key("p99_itl_ms", 1),
    "hit tokens": key("total_cached_tokens"),
    "steps": key("num_steps"),
    "most KV used (%)": key("max_kv_cache_usage", 1, 100.0),
}


def mean_of_requests(measure: Callable[[Any, int], Any]) -> Column:
    """Mean over requests of a number of their length at the end and the block size."""

    def column(case: Case) -> str:
        requests = case.result.requests
        length = (requests["input_length"] + requests["output_length"]).to_numpy()
        return f"{np.mean(measure(length, case.values['kv_cache.block_size'])):,.1f}"

    return column


def hit_percent(case: Case) -> float:
    """Of all prompt tokens, those that were found; each request counts once."""
    return float(100 * case.number("total_cached_tokens") / case.number("total_input_tokens"))


BLOCK_SIZE = {
    "block size": setting("kv_cache.block_size"),
    "blocks a table": mean_of_requests(lambda length, size: -(-length // size)),
    "tokens unused in the last block": mean_of_requests(lambda length, size: -length % size),
    "hit tokens": key("total_cached_tokens"),
    "of prompt tokens (%)": lambda case: f"{hit_percent(case):.1f}",
    "TTFT p50": key("p50_ttft_ms", 1),
    "most KV used (%)": key("max_kv_cache_usage", 1, 100.0),
}

PRESSURE = {
    "blocks": setting("kv_cache.num_gpu_blocks"),
    "max_num_seqs": setting("scheduler.max_num_seqs"),
    "mean running": key("mean_num_running", 1),
    "preemptions": key("num_preemptions"),
    "recomputed tokens": key("recomputed_tokens"),
    "TTFT p99": key("p99_ttft_ms"),
    "ITL p99": key("p99_itl_ms", 1),
    "tokens/s": key("output_throughput"),
    "goodput (requests/s)": key("request_goodput", 2),
}

ALLOCATOR = {
    "requests/s": setting("workload.synthetic.arrival.rate"),
    "allocator": setting("kv_cache.allocator"),
    "mean running": key("mean_num_running", 1),
    "most running": lambda case: f"{case.result.steps['num_running'].max():,}",
    "memory taken (%)": key("mean_kv_cache_usage", 1, 100.0),
    "reserved, unused tokens": key("mean_reserved_unused_tokens"),
    "TTFT p99": key("p99_ttft_ms"),
    "tokens/s": key("output_throughput"),
    "goodput (requests/s)": key("request_goodput", 2),
}

N, WIDTH = "workload.decoding.n", "workload.decoding.beam_width"


def whole_ms(case: Case) -> float:
    """Mean time until all sequences of a question are out; of one sequence, its own."""
    found = case.number("group.mean_e2el_ms")
    return float(case.number("mean_e2el_ms") if found is None else found)


def computed(case: Case) -> int:
    return int(case.number("num_prefill_tokens") + case.number("num_decode_tokens"))


def kv_blocks(case: Case) -> int:
    """Most blocks in use."""
    usable = case.number("num_gpu_blocks") - 1
    return round(case.number("max_kv_cache_usage") * usable)


SEQUENCES: dict[str, Callable[[Case], float]] = {
    "E2EL of all": whole_ms,
    "tokens computed": computed,
    "most KV blocks": kv_blocks,
}


def sequences(width: str) -> dict[str, Column]:
    """What n answers, or W beams, take."""

    def column(measure: Callable[[Case], float]) -> Column:
        return lambda case: f"{measure(case):,.0f}"

    return {
        "": scenario,
        width: setting(N if width == "n" else WIDTH),
        "most running": key("max_num_running"),
        **{name: column(measure) for name, measure in SEQUENCES.items()},
    }


WHOSE = {
    "template_equal_grouped.jsonl": "equal salts, grouped",
    "template_equal_interleaved.jsonl": "equal salts, in turns",
    "template_different_grouped.jsonl": "four salts, grouped",
    "template_different_interleaved.jsonl": "four salts, in turns",
    "template_unique.jsonl": "all unique",
}
"""By trace, what its tenants have in common and in which order they ask."""


def template_crossing(cells: Iterable[tuple[Case, str]]) -> list[list[str]]:
    """A row a length of the template, a column a trace; each case with the text to show."""
    rows: dict[str, dict[str, str]] = {}
    for case, text in cells:
        rows.setdefault(scenario(case), {})[case.values["workload.trace.path"]] = text
    body = ([length, *(row.get(path, "–") for path in WHOSE)] for length, row in rows.items())
    return [["template", *WHOSE.values()], *body]


TEMPLATE = {
    "TTFT p50": key("p50_ttft_ms", 1),
    "hit tokens": key("total_cached_tokens"),
    "of prompt tokens (%)": lambda case: f"{hit_percent(case):.1f}",
}
TEMPLATE_ORDER = {
    "requests": scenario,
    "blocks": setting("kv_cache.num_gpu_blocks"),
    **TEMPLATE,
    "evicted blocks": key("evicted_cached_blocks"),
}
