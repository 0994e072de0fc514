"""Dynamo request traces: events in order of completion; `request_end` is what makes a request."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from simserve.segments import Segments
from simserve.workload.files import json_records
from simserve.workload.readers.base import (
    Option,
    Options,
    OptionTable,
    Reader,
    first_object,
    private_prompt,
    row_id,
)
from simserve.workload.readers.hashed import HashBlocks
from simserve.workload.rows import (
    BadRow,
    Record,
    Row,
    RowLog,
    clock,
    count,
    parse_rows,
    text_or_none,
)

__all__ = ["DynamoReader"]

_SCHEMA = "dynamo.request.trace."


class _End(NamedTuple):
    request_id: str
    time_ms: int


_TIME = attrgetter("time_ms")


class DynamoReader(Reader):
    """`request_end` events; tool events are counted and passed over.

    Arrival is `request_received_ms`. Prompts are `replay.input_sequence_hashes`, 64-bit ids of
    blocks of `replay.trace_block_size` tokens. With `closed_loop`, a request waits for the last
    one of its session (for the first of a sub-agent: of the parent session) that had ended when
    it came, and then for as long as it did in the trace, tools included.
    """

    name = "dynamo"
    options: ClassVar[OptionTable] = {
        "closed_loop": Option(bool, False, "start requests when those before have ended"),
    }
    ticks_per_s = 1000
    names_requests = True

    def sniff(self, path: Path, head: str) -> bool:
        """Events of schema dynamo.request.trace."""
        return str(_event(first_object(head)).get("schema", "")).startswith(_SCHEMA)

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        since_first = clock()
        prompts = _Prompts(log)
        sessions = _Sessions(options["closed_loop"])

        def parse(number: int, record: Record) -> tuple[Row, ...]:
            event = _event(record)
            kind = event.get("event_type")
            if kind != "request_end":
                if not isinstance(kind, str):
                    raise BadRow("event_type", "is missing or no text", "missing")
                log.note(f"event '{kind[:40]}' passed over")
                return ()
            request = _object(event, "request")
            request_id = text_or_none(request, "request_id") or row_id(number)
            received_ms = _epoch_ms(request, "request_received_ms")
            end = _End(request_id, _epoch_ms(event, "event_time_unix_ms"))
            fields = {
                "request_id": request_id,
                "output_len": count(request, "output_tokens", "output"),
                **sessions.place(event, received_ms),
            }
            ticks = since_first(received_ms)
            fields["prompt"] = prompts.prompt(number, request_id, request)
            sessions.ended(event, end)
            return (Row(number, ticks, fields),)

        return parse_rows(json_records(path, log), parse, log)


class _Prompts:
    """Prompts from block hashes; every row of a file has the same block size."""

    def __init__(self, log: RowLog) -> None:
        self._log = log
        self._blocks: HashBlocks | None = None

    def prompt(self, number: int, request_id: str, request: Record) -> Segments:
        if request.get("replay") is None:
            self._log.note("no replay data: the prompt shares nothing")
            return private_prompt(request_id, count(request, "input_tokens", "prompt"))
        replay = _object(request, "replay")
        input_len = count(replay, "input_length", "prompt")
        block_size = count(replay, "trace_block_size", "block")
        if self._blocks is None:
            self._blocks = HashBlocks(block_size)
        if block_size != self._blocks.block_size:
            message = f"is {block_size}, but {self._blocks.block_size} in earlier rows"
            raise BadRow("trace_block_size", message, "wrong_block_size")
        return self._blocks.prompt(number, request_id, replay, "input_sequence_hashes", input_len)


class _Sessions:
    """Who waits for whom, as far as the events tell."""

    def __init__(self, closed_loop: bool) -> None:
        self._closed_loop = closed_loop
        self._ends: dict[str, list[_End]] = {}
        """By session, in order of time."""

    def place(self, event: Record, received_ms: int) -> dict[str, Any]:
        """Session and turn of a request, and what it waits for."""
        session, parent_session = self._names(event)
        if session is None:
            return {}
        ends = self._ends.get(session, [])
        place: dict[str, Any] = {"session": session, "turn": len(ends)}
        if not self._closed_loop:
            return place
        above = ends or self._ends.get(parent_session or "", [])
        if num_before := bisect_right(above, received_ms, key=_TIME):
            last_ms = above[num_before - 1].time_ms
            last = above[bisect_left(above, last_ms, key=_TIME)]  # the first of equals in the file
            place["parent"] = last.request_id
            place["think_time_s"] = (received_ms - last.time_ms) / 1000
        return place

    def ended(self, event: Record, end: _End) -> None:
        """Remember the end of a request that was kept."""
        session, _ = self._names(event)
        if session is not None:
            insort(self._ends.setdefault(session, []), end, key=_TIME)

    def _names(self, event: Record) -> tuple[str | None, str | None]:
        if event.get("agent_context") is None:
            return None, None
        context = _object(event, "agent_context")
        return text_or_none(context, "session_id"), text_or_none(context, "parent_session_id")


def _event(record: Record) -> Record:
    """The event of a row, which may stand in an envelope."""
    inner = record.get("event")
    return inner if isinstance(inner, dict) else record


def _object(record: Record, field: str) -> Record:
    value = record.get(field)
    if not isinstance(value, dict):
        raise BadRow(field, "is missing or no JSON object", "missing")
    return value


def _epoch_ms(record: Record, field: str) -> int:
    value = record.get(field)
    if type(value) is not int or not 0 <= value < 2**53:
        raise BadRow(field, "is not a whole number of milliseconds", "not_a_number")
    return value
