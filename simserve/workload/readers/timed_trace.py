"""vLLM bench `timed_trace` JSON lines: Mooncake's columns, but seconds and 16-token blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from simserve.workload.files import json_records
from simserve.workload.readers.base import Option, Options, OptionTable, Reader, row_id
from simserve.workload.readers.hashed import HashBlocks
from simserve.workload.rows import Record, Row, RowLog, count, moment, parse_rows

__all__ = ["TimedTraceReader"]


class TimedTraceReader(Reader):
    """`timestamp` x `sec_multiplier` seconds, `input_length`, `output_length`, `hash_ids`.

    The options are vLLM's `--timed-trace-chunk-hash-size` and `--timed-trace-sec-multiplier`.
    """

    name = "timed_trace"
    options: ClassVar[OptionTable] = {
        "block_size": Option(int, 16, "tokens that a hash id stands for", minimum=1),
        "sec_multiplier": Option(float, 1.0, "seconds that one unit of timestamp is", 1e-9),
    }

    def sniff(self, path: Path, head: str) -> bool:
        """Never: nothing in the file tells it from Mooncake, so it is asked for by name."""
        return False

    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order."""
        blocks = HashBlocks(options["block_size"])
        # Dividing by 1000 is exact to the last digit where multiplying by 0.001 is not.
        units_per_s = 1 / options["sec_multiplier"]

        def parse(number: int, record: Record) -> tuple[Row]:
            request_id = row_id(number)
            input_len = count(record, "input_length", "prompt")
            fields = {
                "request_id": request_id,
                "output_len": count(record, "output_length", "output"),
            }
            ticks = moment(record, "timestamp") / units_per_s
            fields["prompt"] = blocks.prompt(number, request_id, record, "hash_ids", input_len)
            return (Row(number, ticks, fields),)

        return parse_rows(json_records(path, log), parse, log)
