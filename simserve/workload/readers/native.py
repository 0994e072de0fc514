"""simserve's own JSON lines: every field of a TraceRequest, units in the names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from simserve.errors import TraceError, did_you_mean
from simserve.segments import Part, Segment, Segments, total_len
from simserve.types import MmItem, TraceRequest
from simserve.workload.files import json_records
from simserve.workload.readers.base import Options, Reader, first_object, private_prompt, row_id
from simserve.workload.readers.native_sampling import encode_sampling, parse_sampling
from simserve.workload.rows import (
    MAX_TOKENS,
    BadRow,
    Record,
    Row,
    RowLog,
    count,
    moment,
    parse_rows,
    text_or_none,
)

__all__ = ["KEYS", "NativeReader", "encode"]

KEYS = (
    "request_id",
    "arrival_s",
    "prompt",
    "prompt_len",
    "output",
    "output_len",
    "class",
    "priority",
    "session",
    "turn",
    "parent",
    "think_time_s",
    "cache_salt",
    "lora_id",
    "mm_items",
    "prompt_logprobs",
    "n",
    "group",
    "sibling",
    "sampling",
)
MAX_SEQUENCES = 2**14
_KNOWN = frozenset(KEYS)
_RARE = _KNOWN - {"request_id", "arrival_s", "prompt", "prompt_len", "output_len"}


class NativeReader(Reader):
    """The keys of docs/trace-formats.md; `arrival_s`, `output_len` and a prompt are required.

    A prompt is `prompt` (a list of [segment, length]) or `prompt_len` (it shares nothing).
    Unknown keys are bad rows.
    """

    name = "simserve"
    names_requests: ClassVar[bool] = True

    def sniff(self, path: Path, head: str) -> bool:
        """Rows with `arrival_s` and `output_len`."""
        return {"arrival_s", "output_len"} <= first_object(head).keys()

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        return parse_rows(json_records(path, log), _parse, log)


def _parse(number: int, record: Record) -> tuple[Row]:
    if not record.keys() <= _KNOWN:
        key = next(key for key in record if key not in _KNOWN)
        known = did_you_mean(key, KEYS) or f"; the keys are {', '.join(KEYS)}"
        raise BadRow(key[:40], f"unknown key{known}", "unknown_key")
    request_id = text_or_none(record, "request_id") or row_id(number)
    fields: dict[str, Any] = {
        "request_id": request_id,
        "prompt": _prompt(record, request_id),
        "output_len": count(record, "output_len", "output"),
    }
    if not _RARE.isdisjoint(record):
        fields |= _rare_fields(record, fields)
    return (Row(number, moment(record, "arrival_s"), fields),)


def _prompt(record: Record, request_id: str) -> Segments:
    if "prompt" not in record:
        return private_prompt(request_id, count(record, "prompt_len", "prompt"))
    parts = _parts(record["prompt"], "prompt")
    prompt_len = total_len(parts)
    if record.get("prompt_len", prompt_len) != prompt_len:
        message = f"is {record['prompt_len']!r}, but the parts of prompt have {prompt_len} tokens"
        raise BadRow("prompt_len", message, "wrong_length")
    return parts


def _rare_fields(record: Record, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that most rows leave at their defaults."""
    rare: dict[str, Any] = {
        "class_": text_or_none(record, "class") or "",
        "priority": _whole(record, "priority", -(2**63)),
        "session": text_or_none(record, "session"),
        "turn": _whole(record, "turn", 0),
        "parent": text_or_none(record, "parent"),
        "think_time_s": moment(record, "think_time_s") if "think_time_s" in record else 0.0,
        "cache_salt": text_or_none(record, "cache_salt"),
        "lora_id": _lora_id(record),
        "mm_items": _mm_items(record, total_len(fields["prompt"])),
        "prompt_logprobs": _flag(record, "prompt_logprobs"),
        "n": _num_sequences(record),
        "group": text_or_none(record, "group"),
        "sibling": _whole(record, "sibling", 0),
        "sampling": parse_sampling(record, fields["output_len"]),
    }
    if record.get("output") is not None:
        rare["output"] = _parts(record["output"], "output")
        output_len = total_len(rare["output"])
        if output_len != fields["output_len"]:
            message = f"is {fields['output_len']}, but the parts of output have {output_len} tokens"
            raise BadRow("output_len", message, "wrong_length")
    return rare


def _parts(value: Any, field: str) -> Segments:
    if not isinstance(value, list) or not value:
        raise BadRow(field, "is not a list of [segment, length]", "bad_segments")
    parts = tuple([_part(part, f"{field}[{index}]") for index, part in enumerate(value)])
    if total_len(parts) > MAX_TOKENS:
        raise BadRow(field, f"is more than {MAX_TOKENS} tokens", "too_large")
    return parts


def _part(value: Any, field: str) -> Part:
    if not isinstance(value, list) or len(value) != 2:
        raise BadRow(field, "is not [segment, length]", "bad_segments")
    segment, length = value
    if type(length) is not int or length < 1:
        raise BadRow(field, "has a length that is no whole number >= 1", "bad_segments")
    if isinstance(segment, list):
        if len(segment) < length or any(type(i) is not int or i < 0 for i in segment):
            raise BadRow(field, f"does not hold {length} token ids", "bad_segments")
        return tuple(segment), length
    if isinstance(segment, str):
        text_or_none({field: segment}, field)
    elif type(segment) is not int:
        message = "has a segment that is no whole number, text or list of token ids"
        raise BadRow(field, message, "bad_segments")
    return segment, length


def _whole(record: Record, field: str, least: int, default: int = 0) -> int:
    value = record.get(field, default)
    if type(value) is not int or not least <= value < 2**63:
        raise BadRow(field, f"is not a whole number >= {least}", "not_a_number")
    return value


def _num_sequences(record: Record) -> int:
    n = _whole(record, "n", 1, default=1)
    if n > MAX_SEQUENCES:
        raise BadRow("n", f"is more than {MAX_SEQUENCES} sequences", "too_large")
    return n


def _lora_id(record: Record) -> int | str | None:
    value = record.get("lora_id")
    return value if type(value) is int else text_or_none(record, "lora_id")


def _flag(record: Record, field: str) -> bool:
    value = record.get(field, False)
    if not isinstance(value, bool):
        raise BadRow(field, "is neither true nor false", "not_a_flag")
    return value


def _mm_items(record: Record, prompt_len: int) -> tuple[MmItem, ...]:
    items = record.get("mm_items", [])
    if not isinstance(items, list):
        raise BadRow("mm_items", "is not a list", "bad_mm_items")
    return tuple(_mm_item(item, f"mm_items[{i}]", prompt_len) for i, item in enumerate(items))


def _mm_item(item: Any, field: str, prompt_len: int) -> MmItem:
    if not isinstance(item, dict) or item.keys() != {"identifier", "offset", "length"}:
        raise BadRow(field, "is not {identifier, offset, length}", "bad_mm_items")
    identifier = text_or_none(item, "identifier")
    offset, length = item["offset"], item["length"]
    whole = type(offset) is int and type(length) is int
    if identifier is None or not whole or offset < 0 or length < 1:
        raise BadRow(field, "needs a text, an offset >= 0 and a length >= 1", "bad_mm_items")
    if offset + length > prompt_len:
        raise BadRow(field, f"ends beyond the prompt's {prompt_len} tokens", "bad_mm_items")
    return MmItem(identifier, offset, length)


def encode(request: TraceRequest) -> str:
    """One line of the format; reading it gives back an equal request.

    Raises:
        TraceError: a field holds a number that is not finite, or something that JSON has not; or
            there are more tokens than a row may have.
    """
    prompt_len = request.prompt_len
    if max(prompt_len, request.output_len) > MAX_TOKENS:
        raise TraceError(
            f"request {request.request_id}: cannot be written: {prompt_len} + {request.output_len} "
            f"tokens; prompt and output have at most {MAX_TOKENS} each"
        )
    record: dict[str, Any] = {
        "request_id": request.request_id,
        "arrival_s": request.arrival_s,
        "output_len": request.output_len,
    }
    if request.prompt == private_prompt(request.request_id, prompt_len):
        record["prompt_len"] = prompt_len
    else:
        record["prompt"] = _encode_parts(request.prompt)
    if request.output:
        record["output"] = _encode_parts(request.output)
    if request.mm_items:
        record["mm_items"] = [item._asdict() for item in request.mm_items]
    rare = {
        "class": request.class_,
        "priority": request.priority,
        "session": request.session,
        "turn": request.turn,
        "parent": request.parent,
        "think_time_s": request.think_time_s,
        "cache_salt": request.cache_salt,
        "prompt_logprobs": request.prompt_logprobs,
        "n": 0 if request.n == 1 else request.n,
        "group": request.group,
        "sibling": request.sibling,
    }
    record |= {key: value for key, value in rare.items() if value}
    if request.sampling or request.logprobs is not None:
        record["sampling"] = encode_sampling(request)
    if request.lora_id is not None:
        record["lora_id"] = request.lora_id
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceError(f"request {request.request_id}: cannot be written: {error}") from error


def _encode_parts(parts: Segments) -> list[tuple[Segment, int]]:
    return list(parts)
