"""Qwen-Bailian JSON lines: seconds, prompts as ids of 16-token blocks, chats with parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from simserve.workload.files import json_records
from simserve.workload.readers.base import Option, Options, OptionTable, Reader, first_object
from simserve.workload.readers.hashed import HashBlocks
from simserve.workload.rows import BadRow, Record, Row, RowLog, count, moment, parse_rows

__all__ = ["BailianReader"]

_ROOT = -1


class _Chat(NamedTuple):
    root: int
    timestamp: float


class BailianReader(Reader):
    """`chat_id`, `parent_chat_id` (-1: none), `timestamp` (s), lengths, `turn`, `hash_ids`.

    Arrivals stay those of the trace (open loop): when a parent ended is not recorded. The chat
    that a conversation began with names its session; `type` becomes the class of the request.
    """

    name = "bailian"
    options: ClassVar[OptionTable] = {
        "block_size": Option(int, 16, "tokens that a hash id stands for", minimum=1)
    }
    names_requests = True

    def sniff(self, path: Path, head: str) -> bool:
        """Rows with chat ids beside Mooncake's columns."""
        return {"chat_id", "parent_chat_id", "timestamp", "input_length"} <= first_object(
            head
        ).keys()

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        blocks = HashBlocks(options["block_size"])
        chats: dict[int, _Chat] = {}

        def parse(number: int, record: Record) -> tuple[Row]:
            chat_id = _whole(record, "chat_id")
            timestamp = moment(record, "timestamp")
            chat = _chat(record, chat_id, timestamp, chats)
            input_len = count(record, "input_length", "prompt")
            request_id = str(chat_id)
            fields = {
                "request_id": request_id,
                "output_len": count(record, "output_length", "output"),
                "session": str(chat.root),
                "turn": _whole(record, "turn"),
                "class_": _type(record),
            }
            fields["prompt"] = blocks.prompt(number, request_id, record, "hash_ids", input_len)
            chats[chat_id] = chat
            return (Row(number, timestamp, fields),)

        return parse_rows(json_records(path, log), parse, log)


def _chat(record: Record, chat_id: int, timestamp: float, chats: dict[int, _Chat]) -> _Chat:
    parent_id = _whole(record, "parent_chat_id", least=_ROOT)
    if parent_id == _ROOT:
        return _Chat(chat_id, timestamp)
    parent = chats.get(parent_id)
    if parent is None:
        message = f"is {parent_id}, but no row above has that chat_id"
        raise BadRow("parent_chat_id", message, "orphan")
    if timestamp < parent.timestamp:
        message = f"is {timestamp}, earlier than {parent.timestamp} of its parent {parent_id}"
        raise BadRow("timestamp", message, "child_before_parent")
    return _Chat(parent.root, timestamp)


def _type(record: Record) -> str:
    value = record.get("type", "")
    if not isinstance(value, str) or not value.isascii():
        raise BadRow("type", "is not plain text", "not_text")
    return value


def _whole(record: Record, field: str, least: int = 0) -> int:
    value = record.get(field)
    if type(value) is not int or not least <= value < 2**64:
        shown = "is missing" if field not in record else f"is not a whole number >= {least}"
        raise BadRow(field, shown, "missing" if field not in record else "not_a_number")
    return value
