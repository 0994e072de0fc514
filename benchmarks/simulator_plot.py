"""The picture of docs/performance.md: CPU time and memory by requests, beside other simulators.

    python benchmarks/simulator_plot.py

reads benchmarks/results/simulator.json and peers_simulator.json and writes
docs/images/performance.png. CPU seconds are what they would be on a machine on which SimPy alone
processes a million timeouts per CPU second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from simulator import RESULTS, SIZES, Medians

from simserve.report.style import COLOURS, dress, log_ticks, png, styled

PEERS = RESULTS.with_name("peers_simulator.json")
PICTURE = RESULTS.parents[2] / "docs" / "images" / "performance.png"
MARKERS = ("s", "^", "D", "v", "X")


class Curve(NamedTuple):
    """One simulator at several numbers of requests."""

    name: str
    num_requests: Sequence[int]
    standard_cpu_s: Sequence[float]
    peak_mb: Sequence[float]


def main() -> None:
    """Read, draw, write."""
    PICTURE.write_bytes(draw([ours(), *peers()]))


def ours() -> Curve:
    """Medians of our own runs."""
    workloads = json.loads(RESULTS.read_text())["workloads"]
    found = [Medians.of(workloads[name]) for name in SIZES if name in workloads]
    return Curve(
        "simserve",
        [one.num_requests for one in found],
        [one.standard_cpu_s for one in found],
        [one.peak_mb for one in found],
    )


def peers() -> Iterator[Curve]:
    """What was measured of others, brought to the same yardstick."""
    report = json.loads(PEERS.read_text())
    factor = report["simpy_timeouts_per_cpu_s"] / 1e6
    for name, rows in report["simulators"].items():
        yield Curve(
            name,
            [row["num_requests"] for row in rows],
            [row["cpu_s"] * factor for row in rows],
            [row["peak_mb"] for row in rows],
        )


def draw(curves: Sequence[Curve]) -> bytes:
    """Two panels with logarithmic axes."""
    with styled():
        figure = Figure(figsize=(13, 5), dpi=100, layout="constrained")
        cpu, memory = figure.subplots(1, 2)
        dress(cpu, "CPU seconds at 1.0 M SimPy timeouts/s", "requests", "s")
        dress(memory, "Peak memory", "requests", "MB")
        for number, curve in enumerate(curves):
            look = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": "o" if number == 0 else MARKERS[(number - 1) % len(MARKERS)],
                "linewidth": 2.4 if number == 0 else 1.2,
                "label": curve.name,
            }
            cpu.plot(curve.num_requests, curve.standard_cpu_s, **look)
            memory.plot(curve.num_requests, curve.peak_mb, **look)
        for axes in (cpu, memory):
            log_ticks(axes, "x", sparse=True)
            log_ticks(axes, "y", sparse=axes is cpu)
        cpu.legend()
        return png(figure)


if __name__ == "__main__":
    main()
