"""What `studies_gpu.py` measured, each cell beside its simulated twin, as tables of the studies."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from study_cases import Case, Column, simulated
from study_cells import NUM_GPU_BLOCKS, PARTS, Part, cells, swept_keys

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
MEASURED = RESULTS / "studies_h200.json"
HOST_PARTS = ("schedule_s", "update_s", "prepare_s", "sync_s")
DECODES, SMALL_STEP, LARGE_STEP = "32*1@512", "512@8000", "8192"
"""Steps whose launches stand for those of all decodes alone, and of all others by their tokens."""
SMALL_TOKENS = 2048
"""Up to so many, a step with prefills replays a graph."""


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
            real = Real(cell.point.scenario, cell.point.values, ran)
            found.append(Pair(real, simulated(cell.point)))
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


def launches(pair: Pair) -> str:
    """Launches of kernels and graphs in all steps, from those of a step of each kind; a dash where
    a kind was met that was not measured."""
    found = (measured() or {})["launches"]
    counts = []
    for case in (DECODES, SMALL_STEP, LARGE_STEP):
        row = found.get(case, {"failure": "not measured"})
        is_known = not row["failure"]
        counts.append(row.get("num_graphs", 0) + row.get("num_kernels", 0) if is_known else None)
    totals = []
    for row in pair.real.rows:
        steps = row["steps"]
        tokens = steps.get("prefill_step_tokens", [])
        num_small = sum(one <= SMALL_TOKENS for one in tokens)
        num_large = steps["num_steps"] - steps["num_decode_steps"] - num_small
        kinds = (steps["num_decode_steps"], num_small, num_large)
        met = [(n, count) for n, count in zip(kinds, counts, strict=True) if n]
        if any(count is None for _, count in met):
            return "–"
        totals.append(sum(n * count for n, count in met))
    return f"{statistics.median(totals):,.0f}"


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
    """What ran, where and when, in a line; then what is still there of sittings of other code."""
    report = measured()
    if report is None:
        return ""
    environment = report["environment"]
    gpu = ", ".join(dict.fromkeys(environment["gpu"].split(", ")))  # once for GPUs of one kind
    versions = report["machines"].get("blocks of 16", {}) | environment["packages"]
    last = report["sittings"][-1]
    walls = [one["wall_s"] for one in report["sittings"] if code(one) == code(last)]
    left = f"; left out when time was up: {', '.join(report['left_out'])}"
    older: dict[str, list[str]] = {}
    for one in (one for one in report["sittings"] if code(one) != code(last)):
        older.setdefault(code(one), []).extend(what_is_left(report, one))
    texts = [f"{', '.join(names)} ({at})" for at, names in older.items() if names]
    return (
        f"{gpu}, torch {versions['torch']}, Triton {versions['triton']}, {code(last)}: "
        f"`python benchmarks/studies_gpu.py`, {' and '.join(f'{wall:.0f}' for wall in walls)} s"
        f"{left if report['left_out'] else ''}."
        f"{' Of sittings before: ' * bool(texts)}{'; '.join(texts)}{'.' * bool(texts)}"
    )


def what_is_left(report: Mapping[str, Any], sitting: Mapping[str, Any]) -> Sequence[str]:
    """Configurations, ways of whole steps, and kernels, of which the tables show this sitting."""
    names = {
        kind: [
            (name, row)
            for name, row in report[kind].items()
            if row.get("sitting") == sitting["date"]
        ]
        for kind in ("cells", "steps", "kernels")
    }
    configs = [row["config"].replace("_", " ") for _, row in names["cells"]]
    ways = [f"steps by {way_name(name.partition(' ')[0])}" for name, _ in names["steps"]]
    return list(dict.fromkeys(configs + ways)) + ["single kernels"] * bool(names["kernels"])


def way_name(way: str) -> str:
    """Of a way to attend: V1 and V2 are names."""
    return way if way == "auto" else way.upper()


def code(sitting: Mapping[str, Any]) -> str:
    """What ran and on which day: what somebody has noted of the code, else its commit."""
    at = sitting.get("commit") or "no commit"
    changes = " with changes" * at.endswith("+")
    return f"{sitting.get('code') or f'simserve at {at[:12]}{changes}'}, {sitting['date'][:10]}"
