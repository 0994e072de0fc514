"""Traces: a file of requests, read in two passes, handed out in order of arrival from 0 s on.

The first pass checks every row and learns the origin and the order; the second hands requests
out one by one. A file in order is never held in memory, and one that is nearly in order only as
far as its rows are out of place.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, fields
from inspect import signature
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.errors import ConfigError, PluginError, TraceError
from simserve.registry import resolve
from simserve.types import TraceRequest
from simserve.workload.files import file_sha256, write_lines
from simserve.workload.readers.base import Options, Reader, check_options
from simserve.workload.readers.native import encode
from simserve.workload.rows import BadRow, OnBadRow, Row, RowLog
from simserve.workload.siblings import sibling_ids, sibling_of
from simserve.workload.sniff import sniff
from simserve.workload.trace_report import TraceReport, make_report

__all__ = ["Features", "Trace", "TraceReport", "open_trace", "write_trace"]

_NUM_PLAIN = 3
"""Fields that every row has: request_id, prompt and output_len."""


def open_trace(
    path: str | Path,
    *,
    format: str = "auto",
    on_bad_row: OnBadRow = "error",
    sort: bool = True,
    base_dir: Path | None = None,
    reader_options: Options | None = None,
    **options: Any,
) -> Trace:
    """A trace file, its format found out (`auto`) or named; rows are read when asked for.

    `on_bad_row` is `error` or `drop`; without `sort`, rows out of order are an error.
    `base_dir` is a folder in which the module of a `module:Class` is looked for besides.
    `options` are those of the format, and `reader_options` more of them, whatever they are called.

    Raises:
        ConfigError: an option is unknown or wrong.
        TraceError: the file cannot be read, is empty, or is of no known format.
        PluginError: the class named as `format` lacks a method.
        UnknownNameError: no reader has the name given as `format`.
    """
    path = Path(path)
    if on_bad_row not in ("error", "drop"):
        raise ConfigError(f"on_bad_row is {on_bad_row!r}, but must be 'error' or 'drop'")
    name = sniff(path) if format == "auto" else format
    reader = resolve("readers", name, base_dir)()
    missing = [method for method in ("sniff", "read") if not hasattr(reader, method)]
    if missing:
        raise PluginError(f"'{name}' cannot serve as a trace reader: it lacks {', '.join(missing)}")
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    given = _checked(name, reader, path, {**(reader_options or {}), **options})
    return Trace(path, name, reader, given, on_bad_row, sort)


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Write requests in simserve's own format; reading them gives back equal ones.

    The file appears under its name only when it is complete. Returns the number of requests.

    Raises:
        TraceError: a number is not finite, or the file cannot be written.
    """
    return write_lines(Path(path), (encode(request) for request in requests))


def _checked(name: str, reader: Any, path: Path, options: Options) -> Options:
    """Options that the reader takes, with its defaults where it says what they are."""
    if isinstance(reader, Reader):
        return check_options(name, reader.options, options)
    try:
        signature(reader.read).bind(path, **options)
    except TypeError as error:
        raise ConfigError(f"options of trace format '{name}': {error}") from error
    return options


@dataclass(slots=True)
class Features:
    """What some requests of a trace say, beside what they are and when they arrive."""

    waits: bool = False
    """That they wait for the end of others."""
    several: tuple[int, int] | None = None
    """How many sequences they want: the row of the first that wants more than one, and how many."""
    names_sampling: bool = False
    """How their tokens are chosen."""

    def see(self, row: Row) -> None:
        """Take in a request."""
        fields = row.fields
        self.waits = self.waits or fields.get("parent") is not None
        if self.several is None and fields.get("n", 1) > 1:
            self.several = row.number, fields["n"]
        asks = bool(fields.get("sampling")) or fields.get("logprobs") is not None
        self.names_sampling = self.names_sampling or asks


class Trace:
    """A trace file. Every `requests()` reads it anew: nothing that a run touches is kept."""

    def __init__(
        self,
        path: Path,
        format: str,
        reader: Any,
        options: Options,
        on_bad_row: OnBadRow,
        sort: bool,
    ) -> None:
        self.path = path
        self.format = format
        self._reader = reader
        self._options = options
        self._on_bad_row = on_bad_row
        self._sort = sort
        self._scan: _Scan | None = None

    @property
    def report(self) -> TraceReport:
        """What a complete pass found out; the first time it is asked for, the file is read.

        Raises:
            TraceError: a row is bad, or there are no requests.
        """
        return self._scanned().report

    @property
    def num_requests(self) -> int:
        """Requests that `requests()` hands out."""
        return self.report.num_requests

    @property
    def features(self) -> Features:
        """What some of them say besides; found out as `report` is, and from the same reading."""
        return self._scanned().features

    @property
    def shares_prefixes(self) -> bool:
        """Whether the format can say that prompts begin alike."""
        return getattr(self._reader, "shares_prefixes", True)

    def requests(self) -> Iterator[TraceRequest]:
        """Fresh requests, in order of arrival (ties in file order), the first at 0.0 s.

        Raises:
            TraceError: a row is bad, there are no requests, or the file has changed meanwhile.
        """
        return map(itemgetter(1), self.numbered())

    def numbered(self) -> Iterator[tuple[int, TraceRequest]]:
        """The same, each with the number of its row.

        Raises:
            TraceError: as `requests`.
        """
        scan = self._scanned()
        if _stamp(self.path) != scan.stamp:
            raise TraceError(f"{self.path}: the file has changed since it was first read")
        return self._numbered(scan)

    def place_of(self, request_id: str) -> str:
        """`file:row: ` of a request, to begin an error with: the file is read for it."""
        number = next(number for number, one in self.numbered() if one.request_id == request_id)
        return f"{self.path}:{number}: "

    def _numbered(self, scan: _Scan) -> Iterator[tuple[int, TraceRequest]]:
        ticks_per_s = _ticks_per_s(self._reader)
        kept = self._kept(scan.left_out)
        if scan.raised is not None:
            ticks = scan.raised.tolist()
            kept = (row._replace(ticks=one) for row, one in zip(kept, ticks, strict=True))
        for row in kept if scan.order is None else _in_order(kept, scan.order):
            arrival_s = (row.ticks - scan.origin) / ticks_per_s
            yield row.number, TraceRequest(arrival_s=arrival_s, **row.fields)

    def _kept(self, left_out: Container[int]) -> Iterator[Row]:
        rows = self._rows(RowLog(self.path, self._on_bad_row))
        return (row for index, row in enumerate(rows) if index not in left_out)

    def _rows(self, log: RowLog) -> Iterator[Row]:
        if isinstance(self._reader, Reader):
            return self._reader.rows(self.path, log, self._options)
        return _rows_of_requests(self._reader.read(self.path, **self._options), log)

    def _scanned(self) -> _Scan:
        if self._scan is None:
            self._scan = self._first_pass()
        return self._scan

    def _first_pass(self) -> _Scan:
        stamp = _stamp(self.path)
        log = RowLog(self.path, self._on_bad_row)
        features = Features()
        ticks, waits, left_out = self._check_all(log, features)
        if not len(ticks):
            raise TraceError(f"{self.path}: no requests: {_why_none(log)}")
        num_backward_steps = int(np.count_nonzero(np.diff(ticks) < 0))
        raised = order = None
        if num_backward_steps:
            if features.waits:
                ticks = raised = self._not_before_parents(ticks, left_out)
            order = np.argsort(ticks, kind="stable")
            ticks, waits = ticks[order], waits[order]
        origin = float(ticks[0])
        arrivals_s = (ticks - origin) / _ticks_per_s(self._reader)
        report = make_report(
            log, self.format, file_sha256(self.path), arrivals_s, waits, num_backward_steps
        )
        return _Scan(origin, order, raised, frozenset(left_out), report, features, stamp)

    def _check_all(
        self, log: RowLog, features: Features
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], set[int]]:
        """Ticks of the rows kept, in file order, which of them wait for others, and the indices of
        those refused here.

        Readers judge rows one by one; whether ids clash and parents exist is judged here.
        """
        ticks, waits = array("d"), bytearray()
        left_out: set[int] = set()
        known_ids: set[str] = set()
        several: dict[str, int] = {}
        check_ids = getattr(self._reader, "names_requests", True)
        for index, row in enumerate(self._rows(log)):
            try:
                if not self._sort and ticks and row.ticks < ticks[-1]:
                    raise BadRow("arrival", "is earlier than that of the row above", "unsorted")
                if check_ids:
                    _check_ids(row, known_ids, several)
            except BadRow as fault:
                log.bad(row.number, fault)
                left_out.add(index)
                continue
            ticks.append(row.ticks)
            waits.append(row.fields.get("parent") is not None)
            if len(row.fields) > _NUM_PLAIN:
                features.see(row)
        return np.array(ticks, dtype=np.float64), np.frombuffer(waits, dtype=np.bool_), left_out

    def _not_before_parents(
        self, ticks: NDArray[np.float64], left_out: Container[int]
    ) -> NDArray[np.float64]:
        """Ticks by which no request arrives before the one that it waits for."""
        known: dict[str | None, float] = {}
        for row, own in zip(self._kept(left_out), ticks.tolist(), strict=True):
            earliest = known.get(row.fields.get("parent"), own)
            known[row.fields["request_id"]] = max(own, earliest)
        return np.fromiter(known.values(), dtype=np.float64, count=len(known))


@dataclass(frozen=True, slots=True)
class _Scan:
    """What the first pass learnt for the second."""

    origin: float
    order: NDArray[np.intp] | None
    """File positions in order of arrival; None if the file is in order."""
    raised: NDArray[np.float64] | None
    """Ticks in file order, where they may differ from those of the rows."""
    left_out: frozenset[int]
    report: TraceReport
    features: Features
    stamp: tuple[int, int]


def _check_ids(row: Row, known_ids: set[str], several: dict[str, int]) -> None:
    """Ids are unique, and a parent stands in a row above, so that nothing waits in a circle.

    Args:
        row: the next one.
        known_ids: of the rows above.
        several: ids of those that want several sequences, and how many.
    """
    request_id, parent = row.fields["request_id"], row.fields.get("parent")
    if request_id in known_ids:
        raise BadRow("request_id", f"'{request_id}' occurs twice", "duplicate_id")
    if parent is not None and parent not in known_ids:
        raise BadRow("parent", f"'{parent}' is the id of no row above", "orphan")
    if (n := row.fields.get("n", 1)) > 1:
        names = sibling_ids(request_id, n)
        if taken := next((name for name in names if name in known_ids), None):
            message = f"one of the {n} sequences is called '{taken}', as is a row above"
            raise BadRow("n", message, "duplicate_id")
        several[request_id] = n
    elif several and (whole := sibling_of(request_id, several)) is not None:
        message = f"'{request_id}' is what one of the sequences of '{whole}' (n) is called"
        raise BadRow("request_id", message, "duplicate_id")
    known_ids.add(request_id)


def _in_order(rows: Iterator[Row], order: NDArray[np.intp]) -> Iterator[Row]:
    """Rows in the given order of their positions, holding only those that have to wait."""
    waiting: dict[int, Row] = {}
    wanted = iter(order.tolist())
    next_up = next(wanted, None)
    for position, row in enumerate(rows):
        waiting[position] = row
        while next_up in waiting:
            yield waiting.pop(next_up)
            next_up = next(wanted, None)


def _rows_of_requests(requests: Iterator[TraceRequest], log: RowLog) -> Iterator[Row]:
    """Rows from a reader that knows only the TraceReader protocol: seconds, numbered from 1."""
    names = [field.name for field in fields(TraceRequest) if field.name != "arrival_s"]
    for number, request in enumerate(requests, 1):
        log.num_rows += 1
        if not 0 <= request.arrival_s < float("inf"):
            message = f"is {request.arrival_s}, not a finite time >= 0"
            log.bad(number, BadRow("arrival_s", message, "not_finite"))
            continue
        yield Row(number, request.arrival_s, {name: getattr(request, name) for name in names})


def _ticks_per_s(reader: Any) -> int:
    return reader.ticks_per_s if isinstance(reader, Reader) else 1


def _why_none(log: RowLog) -> str:
    if not log.num_rows:
        return "the file has no rows"
    if not log.dropped:
        return f"none of its {log.num_rows} rows makes one"
    reasons = ", ".join(f"{count} for {reason}" for reason, count in log.dropped.items())
    return f"all {log.num_rows} rows were dropped ({reasons}), the first: {log.first_fault}"


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of change of a file."""
    try:
        status = path.stat()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns
