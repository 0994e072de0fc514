"""What requests were given by a model, as a table: token ids, and what they were chosen from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from simserve.metrics.arrow import numbers, strings

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = ["Output", "outputs_table"]


class Output(Protocol):
    """What one request was given. Lists run in parallel, one item a token."""

    request_id: str
    token_ids: list[int]
    ranks: list[int]
    """How many tokens were at least as likely as the chosen one; empty: no log-probabilities."""
    ids: list[NDArray[np.int32]]
    """The chosen token, then the likeliest ones."""
    logprobs: list[NDArray[np.float32]]
    """Log-probabilities of `ids`."""


def outputs_table(outputs: Sequence[Output]) -> pa.Table:
    """One row a request, in the order given. Without log-probabilities their lists are empty."""
    import pyarrow as pa

    chosen = [[float(token[0]) for token in one.logprobs] for one in outputs]
    return pa.table(
        {
            "request_id": strings([one.request_id for one in outputs]),
            "output_token_ids": _lists([one.token_ids for one in outputs], np.int64),
            "logprobs": _lists(chosen, np.float64),
            "ranks": _lists([one.ranks for one in outputs], np.int64),
            "top_token_ids": _lists_of_tops([one.ids for one in outputs], np.int64),
            "top_logprobs": _lists_of_tops([one.logprobs for one in outputs], np.float64),
        }
    )


def _lists(rows: Sequence[Collection[Any]], dtype: type) -> pa.Array:
    import pyarrow as pa

    values: NDArray[Any] = np.fromiter(chain.from_iterable(rows), dtype)
    return pa.LargeListArray.from_arrays(_offsets(rows), numbers(values))


def _lists_of_tops(rows: Sequence[Sequence[NDArray[Any]]], dtype: type) -> pa.Array:
    """Of each token, what stands behind the chosen one."""
    import pyarrow as pa

    tops = [token[1:] for token in chain.from_iterable(rows)]
    return pa.LargeListArray.from_arrays(_offsets(rows), _lists(tops, dtype))


def _offsets(rows: Sequence[Collection[Any]]) -> pa.Array:
    return numbers(np.cumsum([0, *map(len, rows)]))
