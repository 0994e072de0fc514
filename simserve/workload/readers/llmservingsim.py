"""LLMServingSim JSON lines: nanoseconds, token ids, nested agentic calls; and its measured runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from simserve.segments import Segments
from simserve.workload.files import json_records
from simserve.workload.readers.base import Options, Reader, first_object, private_prompt, row_id
from simserve.workload.rows import (
    BadRow,
    Record,
    Row,
    RowLog,
    clock,
    count,
    moment,
    parse_rows,
    text_or_none,
)

__all__ = ["LlmServingSimReader"]

_NS = 1_000_000_000
_MAX_TOKEN_ID = 2**31 - 1


class _Clock(NamedTuple):
    field: str
    ticks: Callable[[Record], float]


class LlmServingSimReader(Reader):
    """`input_toks`, `output_toks`, `arrival_time_ns`, and token ids where the file has them.

    A row with `sub_requests` is a session: each call starts `tool_duration_ns` after the one
    before has ended (closed loop). In files of measured runs arrivals are `arrival_time`, seconds
    since the epoch; the engine's stamps beside them are of a monotonic clock, and one is never
    subtracted from the other: they are not used, and rows of both kinds in one file are refused.
    """

    name = "llmservingsim"
    ticks_per_s = _NS
    names_requests = True

    def sniff(self, path: Path, head: str) -> bool:
        """Rows with `input_toks`, or sessions of `sub_requests`."""
        row = first_object(head)
        return {"input_toks", "output_toks"} <= row.keys() or "sub_requests" in row

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order; the calls of a session share its row number."""
        arrival = _arrivals()

        def parse(number: int, record: Record) -> list[Row]:
            if "sub_requests" in record:
                return _session(number, record, arrival)
            fields = _request(record, text_or_none(record, "request_id") or row_id(number))
            return [Row(number, arrival(record), fields)]

        return parse_rows(json_records(path, log), parse, log)


def _arrivals() -> Callable[[Record], float]:
    """A function from rows to nanoseconds that refuses a second clock in the same file."""
    since_first = clock()
    known = {
        "arrival_time_ns": lambda record: since_first(_whole_ns(record, "arrival_time_ns")),
        "arrival_time": lambda record: since_first(round(moment(record, "arrival_time") * _NS)),
    }
    used: str | None = None

    def arrival(record: Record) -> float:
        nonlocal used
        field = next((name for name in known if name in record), "arrival_time_ns")
        if used is not None and field != used:
            message = f"is another clock than {used} of earlier rows: they have no common origin"
            raise BadRow(field, message, "mixed_clocks")
        ticks = known[field](record)
        used = field
        return ticks

    return arrival


def _session(number: int, record: Record, arrival: Callable[[Record], float]) -> list[Row]:
    session = text_or_none(record, "session_id") or row_id(number)
    calls = record["sub_requests"]
    if not isinstance(calls, list) or not calls:
        raise BadRow("sub_requests", "is not a list of calls", "missing")
    ticks = arrival(record)
    rows: list[Row] = []
    for turn, call in enumerate(calls):
        if not isinstance(call, dict):
            raise BadRow(f"sub_requests[{turn}]", "is not a JSON object", "broken_json")
        fields = _request(call, f"{session}/{turn}") | {"session": session, "turn": turn}
        if turn:
            fields["parent"] = f"{session}/{turn - 1}"
            fields["think_time_s"] = moment(calls[turn - 1], "tool_duration_ns") / _NS
        rows.append(Row(number, ticks, fields))
    return rows


def _request(record: Record, request_id: str) -> dict[str, Any]:
    prompt_len = count(record, "input_toks", "prompt")
    output_len = count(record, "output_toks", "output")
    return {
        "request_id": request_id,
        "prompt": _literal(record, "input_tok_ids", prompt_len)
        or private_prompt(request_id, prompt_len),
        "output_len": output_len,
        "output": _literal(record, "output_tok_ids", output_len),
    }


def _literal(record: Record, field: str, length: int) -> Segments | None:
    """Token ids as they are; None if the row has none."""
    ids = record.get(field)
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != length:
        raise BadRow(field, f"is not a list of {length} token ids", "bad_token_ids")
    if any(type(i) is not int or not 0 <= i <= _MAX_TOKEN_ID for i in ids):
        raise BadRow(field, "holds something that is no token id", "bad_token_ids")
    return ((tuple(ids), length),)


def _whole_ns(record: Record, field: str) -> int:
    value = record.get(field)
    if type(value) is int and 0 <= value < 2**63:
        return value
    moment(record, field)
    raise BadRow(field, "is not a whole number of nanoseconds", "not_a_number")
