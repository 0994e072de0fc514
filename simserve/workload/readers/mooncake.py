"""Mooncake JSON lines: milliseconds, prompts as ids of 512-token blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from simserve.errors import did_you_mean
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
    count,
    moment,
    parse_rows,
    text_or_none,
)

__all__ = ["MooncakeReader"]

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay")
_KNOWN = frozenset(_KEYS)
_HINT = " (a vLLM timed_trace has seconds and 16-token blocks: format: timed_trace)"


class MooncakeReader(Reader):
    """`timestamp` (ms), `input_length`, `output_length`, `hash_ids` (absent: nothing is shared).

    `session_id` names a conversation; a row with `delay` (ms) in place of `timestamp` starts so
    long after the previous row of its session has ended (closed loop).
    """

    name = "mooncake"
    options: ClassVar[OptionTable] = {
        "block_size": Option(int, 512, "tokens that a hash id stands for", minimum=1)
    }
    ticks_per_s = 1000

    def sniff(self, path: Path, head: str) -> bool:
        """Rows with input and output length, and a timestamp or a delay."""
        row = first_object(head)
        return {"input_length", "output_length"} <= row.keys() and bool(
            {"timestamp", "delay"} & row.keys()
        )

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        blocks = HashBlocks(options["block_size"], _HINT)
        last_of: dict[str, Row] = {}

        def parse(number: int, record: Record) -> tuple[Row]:
            _check_keys(record, log)
            request_id = row_id(number)
            input_len = count(record, "input_length", "prompt")
            fields = {
                "request_id": request_id,
                "output_len": count(record, "output_length", "output"),
            }
            session = text_or_none(record, "session_id")
            previous = last_of.get(session) if session is not None else None
            if "timestamp" in record and record.get("delay") is not None:
                message = "stands beside timestamp: a request waits, or has a time of its own"
                raise BadRow("delay", message, "two_times")
            if "timestamp" in record or previous is None:
                ticks = moment(record, "timestamp")
            else:
                ticks = previous.ticks
                fields["parent"] = previous.fields["request_id"]
                fields["think_time_s"] = moment(record, "delay") / 1000
            if "hash_ids" in record:
                prompt = blocks.prompt(number, request_id, record, "hash_ids", input_len)
            else:
                log.note("no hash_ids: the prompt shares nothing")
                prompt = private_prompt(request_id, input_len)
            fields["prompt"] = prompt
            row = Row(number, ticks, fields)
            if session is not None:
                fields["session"] = session
                fields["turn"] = previous.fields["turn"] + 1 if previous else 0
                last_of[session] = row
            return (row,)

        return parse_rows(json_records(path, log), parse, log)


def _check_keys(record: Record, log: RowLog) -> None:
    """A key that is nearly one of ours is misspelt: a bad row. Others are told and ignored."""
    if record.keys() <= _KNOWN:
        return
    for key in record:
        if key in _KNOWN:
            continue
        near = did_you_mean(key, _KEYS)
        if near:
            raise BadRow(key[:40], f"unknown key{near}", "unknown_key")
        log.note(f"unknown key '{key[:40]}' ignored")
