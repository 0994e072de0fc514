"""Azure LLM inference CSV of 2023, 2024 and 2025: time stamps to 100 ns, no prefix information."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date
from functools import lru_cache
from pathlib import Path

from simserve.workload.files import csv_records
from simserve.workload.readers.base import Options, Reader, first_fields, private_prompt, row_id
from simserve.workload.rows import BadRow, Record, Row, RowLog, clock, count_text, parse_rows

__all__ = ["AzureReader"]

_TICKS_PER_S = 10_000_000
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,7}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)


class AzureReader(Reader):
    """`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; other columns are not used.

    Stamps may have no fraction and up to seven digits of one. A stamp without UTC offset is the
    trace's own wall clock: it never goes through the time zone of the machine. A file has stamps
    with offsets, or without, not both.
    """

    name = "azure"
    ticks_per_s = _TICKS_PER_S
    shares_prefixes = False

    def sniff(self, path: Path, head: str) -> bool:
        """A header with the three columns."""
        return {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(first_fields(head))

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        ticks_of = _stamps(clock())

        def parse(number: int, record: Record) -> tuple[Row]:
            request_id = row_id(number)
            prompt_len = count_text(record, "ContextTokens", "prompt")
            fields = {
                "request_id": request_id,
                "prompt": private_prompt(request_id, prompt_len),
                "output_len": count_text(record, "GeneratedTokens", "output"),
            }
            return (Row(number, ticks_of(record["TIMESTAMP"].strip()), fields),)

        columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        return parse_rows(csv_records(path, log, columns), parse, log)


def _stamps(since_first: Callable[[int], float]) -> Callable[[str], float]:
    """A function from stamps to ticks that refuses to mix stamps with and without offset."""
    with_offset: bool | None = None

    def ticks_of(stamp: str) -> float:
        nonlocal with_offset
        match = _STAMP.fullmatch(stamp)
        if match is None:
            message = f"is {stamp[:40]!r}, not a stamp like 2024-05-10 00:00:00.009930+00:00"
            raise BadRow("TIMESTAMP", message, "bad_timestamp")
        whole, fraction, offset = match.groups()
        if with_offset is None:
            with_offset = offset is not None
        if with_offset is not (offset is not None):
            kinds = ("an", "none") if offset is not None else ("no", "one")
            message = f"has {kinds[0]} UTC offset, but earlier rows have {kinds[1]}"
            raise BadRow("TIMESTAMP", message, "mixed_clocks")
        seconds = _seconds(whole) - (_offset_s(offset) if offset else 0)
        return since_first(seconds * _TICKS_PER_S + int((fraction or "0").ljust(7, "0")))

    return ticks_of


@lru_cache(maxsize=64)
def _seconds(whole: str) -> int:
    """Seconds of a stamp without fraction and offset; plain arithmetic on the numbers written."""
    try:
        days = date.fromisoformat(whole[:10]).toordinal()
    except ValueError as error:
        raise BadRow("TIMESTAMP", f"is no date: {error}", "bad_timestamp") from None
    hours, minutes, seconds = int(whole[11:13]), int(whole[14:16]), int(whole[17:])
    if hours > 23 or minutes > 59 or seconds > 59:
        raise BadRow("TIMESTAMP", f"is no time of day: {whole[11:]}", "bad_timestamp")
    return days * 86_400 + hours * 3600 + minutes * 60 + seconds


def _offset_s(offset: str) -> int:
    if offset == "Z":
        return 0
    seconds = int(offset[1:3]) * 3600 + int(offset[-2:]) * 60
    return -seconds if offset[0] == "-" else seconds
