"""Arrow arrays straight from numpy buffers, and back.

`pyarrow.array` and `to_numpy` import pandas to recognise their input, which costs half a second and
30 MB in a process that needs no data frame; these functions do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simserve.errors import RunDirectoryError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["column", "items", "lists", "named", "numbers", "strings"]

NUMBERS = frozenset(("int32", "int64", "float", "double"))
"""Arrow types of what is read as numbers; those of our own files, and of files edited elsewhere."""


def numbers(values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """An int64 or float64 array, null where `missing` (default: at NaN)."""
    import pyarrow as pa

    is_float = values.dtype.kind == "f"
    if missing is None and is_float:
        missing = np.isnan(values)
    plain = np.ascontiguousarray(values, dtype=np.float64 if is_float else np.int64)
    kind = pa.float64() if is_float else pa.int64()
    return pa.Array.from_buffers(kind, len(plain), [_validity(missing), pa.py_buffer(plain)])


def strings(values: Sequence[str | None]) -> pa.Array:
    """A string array, null at None."""
    encoded = [b"" if value is None else value.encode() for value in values]
    missing = np.array([value is None for value in values], dtype=np.bool_)
    return _strings(encoded, np.fromiter(map(len, encoded), np.int64, len(encoded)), missing)


def named(names: Sequence[str | None], codes: NDArray[Any]) -> pa.Array:
    """A string array: row i is names[codes[i]], null at None. (`take` would load Arrow's compute
    functions, which takes longer than a short run.)"""
    encoded = [b"" if name is None else name.encode() for name in names]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    missing = np.array([name is None for name in names], dtype=np.bool_)
    rows = list(map(encoded.__getitem__, codes.tolist()))
    return _strings(rows, lengths[codes], missing[codes])


def _strings(
    rows: Sequence[bytes], lengths: NDArray[np.int64], missing: NDArray[np.bool_]
) -> pa.Array:
    import pyarrow as pa

    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [_validity(missing), pa.py_buffer(offsets), pa.py_buffer(b"".join(rows))]
    return pa.Array.from_buffers(pa.large_string(), len(rows), buffers)


def lists(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.Array:
    """A list array: row i holds values[offsets[i]:offsets[i + 1]]."""
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(numbers(offsets), numbers(values))


def column(table: pa.Table, name: str) -> NDArray[Any]:
    """An int64 or float64 column; with nulls it becomes float64, NaN at the nulls.

    Raises:
        RunDirectoryError: it holds something else.
    """
    array = table[name].combine_chunks()
    if str(array.type) not in NUMBERS:
        raise RunDirectoryError(f"column {name}: expected numbers, not {array.type}")
    return _values(array)


def items(table: pa.Table, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """A list column as `lists` takes it: offsets [rows + 1] and all items one after the other."""
    array = table[name].combine_chunks()
    if not hasattr(array, "offsets") or str(array.type.value_type) not in NUMBERS:
        raise RunDirectoryError(f"column {name}: expected lists of numbers, not {array.type}")
    offsets = _values(array.offsets)
    return offsets - offsets[0], _values(array.flatten())


def _values(array: pa.Array) -> NDArray[Any]:
    validity, data = array.buffers()
    dtype = np.dtype(array.type.to_pandas_dtype())
    if data is None or not len(array):
        return np.zeros(0, dtype=dtype)
    values = np.frombuffer(data, dtype=dtype)[array.offset : array.offset + len(array)]
    if validity is None or not array.null_count:
        return values
    bits = np.unpackbits(np.frombuffer(validity, dtype=np.uint8), bitorder="little")
    there = bits[array.offset : array.offset + len(array)].astype(np.bool_)
    return np.where(there, values, np.nan)


def _validity(missing: NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Arrow's bitmap of the values that are there; None if all are."""
    import pyarrow as pa

    if missing is None or not missing.any():
        return None
    return pa.py_buffer(np.packbits(~missing, bitorder="little"))
