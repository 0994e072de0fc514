"""Steps that were measured, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simserve.executor.real.bench.gpu_watch import GpuState
from simserve.executor.real.bench.step_cases import StepCase
from simserve.executor.real.bench.steps import StepSamples

__all__ = ["step_cells", "step_row"]


def step_row(case: StepCase, samples: StepSamples, state: GpuState | None = None) -> dict[str, Any]:
    """Medians in ms, and the samples that they are of. Parts that took no time are left out.

    `state` is that of the GPU meanwhile, if it is known.
    """
    return {
        "case": case.name,
        "shape": case.shape,
        "num_requests": len(case.requests),
        "num_tokens": case.num_tokens,
        "median_ms": _median_ms(samples.durations_s),
        "parts_ms": {
            name.removesuffix("_s"): _median_ms(values)
            for name, values in samples.parts.items()
            if name.endswith("_s") and any(values)
        },
        "gpu_state": state._asdict() if state is not None else None,
        "samples_s": samples.durations_s,
        "parts_samples": samples.parts,
    }


def step_cells(rows: Iterable[Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    """Cells of a table with a column for each part, under a header."""
    rows = list(rows)
    parts = list(dict.fromkeys(name for row in rows for name in row["parts_ms"]))
    cells = [["case", "requests", "tokens", "step ms", "min", "max", *parts, "MHz", "W"]]
    for row in rows:
        counts = [f"{row['num_requests']:,}", f"{row['num_tokens']:,}"]
        spread = [1e3 * bound for bound in (min(row["samples_s"]), max(row["samples_s"]))]
        found = [row["parts_ms"].get(name) for name in parts]
        numbers = [row["median_ms"], *spread, *found]
        shown = ["–" if value is None else f"{value:,.2f}" for value in numbers]
        state = row.get("gpu_state") or {}
        found = [state.get(name) for name in ("sm_clock_mhz", "power_w")]
        shown += ["–" if value is None else f"{value:,.0f}" for value in found]
        cells.append([row["case"], *counts, *shown])
    return cells


def _median_ms(values: Sequence[float]) -> float:
    return 1e3 * statistics.median(values)
