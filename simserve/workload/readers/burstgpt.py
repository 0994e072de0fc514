"""BurstGPT CSV, releases 1, 2 and 3: seconds, failed calls logged with zero tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simserve.workload.files import csv_records
from simserve.workload.readers.base import Options, Reader, first_fields, private_prompt, row_id
from simserve.workload.rows import (
    BadRow,
    Record,
    Row,
    RowLog,
    count_text,
    moment_text,
    parse_rows,
)

__all__ = ["BurstGptReader"]

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


class BurstGptReader(Reader):
    """`Timestamp` (s), `Request tokens`, `Response tokens`, and `Session ID` where there is one.

    Columns are found by name: release 3 puts two new ones in the middle. `Elapsed time` is the
    latency of a remote service and is not used. Calls without a session id share no session.
    """

    name = "burstgpt"
    shares_prefixes = False

    def sniff(self, path: Path, head: str) -> bool:
        """A header with the three columns."""
        return set(_COLUMNS) <= set(first_fields(head))

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""

        def parse(number: int, record: Record) -> tuple[Row]:
            request_id = row_id(number)
            prompt_len = _tokens(record, "Request tokens", "prompt")
            fields = {
                "request_id": request_id,
                "prompt": private_prompt(request_id, prompt_len),
                "output_len": _tokens(record, "Response tokens", "output"),
                "session": record.get("Session ID", "").strip() or None,
            }
            return (Row(number, moment_text(record, "Timestamp"), fields),)

        return parse_rows(csv_records(path, log, _COLUMNS, ("Session ID",)), parse, log)


def _tokens(record: Record, field: str, what: str) -> int:
    try:
        return count_text(record, field, what)
    except BadRow as fault:
        if not fault.reason.startswith("zero_"):
            raise
        raise BadRow(field, f"{fault.message}; it logs a failed call", fault.reason) from None
