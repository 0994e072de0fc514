"""Files as streams of numbered records: JSON lines and CSV, plain or gzipped, never a traceback."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from simserve.errors import TraceError, did_you_mean, why_unreadable
from simserve.workload.rows import BadRow, Record, RowLog

__all__ = ["csv_records", "file_sha256", "json_records", "read_head", "text_lines", "write_lines"]

_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_LINE = 1 << 26
"""Bytes of one that are read to recognise a file: a prompt of a million token ids has some 7 MB."""
_READ_ERRORS = (OSError, EOFError, zlib.error)


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unzipped if it is gzipped.

    Raises:
        TraceError: the file cannot be opened or read.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not zipped:
                yield file
                return
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield cast("IO[bytes]", unzipped)
    except _READ_ERRORS as error:
        raise TraceError(f"{path}: cannot be read: {why_unreadable(error)}") from error


def read_head(path: Path, size: int = 1 << 16) -> str:
    """The first `size` bytes as text, and all of the line that they end in; bytes that are no UTF-8
    are replaced."""
    with _reading(path) as file:
        head = file.read(size)
        return (head + file.readline(_LONGEST_LINE)).decode("utf-8-sig", errors="replace")


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes as they lie on disk, in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def text_lines(path: Path, log: RowLog) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of a text file, blank lines left out, a byte order mark removed.

    Lines that are no UTF-8 are bad rows.
    """
    with _reading(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                log.num_rows += 1
                log.bad(number, BadRow("row", f"is not UTF-8 text ({error.reason})", "not_utf8"))
                continue
            if not line.isspace() and line:
                yield number, line


class _KeyTwice(Exception):
    """An object has a key twice."""


def _once(pairs: list[tuple[str, object]]) -> Record:
    """An object, each of whose keys stands there once."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise _KeyTwice
    return record


class _Pairs(list[tuple[str, object]]):
    """The entries of an object, as they stand there."""


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
_PAIRS_DECODER = json.JSONDecoder(object_pairs_hook=_Pairs)


def _decode(line: str) -> object:
    """The value of a line of JSON.

    Raises:
        BadRow: a key stands twice in an object.
        ValueError, RecursionError: it is no JSON that can be read.
    """
    try:
        return _DECODER.decode(line)
    except _KeyTwice:
        twice = next(_keys_twice(_PAIRS_DECODER.decode(line)))
        raise BadRow(twice, "stands there twice", "duplicate_key") from None


def _keys_twice(value: object, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted paths of keys that stood in their object before."""
    if not isinstance(value, list):
        return
    known = set()
    for key, inner in value if isinstance(value, _Pairs) else enumerate(value):
        name = (*path, str(key))
        if key in known:
            yield ".".join(name)
        known.add(key)
        yield from _keys_twice(inner, name)


def json_records(path: Path, log: RowLog) -> Iterator[tuple[int, Record]]:
    """(line number, object) of each line of a JSON-lines file. Broken lines are bad rows."""
    for number, line in text_lines(path, log):
        log.num_rows += 1
        try:
            value = _decode(line)
        except BadRow as error:
            log.bad(number, error)
            continue
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", None) or "nested too deeply or a number too long"
            log.bad(number, BadRow("row", f"is broken JSON ({what})", "broken_json"))
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            log.bad(number, BadRow("row", "is not a JSON object", "broken_json"))


def csv_records(
    path: Path, log: RowLog, required: Iterable[str], optional: Iterable[str] = ()
) -> Iterator[tuple[int, Record]]:
    """(line number, {column: text}) of each row of a CSV file, for the columns asked for, by name.

    An optional column that the file lacks is left out of the records.

    Raises:
        TraceError: the header lacks a column, or names one twice.
    """
    lines = _LineFeed(text_lines(path, log))
    reader = csv.reader(lines)
    columns: list[tuple[str, int]] | None = None
    width = 0
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            log.num_rows += 1
            log.bad(lines.number, BadRow("row", f"is broken CSV ({error})", "broken_csv"))
            continue
        if columns is None:
            columns = _find_columns(path, lines.number, fields, tuple(required), tuple(optional))
            width = len(fields)
            continue
        log.num_rows += 1
        if len(fields) == width:
            yield lines.number, {name: fields[index] for name, index in columns}
        else:
            message = f"has {len(fields)} fields, the header has {width}"
            log.bad(lines.number, BadRow("row", message, "broken_csv"))


class _LineFeed:
    """Lines for `csv.reader`, remembering the number of the last one handed out."""

    def __init__(self, lines: Iterator[tuple[int, str]]) -> None:
        self._lines = lines
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self.number = number
            yield line


def _find_columns(
    path: Path, number: int, header: list[str], required: tuple[str, ...], optional: tuple[str, ...]
) -> list[tuple[str, int]]:
    names = [name.strip() for name in header]
    for name in (*required, *optional):
        if names.count(name) > 1:
            raise TraceError(f"{path}:{number}: {name}: the header has this column twice")
    for name in required:
        if name not in names:
            near = did_you_mean(name, names)
            raise TraceError(
                f"{path}:{number}: {name}: no such column{near}; the header has {', '.join(names)}"
            )
    return [(name, names.index(name)) for name in (*required, *optional) if name in names]


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write lines to a temporary file beside `path`, then give it that name. Returns how many.

    Whatever goes wrong, `path` is either the old file or the whole new one. A link stays, and what
    it leads to is written; what is no file but takes lines, such as a device, gets them directly.
    """
    count = 0
    is_file = path.is_file() or not path.exists()
    target = Path(os.path.realpath(path))
    written = target.with_name(f".{target.name}.{os.getpid()}.tmp") if is_file else path
    try:
        with written.open("w", encoding="utf-8", newline="\n") as file:
            for line in lines:
                file.write(line + "\n")
                count += 1
        if is_file:
            os.replace(written, target)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if is_file:
            with suppress(OSError):
                written.unlink()
    return count
