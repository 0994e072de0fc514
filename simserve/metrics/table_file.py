"""Parquet files that are written while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from simserve.errors import RunDirectoryError
from simserve.metrics.outputs import Output, outputs_table
from simserve.metrics.recorder import ROW_GROUP, RequestRows, StepRows
from simserve.metrics.tables import requests_table, steps_table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["REQUESTS", "STEPS", "TableFile", "TableFiles"]

REQUESTS, STEPS, OUTPUTS = "requests.parquet", "steps.parquet", "outputs.parquet"
_OUTPUTS_AT_A_TIME = 1024


class TableFile:
    """One table, written a piece at a time with fixed settings: equal rows give equal bytes.

    A column that only later pieces have is null in the rows before them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Append rows: whole groups, but for the last piece.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        try:
            if self._writer is None:
                self._open(table.schema)
            elif not table.schema.equals(self._writer.schema):
                table = self._fitted(table)
            assert self._writer is not None
            self._writer.write_table(table, row_group_size=ROW_GROUP)
        except OSError as error:
            raise RunDirectoryError(f"{self._path.name} cannot be written: {error}") from error

    def close(self) -> None:
        """The file is complete."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, schema: pa.Schema) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._writer = pq.ParquetWriter(
            self._path,
            schema,
            version="2.6",
            compression="snappy",
            use_dictionary=True,
            # The default pool keeps what it has had once: 25 MB more for good.
            memory_pool=pa.system_memory_pool(),
        )

    def _fitted(self, table: pa.Table) -> pa.Table:
        """`table` with all columns of the file, after the file has got all those of `table`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        assert self._writer is not None
        schema = _union(self._writer.schema, table.schema)
        if len(schema) > len(self._writer.schema):
            self._writer.close()
            narrow = self._path.rename(self._path.with_suffix(".narrow"))
            self._open(schema)
            with pq.ParquetFile(narrow) as file:
                for number in range(file.num_row_groups):
                    self.write(_with_columns(file.read_row_group(number), schema))
            narrow.unlink()
        return _with_columns(pa.table(table), schema)


class TableFiles:
    """The tables of a run, as files in a folder (protocol `RowSink`).

    `save_detailed`: with every gap between tokens, and with the tokens that a model has chosen.
    """

    def __init__(self, folder: Path, save_detailed: bool) -> None:
        self._save_detailed = save_detailed
        self._requests = TableFile(folder / REQUESTS)
        self._steps = TableFile(folder / STEPS)
        self._outputs = TableFile(folder / OUTPUTS)
        self._new_outputs: list[Output] = []

    def write(self, requests: pa.Table, steps: pa.Table) -> None:
        """Write whole tables."""
        self._requests.write(requests)
        self._steps.write(steps)

    def add_requests(self, rows: RequestRows) -> None:
        """Append requests."""
        self._requests.write(requests_table(rows, self._save_detailed))

    def add_steps(self, rows: StepRows) -> None:
        """Append steps."""
        self._steps.write(steps_table(rows))

    def add_output(self, output: Output) -> None:
        """Append what a request was given."""
        if self._save_detailed:
            self._new_outputs.append(output)
            if len(self._new_outputs) == _OUTPUTS_AT_A_TIME:
                self._write_outputs()

    def close(self) -> None:
        """All rows are there."""
        self._requests.close()
        self._steps.close()
        if self._new_outputs:
            self._write_outputs()
        self._outputs.close()

    def _write_outputs(self) -> None:
        self._outputs.write(outputs_table(self._new_outputs))
        self._new_outputs.clear()


def _union(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """The fields of both; what is new stands behind the field that it follows in `second`."""
    at = 0
    for field in second:
        if field.name in first.names:
            at = first.get_field_index(field.name) + 1
        else:
            first = first.insert(at, field)
            at += 1
    return first


def _with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with the columns of `schema`, null where it has none."""
    import pyarrow as pa

    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
