"""ServeGen rate windows: arrivals and lengths are drawn from what a client's windows record."""

from __future__ import annotations

from collections.abc import Iterator
from math import gamma, sqrt
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from simserve.errors import TraceError
from simserve.workload.files import text_lines
from simserve.workload.readers.base import (
    Option,
    Options,
    OptionTable,
    Reader,
    first_fields,
    row_id,
)
from simserve.workload.readers.servegen_lengths import ServeGenLengths, dataset_path, is_number
from simserve.workload.rows import BadRow, Row, RowLog

__all__ = ["ServeGenReader"]

_PATTERNS = ("Gamma", "Weibull", "")
_MAX_CV = 100.0
_MAX_REQUESTS = 1e8
_DEFAULT_WINDOW_S = 600.0


class ServeGenReader(Reader):
    """A headerless CSV of windows (start s, rate 1/s, CV, pattern, shape, scale), and histograms.

    A window says how many requests came and how bursty they were: gaps are drawn from its Gamma or
    Weibull shape, scaled so that their mean is 1 / rate (the fitted scale does not keep the
    recorded rate). A window without a rate has no requests. Lengths come from the histograms of
    `dataset`, by default the file beside it whose name ends in dataset.json; a window uses the
    latest histogram that is not empty. Prompts share nothing.
    """

    name = "servegen"
    options: ClassVar[OptionTable] = {
        "dataset": Option(str, None, "path of the histograms, a dataset.json"),
        "seed": Option(int, 0, "seed of arrivals and lengths", 0),
        "start_s": Option(float, 0.0, "leave out windows that end before this time", 0),
        "duration_s": Option(float, None, "length of the slice that is sampled", 0),
        "num_requests": Option(int, None, "stop after so many requests", 1),
    }

    def sniff(self, path: Path, head: str) -> bool:
        """No header: six fields, the fourth a pattern and the others numbers."""
        fields = first_fields(head)
        if len(fields) != 6 or fields[3] not in _PATTERNS:
            return False
        return all(is_number(field) for index, field in enumerate(fields) if index != 3)

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Sampled requests in order of arrival; each has the row number of its window."""
        windows = list(_windows(path, log))
        start_s = float(options["start_s"])
        end_s = start_s + (float("inf") if options["duration_s"] is None else options["duration_s"])
        _refuse_floods(path, windows, start_s, end_s, options["num_requests"])
        lengths = ServeGenLengths(dataset_path(path, options["dataset"]))
        rng = np.random.default_rng(options["seed"])
        arrivals = _arrivals(windows, start_s, end_s, rng)
        for index, (window, arrival_s) in enumerate(arrivals):
            if index == options["num_requests"]:
                return
            yield Row(window.number, arrival_s, lengths.draw(row_id(index), arrival_s, rng))


class _Window(NamedTuple):
    number: int
    start_s: float
    end_s: float
    rate: float
    pattern: str
    shape: float


def _windows(path: Path, log: RowLog) -> Iterator[_Window]:
    """Windows in order; the last is as long as the one before it."""
    previous: _Window | None = None
    length_s = _DEFAULT_WINDOW_S
    for number, line in text_lines(path, log):
        log.num_rows += 1
        try:
            window = _window(number, line.strip().split(","))
            if previous is not None and window.start_s <= previous.start_s:
                raise BadRow("start", "is not later than that of the window above", "unsorted")
        except BadRow as fault:
            log.bad(number, fault)
            continue
        if previous is not None:
            length_s = window.start_s - previous.start_s
            yield previous._replace(end_s=window.start_s)
        previous = window
    if previous is not None:
        yield previous._replace(end_s=previous.start_s + length_s)


def _window(number: int, fields: list[str]) -> _Window:
    if len(fields) != 6:
        message = f"has {len(fields)} fields, not start, rate, CV, pattern, shape, scale"
        raise BadRow("row", message, "broken_csv")
    pattern = fields[3].strip()
    if pattern not in _PATTERNS:
        raise BadRow("pattern", f"is {pattern[:40]!r}, not Gamma or Weibull", "unknown_pattern")
    start_s, rate = _positive(fields[0], "start"), _positive(fields[1], "rate")
    shape = _positive(fields[4], "shape")
    if rate and not pattern:
        raise BadRow("pattern", "is empty, but the rate is not 0", "unknown_pattern")
    if rate and _cv(pattern, shape) > _MAX_CV:
        message = f"makes gaps with a CV above {_MAX_CV:.0f}, too bursty to be a fit"
        raise BadRow("shape", message, "too_large")
    return _Window(number, start_s, start_s, rate, pattern, shape)


def _positive(text: str, field: str) -> float:
    if not is_number(text):
        raise BadRow(field, f"is {text[:40]!r}, not a number", "not_a_number")
    value = float(text)
    if not 0 <= value < 2**53:
        reason = "negative" if value < 0 else "too_large"
        raise BadRow(field, f"is {value}, outside 0 ... 2^53", reason)
    return value


def _cv(pattern: str, shape: float) -> float:
    """Coefficient of variation of the gaps that a shape gives; infinite where it gives none."""
    if pattern == "Gamma":
        return 1 / sqrt(shape) if shape > 0 else float("inf")
    if shape < 0.1:
        return float("inf")
    return sqrt(max(gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1, 0.0))


def _refuse_floods(
    path: Path, windows: list[_Window], start_s: float, end_s: float, num_requests: int | None
) -> None:
    expected = sum(w.rate * max(min(w.end_s, end_s) - max(w.start_s, start_s), 0) for w in windows)
    if min(expected, num_requests or expected) > _MAX_REQUESTS:
        raise TraceError(
            f"{path}: its rates make about {expected:.3g} requests; "
            "set the option num_requests or duration_s"
        )


def _arrivals(
    windows: list[_Window], start_s: float, end_s: float, rng: np.random.Generator
) -> Iterator[tuple[_Window, float]]:
    """A renewal process in operational time: gaps of mean 1, the clock running at each rate.

    What is left of a gap at the end of a window is waited for in the next one.
    """
    left: float | None = None
    for window in windows:
        now_s, stop_s = max(window.start_s, start_s), min(window.end_s, end_s)
        if not window.rate or now_s >= stop_s:
            continue
        if left is None:
            left = _gap(window, rng)
        while now_s + left / window.rate < stop_s:
            now_s += left / window.rate
            yield window, now_s
            left = _gap(window, rng)
        left -= (stop_s - now_s) * window.rate


def _gap(window: _Window, rng: np.random.Generator) -> float:
    """A gap of mean 1."""
    if window.pattern == "Gamma":
        return float(rng.gamma(window.shape, 1 / window.shape))
    return float(rng.weibull(window.shape)) / gamma(1 + 1 / window.shape)
