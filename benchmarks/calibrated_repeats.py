"""The real executor as a model of itself: each of three runs taken for a simulation of the others.

    python benchmarks/calibrated_repeats.py   # needs no GPU: reads results of calibrated_runs.py

Of each number of `calibrated_runs.py`'s tables: whether a run is as near to the mean of the other
two as a simulation has to be to that of all, within 3 % or the spread of those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from calibrated_runs import LEAST_LIMIT, shown_keys

from simserve.report.markdown import markdown_table

RESULTS = Path(__file__).resolve().parent / "results"
FILES = {
    "first": "calibrated_runs_h200.json",
    "second": "calibrated_runs_second_host_h200.json",
    "third": "calibrated_runs_third_host_h200.json",
    "fourth": "calibrated_runs_fourth_host_h200.json",
    "fifth": "calibrated_runs_fifth_host_h200.json",
}
OUT = RESULTS / "calibrated_repeats_h200.json"


def main() -> None:
    """Count, write and print."""
    machines = {}
    for name, file in FILES.items():
        report = json.loads((RESULTS / file).read_text())
        machines[name] = {"file": file, **counts(report)}
    found = {"command": ["python", "benchmarks/calibrated_repeats.py"], "machines": machines}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))


def counts(report: Mapping[str, Any]) -> dict[str, int]:
    """How many numbers there are, and how many are beyond their limits: simulated, with the host
    known, and of one run beside the two others."""
    keys = list(shown_keys())
    runs = report["runs"].values()
    itself = [
        abs(run[key] / mean(others, key) - 1.0) > max(LEAST_LIMIT, spread(others, key))
        for found in runs
        for run in found["real"]
        for others in [[one for one in found["real"] if one is not run]]
        for key in keys
    ]
    beyond = {
        way: sum(not row["within"] for found in runs for row in found[way] if row["key"] in keys)
        for way in ("rows", "host_known")
    }
    return {
        "numbers": len(report["runs"]) * len(keys),
        "simulated": beyond["rows"],
        "host_known": beyond["host_known"],
        "pairs": len(itself),
        "itself": sum(itself),
    }


def mean(runs: list[dict[str, float]], key: str) -> float:
    """Of one number of some runs."""
    return float(np.mean([run[key] for run in runs]))


def spread(runs: list[dict[str, float]], key: str) -> float:
    """Half the range over the mean."""
    return float(np.ptp([run[key] for run in runs]) / 2 / mean(runs, key))


def table(found: Mapping[str, Any]) -> Iterable[str]:
    """A row a machine: how many numbers are beyond their limits."""
    cells = [["machine", "simulated", "host known", "a real run beside its repeats"]]
    for name, one in found["machines"].items():
        of_model = (f"{one[way]} of {one['numbers']}" for way in ("simulated", "host_known"))
        share = f"{one['itself']} of {one['pairs']} ({100 * one['itself'] / one['pairs']:.0f} %)"
        cells.append([name, *of_model, share])
    return markdown_table(cells)


if __name__ == "__main__":
    main()
