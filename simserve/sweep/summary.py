"""The summaries of many runs as one table, in CSV and in Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["write_summary"]

Row = Mapping[str, Any]


def write_summary(folder: Path, rows: Sequence[Row]) -> None:
    """Write summary.csv and summary.parquet: a column for every key, the same rows in both."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {key: _column([row.get(key) for row in rows]) for key in _keys(rows)}
    with (folder / "summary.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    table: pa.Table = pa.table({key: pa.array(values) for key, values in columns.items()})
    pq.write_table(table, folder / "summary.parquet")


def _keys(rows: Sequence[Row]) -> list[str]:
    """In the order of the row that has most, so that a failed first point does not set it."""
    longest = max(rows, key=len, default={})
    return list(dict.fromkeys([*longest, *(key for row in rows for key in row)]))


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: numbers, truth values or text; a mixture becomes JSON text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if kinds in ({int}, {float}, {bool}, {str}, set()):
        return values
    texts = (value if isinstance(value, str | None) else json.dumps(value) for value in values)
    return list(texts)
