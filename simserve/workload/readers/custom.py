"""vLLM bench `custom` JSON lines: prompts as text, counted without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import ClassVar

from simserve.workload.files import json_records
from simserve.workload.readers.base import (
    Option,
    Options,
    OptionTable,
    Reader,
    first_object,
    row_id,
)
from simserve.workload.rows import MAX_TOKENS, BadRow, Record, Row, RowLog, count, parse_rows

__all__ = ["CustomReader"]


class CustomReader(Reader):
    """`prompt` (text), and where present `prompt_tokens` and `output_tokens`.

    There is no tokenizer here: without `prompt_tokens` a prompt has words x `words_to_tokens`
    tokens, and the report says so. Equal texts are equal segments; texts that only begin alike
    share nothing, because where they part cannot be told in tokens. Rows have no arrivals:
    they come `interval_s` apart, by default all at once, as `vllm bench serve` sends them.
    """

    name = "custom"
    options: ClassVar[OptionTable] = {
        "words_to_tokens": Option(float, 1.3, "tokens per word of a prompt", 1e-3),
        "output_len": Option(int, 256, "output tokens of rows without output_tokens", 1),
        "interval_s": Option(float, 0.0, "gap between arrivals", 0),
    }

    def sniff(self, path: Path, head: str) -> bool:
        """Rows with a text as `prompt` and no arrival."""
        row = first_object(head)
        return isinstance(row.get("prompt"), str) and "arrival_s" not in row

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        factor, interval_s = options["words_to_tokens"], options["interval_s"]
        num_parsed = 0

        def parse(number: int, record: Record) -> tuple[Row]:
            nonlocal num_parsed
            text = _text(record)
            if "prompt_tokens" in record:
                prompt_len = count(record, "prompt_tokens", "prompt")
            else:
                prompt_len = _estimate(text, factor)
                log.note(f"no prompt_tokens: the prompt's length is an estimate, words x {factor}")
            if "output_tokens" in record:
                output_len = count(record, "output_tokens", "output")
            else:
                output_len = options["output_len"]
                log.note(f"no output_tokens: the option output_len ({output_len}) is used")
            fields = {
                "request_id": row_id(number),
                "prompt": ((_segment(text), prompt_len),),
                "output_len": output_len,
            }
            ticks = num_parsed * interval_s
            num_parsed += 1
            return (Row(number, ticks, fields),)

        return parse_rows(json_records(path, log), parse, log)


def _text(record: Record) -> str:
    text = record.get("prompt")
    if not isinstance(text, str):
        shown = "is not a text" if "prompt" in record else "is missing"
        raise BadRow("prompt", shown, "not_text" if "prompt" in record else "missing")
    if not text.strip():
        raise BadRow("prompt", "is empty: a request needs at least one prompt token", "zero_prompt")
    return text


def _estimate(text: str, factor: float) -> int:
    num_tokens = len(text.split()) * factor
    if num_tokens > MAX_TOKENS:
        raise BadRow("prompt", f"is more than {MAX_TOKENS} tokens", "too_large")
    return ceil(num_tokens)


def _segment(text: str) -> str:
    """The name of the segment that a text is: equal texts, and only they, have equal names."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"text:{digest.hexdigest()}"
