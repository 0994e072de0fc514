"""Vidur CSV: seconds, prefill and decode tokens; some files have no arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from simserve.errors import TraceError
from simserve.workload.files import csv_records
from simserve.workload.readers.base import (
    Option,
    Options,
    OptionTable,
    Reader,
    first_fields,
    private_prompt,
    row_id,
)
from simserve.workload.rows import Record, Row, RowLog, count_text, moment_text, parse_rows

__all__ = ["VidurReader"]

_LENGTHS = ("num_prefill_tokens", "num_decode_tokens")


class VidurReader(Reader):
    """`arrived_at` (s), `num_prefill_tokens`, `num_decode_tokens`.

    Where the file has no `arrived_at`, `interval_s` says how far apart its requests arrive.
    """

    name = "vidur"
    shares_prefixes = False
    options: ClassVar[OptionTable] = {
        "interval_s": Option(float, None, "gap between arrivals, for files without arrived_at", 0)
    }

    def sniff(self, path: Path, head: str) -> bool:
        """A header with the two lengths."""
        return set(_LENGTHS) <= set(first_fields(head))

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        interval_s = options["interval_s"]
        num_parsed = 0

        def parse(number: int, record: Record) -> tuple[Row]:
            nonlocal num_parsed
            request_id = row_id(number)
            prompt_len = count_text(record, "num_prefill_tokens", "prompt")
            fields = {
                "request_id": request_id,
                "prompt": private_prompt(request_id, prompt_len),
                "output_len": count_text(record, "num_decode_tokens", "output"),
            }
            if interval_s is None:
                ticks = _arrival(path, record)
            else:
                ticks = _spaced(path, record, num_parsed * interval_s)
            num_parsed += 1
            return (Row(number, ticks, fields),)

        return parse_rows(csv_records(path, log, _LENGTHS, ("arrived_at",)), parse, log)


def _arrival(path: Path, record: Record) -> float:
    if "arrived_at" not in record:
        raise TraceError(
            f"{path}:1: arrived_at: no such column, so the file has lengths but no arrivals; "
            "give the option interval_s (seconds between requests), or use the lengths in a "
            "synthetic workload"
        )
    return moment_text(record, "arrived_at")


def _spaced(path: Path, record: Record, arrival_s: float) -> float:
    if "arrived_at" in record:
        raise TraceError(
            f"{path}:1: arrived_at: the file has arrivals of its own; "
            "leave out the option interval_s"
        )
    return arrival_s
