"""Why numbers of held-out workloads are beyond the limits of `simserve validate`.

    python benchmarks/accuracy_causes.py FOLDER    # of step logs (docs/log-format.md)
    python benchmarks/tables.py                    # then the table of docs/accuracy.md

Reads the profiles that ship, writes benchmarks/results/accuracy_causes.json.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import GPU, LONG_LOG, METRICS, MODELS, is_fitted, signed
from accuracy_host import HostCost, followed_run

from simserve.config.presets import load_gpu, load_model
from simserve.cost.noise import ResidualNoise
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import load_profile
from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.fit.host import engine_seconds
from simserve.fidelity.fit.host_speed import local_host_scale
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.logs.loaded_log import load_log
from simserve.fidelity.logs.measured import Measured, measured_log, measured_run
from simserve.fidelity.logs.vllm_log import StepLog, read_vllm_log
from simserve.fidelity.replay.log_run import simulate_log
from simserve.fidelity.validate.judged_logs import group_repeats
from simserve.fidelity.validate.timing import profile_timing
from simserve.fidelity.validate.workload import validate_workload
from simserve.protocols import CostModel, Price
from simserve.report.markdown import markdown_table
from simserve.types import StepRun

RESULTS = Path(__file__).resolve().parent / "results" / "accuracy_causes.json"
SEEDS = range(16)
HAIR = 0.01
"""Standard deviation of a change to each step time that no model could be blamed for."""
CAUSES = {
    "hair": "a hair: 1 % on single steps moves it across the limit",
    "host": "the host's speed in this run",
    "changes": "the host's changes of speed",
    "scatter": "scatter of single steps",
    "form": "prices",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    logs = [read_vllm_log(path) for path in sorted(parser.parse_args().folder.glob("*.json.gz"))]
    report = [row for model in MODELS for row in causes(model, logs)]
    RESULTS.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def causes(model: str, logs: Sequence[StepLog]) -> Iterator[dict[str, Any]]:
    """What was judged, and each miss with what is known of it."""
    held_out = [log for log in logs if load_log(log).model == model and not is_fitted(log)]
    ways: dict[str, tuple[float | None, list[list[StepLog]]]] = {
        "blind": (1.0, group_repeats(held_out)),
        "host known": (None, [[log] for log in held_out]),
    }
    for way, (scale, workloads) in ways.items():
        for group in workloads:
            timing = profile_timing(f"{GPU}-{model}-vllm", group[0])
            one = validate_workload(group, timing, host_scale=scale)
            cells = {cell.name: cell for cell in one.cells if cell.name in METRICS}
            missed = {name: cell.limit for name, cell in cells.items() if cell.missed}
            found = evidence(model, group[0], one.host_scale, missed) if missed else {}
            yield {
                "model": model,
                "way": way,
                "logs": list(one.logs),
                "judged": sum(cell.judged for cell in cells.values()),
                "whole": not one.misses,
                "misses": [
                    {"name": name, "error": round(cells[name].error or 0.0, 4), "limit": limit}
                    | found[name]
                    for name, limit in missed.items()
                ],
            }


def evidence(
    model: str, log: StepLog, scale: float, limits: Mapping[str, float | None]
) -> dict[str, dict[str, Any]]:
    """Errors of the same numbers when more is known, and when a little is changed."""
    name = f"{GPU}-{model}-vllm"
    real = measured_log(log)

    def cost(host_scale: float = scale) -> ProfileCost:
        return ProfileCost(load_model(model), load_gpu(GPU), name=name, host_scale=host_scale)

    def several(make: Callable[[int], CostModel]) -> list[Measured]:
        return [measured_run(simulate_log(log, SimulatedExecutor(make(seed)))) for seed in SEEDS]

    hair = several(lambda seed: Hair(cost(), seed))
    scatter = several(lambda seed: ResidualNoise(cost(), seed))
    told = validate_workload([log], profile_timing(name, log), host_scale=None).host_scale
    known = measured_run(simulate_log(log, SimulatedExecutor(cost(told))))
    followed = followed_run(HostCost(cost(1.0)), log, host_of(model, log))
    found = {}
    for number, limit in limits.items():
        value = Errors(real, number)
        row: dict[str, Any] = {
            "host_known": value.of(known),
            "followed": value.of(followed) if len(log.steps) >= LONG_LOG else None,
            "hair": value.range(hair),
            "scatter": value.range(scatter),
        }
        found[number] = row | {"cause": cause(row, limit or 0.0)}
    return found


def host_of(model: str, log: StepLog) -> np.ndarray[Any, np.dtype[np.float64]]:
    loaded = load_log(log)
    prices = Prices.of(load_profile(f"{GPU}-{model}-vllm"))
    return local_host_scale(loaded.steps, engine_seconds(prices.coefficients, loaded.steps))


class Errors:
    """Errors of one number."""

    def __init__(self, real: Measured, name: str) -> None:
        self._name = name
        self._real = self._value(real)

    def _value(self, run: Measured) -> float:
        metric, _, statistic = self._name.partition("_")
        value = run.get(metric, statistic) if statistic else run.output_throughput
        assert value is not None
        return value

    def of(self, run: Measured) -> float:
        return round(self._value(run) / self._real - 1.0, 4)

    def range(self, runs: Sequence[Measured]) -> list[float]:
        errors = [self.of(run) for run in runs]
        return [min(errors), round(float(np.median(errors)), 4), max(errors)]


def cause(row: Mapping[str, Any], limit: float) -> str:
    """The least that brings a number within its limit."""
    low, _, high = row["hair"]
    if low <= limit and high >= -limit:
        return "hair"
    if abs(row["host_known"]) <= limit:
        return "host"
    if row["followed"] is not None and abs(row["followed"]) <= limit:
        return "changes"
    low, _, high = row["scatter"]
    return "scatter" if low <= limit and high >= -limit else "form"


class Hair:
    """A cost model whose step times differ by a hair."""

    def __init__(self, cost: ProfileCost, seed: int) -> None:
        self._cost, self._rng = cost, np.random.default_rng(seed)
        self.after_step_s, self.take_in_s = cost.after_step_s, cost.take_in_s

    def price(self, run: StepRun) -> Price:
        """Durations and parts."""
        durations_s, parts = self._cost.price(run)
        factors = 1.0 + HAIR * self._rng.standard_normal(len(durations_s))
        return Price((np.array(durations_s) * factors).tolist(), parts)


def table(report: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a miss, and how many there are of each cause."""
    known = ("one factor", "followed", "± 1 % on steps", "scatter")
    cells = [["known", "workload", "number", "error", "limit", *known, "cause"]]
    lines = []
    for way in ("blind", "host known"):
        of_way = [one for one in report if one["way"] == way]
        found = Counter(miss["cause"] for one in of_way for miss in one["misses"])
        judged = sum(one["judged"] for one in of_way)
        whole = sum(one["whole"] for one in of_way)
        parts = ", ".join(f"{CAUSES[key].split(':')[0]} {found[key]}" for key in CAUSES)
        lines.append(
            f"* {way}: {found.total()} of {judged} numbers missed ({parts}); {whole} of "
            f"{len(of_way)} workloads within all limits, those of steps included"
        )
        cells += [row for one in of_way for row in rows(way, one)]
    return [*lines, "", *markdown_table(cells)]


def rows(way: str, one: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row of text for each number of a workload that missed its limit, its cause last."""
    for miss in one["misses"]:
        low, _, high = miss["hair"]
        least, middle, most = miss["scatter"]
        yield [
            way,
            one["logs"][0],
            miss["name"].replace("_", " ").upper(),
            signed(miss["error"]),
            f"{100 * miss['limit']:.1f} %" if miss["limit"] else "range",
            "–" if way == "host known" else signed(miss["host_known"]),
            signed(miss["followed"]),
            f"{signed(low)} to {signed(high)}",
            f"{signed(middle)} ({signed(least)} to {signed(most)})",
            CAUSES[miss["cause"]].split(":")[0],
        ]


if __name__ == "__main__":
    main()
