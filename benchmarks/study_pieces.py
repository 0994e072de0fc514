"""What runs on a machine of the studies: a cell, a step over and over, what a step launches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from study_cells import Cell

from simserve.api import run
from simserve.config.build import build
from simserve.config.loader import LoadedConfig
from simserve.executor.real.bench.step_cases import parse_step_case
from simserve.executor.real.bench.step_report import step_row
from simserve.executor.real.bench.steps import measure_steps
from simserve.metrics.result import RunResult

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine

LAUNCHES = re.compile(r"cu(da)?(LaunchKernel|GraphLaunch)\w*")
SUMMARY = re.compile(
    r"(class\.[^.]+\.)?(p50|p95|p99|mean)_(ttft|itl|e2el|tpot)_ms"
    r"|status|completed|duration|num_(steps|preemptions|gpu_blocks)|recomputed_tokens"
    r"|total_(cached|input|output)_tokens|(output|total_token)_throughput|request_goodput"
    r"|group\.mean_e2el_ms|num_(prefill|decode)_tokens|max_num_running"
    r"|mean_num_running|(max|mean)_kv_cache_usage|mean_reserved_unused_tokens"
    r"|evicted_cached_blocks|reachable_in_engine|seed"
)
REQUESTS = (
    "class", "arrival_time_s", "first_token_s", "ttft_ms", "e2el_ms", "max_itl_ms", "input_length",
    "output_length", "cached_tokens", "num_preemptions",
)  # fmt: skip
COUNTS = ("duration_s", "num_running", "num_prefill_tokens", "num_decode_tokens")


def run_cell(cell: Cell, opened: Machine) -> dict[str, Any]:
    """One real run and what is kept of it."""
    if cell.point.loaded is None:
        raise ValueError(f"its values do not go together: {cell.point.error}")
    result = run(cell.point.loaded, machine=opened)
    table = result.requests_table
    return {
        "config": cell.part.config,
        "scenario": cell.point.scenario,
        "values": cell.point.values,
        "overrides": list(cell.part.overrides),
        "summary": {k: v for k, v in result.summary_dict.items() if SUMMARY.fullmatch(k)},
        "requests": {name: rounded(table[name].to_pylist()) for name in REQUESTS},
        "steps": of_steps(result),
    }


def of_steps(result: RunResult) -> dict[str, Any]:
    """Sums over steps, and what one of decodes alone takes."""
    table = result.steps_table
    numbers = {
        name: table[name].to_numpy()
        for name in table.column_names
        if name.startswith("parts.") or name in COUNTS
    }
    alone = numbers["num_prefill_tokens"] == 0
    tokens = numbers["num_prefill_tokens"] + numbers["num_decode_tokens"]
    durations = numbers["duration_s"]
    return {
        "num_steps": len(alone),
        "num_decode_steps": int(alone.sum()),
        "median_decode_step_ms": 1e3 * float(np.median(durations[alone])) if alone.any() else None,
        "prefill_step_tokens": tokens[~alone].tolist(),
        "max_num_running": int(numbers["num_running"].max()),
        "duration_s": float(durations.sum()),
        "parts": {k: float(v.sum()) for k, v in numbers.items() if k.startswith("parts.")},
    }


def steps(
    loaded: LoadedConfig, opened: Machine, text: str, counts: tuple[int, int]
) -> dict[str, Any]:
    """A step of one shape over and over, as `simserve bench step` does."""
    parts = build(loaded, loaded.config.seed, machine=opened).parts
    case = parse_step_case(text)
    (samples,) = measure_steps(
        parts.executor,
        [case],
        block_size=parts.kv.block_size,
        num_gpu_blocks=parts.kv.num_gpu_blocks,
        num_warmup_steps=counts[0],
        num_steps=counts[1],
    )
    row = step_row(case, samples)
    return {name: row[name] for name in ("num_requests", "num_tokens", "median_ms", "parts_ms")} | {
        "samples_s": rounded(samples.durations_s)
    }


def launches(loaded: LoadedConfig, opened: Machine, case: str) -> dict[str, Any]:
    """Launches of kernels and graphs a step, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    num_steps = 4
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps(loaded, opened, case, (1, num_steps - 1))
    counts: Counter[str] = Counter()
    for event in profiler.key_averages():
        if LAUNCHES.fullmatch(event.key):
            counts["graphs" if "Graph" in event.key else "kernels"] += event.count
    return {"num_steps": num_steps, **{f"num_{k}": n / num_steps for k, n in counts.items()}}


def rounded(values: Sequence[Any]) -> list[Any]:
    """To a microsecond (a nanosecond of milliseconds)."""
    return [round(one, 6) if isinstance(one, float) else one for one in values]
