"""What reading a trace found out: counts, what was dropped and why, and what deserves a warning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.errors import counted
from simserve.workload.rows import RowLog

__all__ = ["TraceReport", "make_report"]

_LOW_RATE_PER_S = 0.1
_QUANTISED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """One complete reading of a trace file."""

    path: str
    format: str
    sha256: str
    """Of the file's bytes as they lie on disk."""
    num_rows: int
    """Rows read, dropped ones included; blank lines and headers are no rows."""
    num_requests: int
    dropped: Mapping[str, int]
    """Rows left out, by reason."""
    dropped_rows: Mapping[str, tuple[int, ...]]
    """The first few row numbers (lines of the file) of each reason."""
    num_backward_steps: int
    """Rows that arrive before the row above them; they were sorted, keeping the order of ties."""
    num_waiting: int
    """Requests that wait for the end of others: when they arrive is not known beforehand, and
    the figures below are of those that do not."""
    num_ties: int
    """Requests that arrive at the same time as the one before them."""
    span_s: float
    """From the first arrival to the last."""
    warnings: tuple[str, ...]

    @property
    def num_dropped(self) -> int:
        """Rows left out in all."""
        return sum(self.dropped.values())

    @property
    def rate_per_s(self) -> float | None:
        """Mean arrival rate between the first and the last arrival; None for a single instant."""
        return (self.num_arrivals - 1) / self.span_s if self.span_s > 0 else None

    @property
    def num_arrivals(self) -> int:
        """Requests whose arrival is known beforehand."""
        return self.num_requests - self.num_waiting


def make_report(
    log: RowLog,
    format: str,
    sha256: str,
    arrivals_s: NDArray[np.float64],
    waits: NDArray[np.bool_],
    num_backward_steps: int,
) -> TraceReport:
    """The report of a pass whose kept requests arrive at `arrivals_s`, sorted.

    `waits` says which of them wait for others.
    """
    num_requests, arrivals_s = len(arrivals_s), arrivals_s[~waits]
    gaps_s = np.diff(arrivals_s)
    num_ties = int(np.count_nonzero(gaps_s == 0))
    span_s = float(arrivals_s[-1] - arrivals_s[0])
    report = TraceReport(
        path=str(log.path),
        format=format,
        sha256=sha256,
        num_rows=log.num_rows,
        num_requests=num_requests,
        dropped=dict(log.dropped),
        dropped_rows={reason: tuple(rows) for reason, rows in log.dropped_rows.items()},
        num_backward_steps=num_backward_steps,
        num_waiting=int(waits.sum()),
        num_ties=num_ties,
        span_s=span_s,
        warnings=(),
    )
    warnings = [*_drops(report), *_order(report, gaps_s), *_rate(report), *_notes(log)]
    object.__setattr__(report, "warnings", tuple(warnings))
    return report


def _drops(report: TraceReport) -> list[str]:
    listed = [
        f"{count} for {reason} (rows {_some(report.dropped_rows[reason], count)})"
        for reason, count in report.dropped.items()
    ]
    if not listed:
        return []
    return [f"{report.num_dropped} of {report.num_rows} rows dropped: {', '.join(listed)}"]


def _order(report: TraceReport, gaps_s: NDArray[np.float64]) -> list[str]:
    warnings = []
    if report.num_backward_steps:
        warnings.append(
            f"rows are not in order of arrival ({report.num_backward_steps} backward steps): "
            "sorted, rows of equal time in file order"
        )
    if report.num_ties > _QUANTISED_SHARE * report.num_arrivals and report.span_s > 0:
        steps_s = gaps_s[gaps_s > 0]
        warnings.append(
            f"timestamps are quantised: {report.num_arrivals - report.num_ties} different ones "
            f"for {report.num_arrivals} requests, at least {steps_s.min():.6g} s apart; "
            "waiting times then measure the recording, unless ties are spread (spread_ties_s)"
        )
    elif report.num_ties:
        warnings.append(
            f"{counted(report.num_ties, 'request')} with the arrival time of the one before; "
            "file order is kept"
        )
    return warnings


def _rate(report: TraceReport) -> list[str]:
    rate_per_s = report.rate_per_s
    if rate_per_s is None or rate_per_s >= _LOW_RATE_PER_S or report.num_waiting:
        return []
    return [
        f"mean rate is {rate_per_s:.3g} requests/s: most of the time nothing runs; "
        "use a speedup, or a busier slice of the trace"
    ]


def _notes(log: RowLog) -> list[str]:
    return [f"{text} ({count} rows)" for text, count in log.notes.items()]


def _some(rows: tuple[int, ...], count: int) -> str:
    shown = ", ".join(str(row) for row in rows)
    return shown if len(rows) == count else f"{shown}, ..."
