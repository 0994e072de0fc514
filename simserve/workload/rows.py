"""Rows of a trace on their way to requests: what is checked, what is dropped, what is noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from simserve.errors import TraceError

__all__ = [
    "MAX_TICKS",
    "MAX_TOKENS",
    "BadRow",
    "OnBadRow",
    "Record",
    "Row",
    "RowLog",
    "clock",
    "count",
    "count_text",
    "moment",
    "moment_text",
    "parse_rows",
    "text_or_none",
]

OnBadRow = str
"""`error` (the first bad row ends the reading) or `drop` (bad rows are left out and counted)."""

Record = Mapping[str, Any]
"""One row of a file by name: JSON values, or the text of CSV fields."""

MAX_TOKENS = 2**31 - 1
MAX_TICKS = 2**53
"""Beyond it not every whole tick has a float of its own."""
_ROWS_LISTED = 10


class BadRow(Exception):
    """A row that cannot become a request: the field, what is wrong, and a word to count it by."""

    def __init__(self, field: str, message: str, reason: str) -> None:
        super().__init__(field, message, reason)
        self.field = field
        self.message = message
        self.reason = reason


class Row(NamedTuple):
    """A checked row: where it stands, when it arrives on the file's clock, and the request.

    `fields` are the arguments of TraceRequest but `arrival_s`, which needs the origin of the
    whole file. Differences of `ticks` are exact; a reader says how many make a second.
    """

    number: int
    ticks: float
    fields: dict[str, Any]


class RowLog:
    """What one pass over a file met."""

    def __init__(self, path: Path, on_bad_row: OnBadRow = "error") -> None:
        self.path = path
        self.on_bad_row = on_bad_row
        self.num_rows = 0
        """Rows read, bad ones included; blank lines and headers are no rows."""
        self.dropped: Counter[str] = Counter()
        self.dropped_rows: dict[str, list[int]] = {}
        """The first few row numbers of each reason."""
        self.first_fault = ""
        self.notes: Counter[str] = Counter()
        """Things worth telling, each with the number of rows that it is true of."""

    def describe(self, number: int, fault: BadRow) -> str:
        """`file:row: field: what is wrong`."""
        return f"{self.path}:{number}: {fault.field}: {fault.message}"

    def bad(self, number: int, fault: BadRow) -> None:
        """Count a bad row, or end the reading with it.

        Raises:
            TraceError: bad rows are errors.
        """
        if self.on_bad_row == "error":
            raise TraceError(
                f"{self.describe(number, fault)} (on_bad_row: drop leaves such rows out and "
                "counts them)"
            )
        self.first_fault = self.first_fault or self.describe(number, fault)
        self.dropped[fault.reason] += 1
        rows = self.dropped_rows.setdefault(fault.reason, [])
        if len(rows) < _ROWS_LISTED:
            rows.append(number)

    def note(self, text: str) -> None:
        """Remember something about a row that is no fault."""
        self.notes[text] += 1


def parse_rows(
    records: Iterable[tuple[int, Record]],
    parse: Callable[[int, Record], Iterable[Row]],
    log: RowLog,
) -> Iterator[Row]:
    """The rows that `parse` makes of each (row number, record); bad ones go to the log."""
    for number, record in records:
        try:
            rows = parse(number, record)
        except BadRow as fault:
            log.bad(number, fault)
            continue
        yield from rows


def clock() -> Callable[[int], float]:
    """Make whole ticks since a far epoch small, so that a float holds them exactly.

    The returned function counts from the first time that it is given.
    """
    first: int | None = None

    def since_first(ticks: int) -> float:
        nonlocal first
        if first is None:
            first = ticks
        if abs(ticks - first) >= MAX_TICKS:
            raise BadRow("arrival", "is too far from that of the first row", "too_large")
        return float(ticks - first)

    return since_first


def count(record: Record, field: str, what: str) -> int:
    """A number of tokens, 1 ... MAX_TOKENS, from a JSON value. `what` is prompt or output."""
    value = record.get(field)
    if type(value) is int and 0 < value <= MAX_TOKENS:
        return value
    if type(value) is not int:
        _refuse(record, field, "a whole number of tokens")
    _refuse_count(field, value, what)


def count_text(record: Record, field: str, what: str) -> int:
    """A number of tokens, 1 ... MAX_TOKENS, from the text of a CSV field."""
    text = record[field]
    if text.isdigit() and text.isascii() and len(text) < 20:
        value = int(text)
        if 0 < value <= MAX_TOKENS:
            return value
        _refuse_count(field, value, what)
    stripped = text.strip()
    if stripped != text:
        return count_text({field: stripped}, field, what)
    if not text:
        raise BadRow(field, "is empty", "missing")
    if text[0] == "-" and text[1:].isdigit():
        raise BadRow(field, f"is {text[:40]}, but must not be negative", "negative")
    raise BadRow(field, f"is {_short(text)}, not a whole number of tokens", "not_a_number")


def moment(record: Record, field: str) -> float:
    """A time or duration >= 0 from a JSON number, in the file's unit."""
    value = record.get(field)
    if type(value) is not int and type(value) is not float:
        _refuse(record, field, "a number")
    return _check_moment(field, value)


def moment_text(record: Record, field: str) -> float:
    """A time >= 0 from the text of a CSV field, in the file's unit."""
    text = record[field].strip()
    try:
        value = float(text)
    except ValueError:
        shown = f"is {_short(text)}, not a number" if text else "is empty"
        raise BadRow(field, shown, "not_a_number" if text else "missing") from None
    return _check_moment(field, value)


def text_or_none(record: Record, field: str) -> str | None:
    """Text or a whole number as text (ids are written both ways); None if absent or null."""
    value = record.get(field)
    if value is None:
        return None
    if type(value) is int and abs(value) < 2**64:
        return str(value)
    if not isinstance(value, str) or not value:
        _refuse(record, field, "a non-empty text")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadRow(field, "holds half a surrogate pair, which is no text", "not_text")
    return value


def _check_moment(field: str, value: float) -> float:
    if not isinstance(value, int) and not isfinite(value):
        raise BadRow(field, f"is {value}, not a finite number", "not_finite")
    if value < 0:
        raise BadRow(field, f"is {_short(value)}, but must not be negative", "negative")
    if value >= MAX_TICKS:
        raise BadRow(field, f"is {_short(value)}, which is too large", "too_large")
    return float(value)


def _refuse(record: Record, field: str, wanted: str) -> NoReturn:
    value = record.get(field)
    if field not in record:
        raise BadRow(field, "is missing", "missing")
    if value is None:
        raise BadRow(field, f"is null, not {wanted}", "missing")
    if isinstance(value, float) and not isfinite(value):
        raise BadRow(field, f"is {value}, not {wanted}", "not_finite")
    raise BadRow(field, f"is {_short(value)}, not {wanted}", "not_a_number")


def _refuse_count(field: str, value: int, what: str) -> NoReturn:
    if value == 0:
        raise BadRow(field, f"is 0: a request needs at least one {what} token", f"zero_{what}")
    if value < 0:
        raise BadRow(field, f"is {_short(value)}, but must not be negative", "negative")
    raise BadRow(field, f"is more than {MAX_TOKENS} tokens", "too_large")


def _short(value: object) -> str:
    """A value as JSON or CSV has it, cut where it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
