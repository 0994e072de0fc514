"""How far one run of a real engine is from another of the same requests: a model that knows it all.

    python benchmarks/accuracy_repeats.py FOLDER    # of step logs (docs/log-format.md)
    python benchmarks/tables.py                     # then the table of docs/accuracy.md

Each run is taken for a simulation of each of its repeats, and judged by the limits of
`simserve validate`. Writes benchmarks/results/accuracy_repeats.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from accuracy import GPU, METRICS, signed

from simserve.config.presets import load_gpu, load_model
from simserve.cost.profile import ProfileCost
from simserve.fidelity.logs.loaded_log import load_log
from simserve.fidelity.logs.measured import Measured, measured_log
from simserve.fidelity.logs.vllm_log import StepLog, read_vllm_log
from simserve.fidelity.validate.judged_logs import group_repeats
from simserve.fidelity.validate.saturation import NEAR_SATURATION, ttft_elasticity
from simserve.fidelity.validate.tolerances import BLIND, HOST_KNOWN
from simserve.report.markdown import markdown_table

RESULTS = Path(__file__).resolve().parent / "results" / "accuracy_repeats.json"
WITH_A_QUEUE = ("itl", "throughput")
"""What has a value near saturation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    logs = [read_vllm_log(path) for path in sorted(parser.parse_args().folder.glob("*.json.gz"))]
    report = [repeated(group) for group in group_repeats(logs) if len(group) > 1]
    RESULTS.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def repeated(logs: Sequence[StepLog]) -> dict[str, Any]:
    """Errors of every ordered pair, by number, and half the range over the mean of all runs."""
    model = load_log(logs[0]).model
    cost = ProfileCost(load_model(model), load_gpu(GPU), name=f"{GPU}-{model}-vllm")
    near_saturation = ttft_elasticity(logs[0], cost) > NEAR_SATURATION
    names = [n for n in METRICS if not near_saturation or n.startswith(WITH_A_QUEUE)]
    runs = [measured_log(log) for log in logs]
    values = {name: [value(run, name) for run in runs] for name in names}
    return {
        "logs": [log.name for log in logs],
        "near_saturation": near_saturation,
        "spread": {n: (max(v) - min(v)) / 2 / (sum(v) / len(v)) for n, v in values.items()},
        "errors": {n: [a / b - 1.0 for a, b in permutations(v, 2)] for n, v in values.items()},
    }


def value(run: Measured, name: str) -> float:
    metric, _, statistic = name.partition("_")
    found = run.get(metric, statistic) if statistic else run.output_throughput
    assert found is not None
    return found


def table(report: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a workload: the largest error of each number, and how many pairs are beyond limits."""
    shown = [name.replace("_", " ").upper() for name in METRICS]
    cells = [["workload", "runs", *shown, "beyond: blind", "host known"]]
    totals = [0, 0, 0]
    for one in report:
        counts = beyond(one)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        largest = [
            signed(max(one["errors"][name], key=abs)) if name in one["errors"] else "–"
            for name in METRICS
        ]
        near = " (near saturation)" if one["near_saturation"] else ""
        name, number = one["logs"][0] + near, str(len(one["logs"]))
        blind, known, judged = counts
        cells.append([name, number, *largest, f"{blind} of {judged}", f"{known} of {judged}"])
    blind, known, judged = totals
    line = (
        f"* of {judged} numbers {blind} are beyond the blind limits, {known} those of a known host"
    )
    return [line, "", *markdown_table(cells)]


def beyond(one: Mapping[str, Any]) -> tuple[int, int, int]:
    """Numbers beyond the blind limits (the spread counts, as there), the known host's, and all."""
    blind = known = judged = 0
    for name, errors in one["errors"].items():
        judged += len(errors)
        limit = max(BLIND[name], one["spread"][name] if name != "throughput" else 0.0)
        blind += sum(abs(error) > limit for error in errors)
        known += sum(abs(error) > HOST_KNOWN[name] for error in errors)
    return blind, known, judged


if __name__ == "__main__":
    main()
