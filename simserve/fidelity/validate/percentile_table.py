"""Two runs of one workload side by side: latency percentiles, throughput, and how far apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Compared", "percentile_cells", "percentile_rows"]

_LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2el": "E2EL"}
_PERCENTILES = ("p50", "p95", "p99")
_RATES = {
    "request_throughput": ("request throughput", "requests/s"),
    "output_throughput": ("output throughput", "tokens/s"),
}


class Compared(NamedTuple):
    """One number of both runs. None: it was not measured, or there is nothing to divide by."""

    key: str
    """In summary.json."""
    name: str
    """For people, unit included."""
    real: float | None
    simulated: float | None

    @property
    def error(self) -> float | None:
        """(simulated − real) / real."""
        if self.real is None or self.simulated is None or self.real == 0:
            return None
        return (self.simulated - self.real) / self.real

    def as_json(self) -> dict[str, Any]:
        """The row with its error."""
        return {**self._asdict(), "error": self.error}


def percentile_rows(real: Mapping[str, Any], simulated: Mapping[str, Any]) -> list[Compared]:
    """Compare summaries: TTFT, ITL and E2EL at p50, p95 and p99 (ms), then throughput.

    A latency that neither run reports is left out.
    """
    keys = {
        f"{percentile}_{metric}_ms": f"{name} {percentile} (ms)"
        for metric, name in _LATENCIES.items()
        for percentile in _PERCENTILES
    }
    keys |= {key: f"{name} ({unit})" for key, (name, unit) in _RATES.items()}
    return [
        Compared(key, name, real.get(key), simulated.get(key))
        for key, name in keys.items()
        if key in real or key in simulated
    ]


def percentile_cells(rows: Sequence[Compared]) -> list[list[str]]:
    """Cells of the table real / simulated / error, under a header."""
    cells = [["", "real", "simulated", "error"]]
    for row in rows:
        error = "–" if row.error is None else f"{100 * row.error:+.1f} %".replace("-", "−")
        cells.append([row.name, _number(row.real), _number(row.simulated), error])
    return cells


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.1f}"
