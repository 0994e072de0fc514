"""What `studies_gpu.py` measured, each cell beside its simulated twin, as tables of the studies."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from study_cases import Case, Column
from study_cells import NUM_GPU_BLOCKS, PARTS, Part, cells, swept_keys

import simserve

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
MEASURED = RESULTS / "studies_h200.json"
HOST_PARTS = ("schedule_s", "update_s", "prepare_s", "sync_s")
GRAPH_STEP, EAGER_STEP = "32*1@512", "2048"
"""Steps whose launches stand for those of all steps that replay a graph, and of all others."""


class Real(NamedTuple):
    """A cell that ran on the GPU, once or several times: then numbers are medians."""

    scenario: str | None
    values: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def number(self, key: str) -> Any:
        found = [row["summary"].get(key) for row in self.rows]
        if None in found or not isinstance(found[0], int | float):
            return found[0]
        return statistics.median(found)

    def step(self, key: str) -> Any:
        found = [row["steps"][key] for row in self.rows]
        return None if None in found else statistics.median(found)

    @property
    def host_share(self) -> float:
        """Percent of the steps' time that the GPU waits for the host."""
        steps = [row["steps"] for row in self.rows]
        host = sum(one["parts"][f"parts.{name}"] for one in steps for name in HOST_PARTS)
        return float(100 * host / sum(one["duration_s"] for one in steps))


class Pair(NamedTuple):
    """One cell in both worlds."""

    real: Real
    simulated: Case


Pairs = Sequence[Pair]
PairColumn = Callable[[Pair], str]


@cache
def measured() -> Mapping[str, Any] | None:
    """The file, or None if there is none."""
    if not MEASURED.exists():
        return None
    report: Mapping[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return report


@cache
def pairs(config: str) -> Pairs:
    """The cells of a configuration that have run, simulated with as many blocks."""
    report = measured()
    part = next(part for part in PARTS if part.config == config)
    if report is None:
        return []
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in report["cells"].items():
        if row["failure"] is None and row["config"] == config:
            rows.setdefault(name.partition("#")[0], []).append(row)
    if not rows:
        return []
    found = []
    for cell in cells(part, blocks_of(part, rows)):
        name = cell.name.partition("#")[0]
        if (ran := rows.pop(name, None)) is not None:
            scenario, values, loaded = cell.point.scenario, cell.point.values, cell.point.loaded
            assert loaded is not None
            simulated = Case(scenario, values, simserve.run(loaded))
            found.append(Pair(Real(scenario, values, ran), simulated))
    return found


def blocks_of(part: Part, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The pool of the machine, unless the configuration sweeps it."""
    if NUM_GPU_BLOCKS in swept_keys(part):
        return []
    (size,) = {row["summary"]["num_gpu_blocks"] for ran in rows.values() for row in ran}
    return [f"{NUM_GPU_BLOCKS}={size}"]


def same(column: Column) -> PairColumn:
    """What both have: a setting, a count that no clock moves."""
    return lambda pair: column(pair.simulated)


def both(column: Column) -> PairColumn:
    """Real / simulated; once if they say the same."""

    def found(pair: Pair) -> str:
        texts = [column(one) for one in pair]  # type: ignore[arg-type]
        return " / ".join(dict.fromkeys(texts))

    return found


def both_shares(column: Column) -> PairColumn:
    return lambda pair: f"{pair.real.host_share:.1f} % / {column(pair.simulated)}"


def real_step(key: str, digits: int = 2) -> PairColumn:
    """A number of the steps that only the real run has."""

    def found(pair: Pair) -> str:
        value = pair.real.step(key)
        return "–" if value is None else f"{value:,.{digits}f}"

    return found


def launches(pair: Pair) -> str:
    """Launches of kernels and graphs in all steps, from those of two kinds of step."""
    found = (measured() or {})["launches"]
    counts = []
    for case in (GRAPH_STEP, EAGER_STEP):
        row = found.get(case, {"failure": "not measured"})
        if row["failure"]:
            return "–"
        counts.append(row.get("num_graphs", 0) + row.get("num_kernels", 0))
    graphs = pair.real.step("num_decode_steps")
    total = counts[0] * graphs + counts[1] * (pair.real.step("num_steps") - graphs)
    return f"{total:,.0f}"


def pair_table(columns: Mapping[str, PairColumn], config: str) -> list[list[str]] | None:
    """A row a cell; None if nothing was measured."""
    found = pairs(config)
    if not found:
        return None
    return [list(columns), *([column(pair) for column in columns.values()] for pair in found)]


def kernels(names: Sequence[str]) -> list[Mapping[str, Any]] | None:
    """Rows of single kernels, in this order; None if one is missing."""
    report = measured()
    rows = [(report or {"kernels": {}})["kernels"].get(name) for name in names]
    if any(row is None or row["failure"] for row in rows):
        return None
    return rows


def microseconds(row: Mapping[str, Any]) -> float:
    return float(statistics.median(row["samples_us"]))


def provenance() -> str:
    """What ran, where and when, in a line."""
    report = measured()
    if report is None:
        return ""
    environment = report["environment"]
    gpu = ", ".join(dict.fromkeys(environment["gpu"].split(", ")))  # once for GPUs of one kind
    versions = report["machines"].get("blocks of 16", {}) | environment["packages"]
    code = report.get("code") or f"simserve at {commit(environment)}"
    sittings = " and ".join(f"{one['wall_s']:.0f}" for one in report["sittings"])
    left = f"; left out when time was up: {', '.join(report['left_out'])}"
    return (
        f"{gpu}, torch {versions['torch']}, Triton {versions['triton']}, {code}, "
        f"{report['date'][:10]}: `python benchmarks/studies_gpu.py`, {sittings} s"
        f"{left if report['left_out'] else ''}."
    )


def commit(environment: Mapping[str, Any]) -> str:
    found: str = environment["commit"] or "no commit"
    return found[:12] + (" with changes" if found.endswith("+") else "")
