"""Geometry of a batch: where each query begins, decodes before prefills, rows that stay put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "BatchSplit",
    "PersistentBatch",
    "Reordering",
    "compute_query_start_loc",
    "reorder_batch_to_split_decodes_and_prefills",
    "split_decodes_and_prefills",
]


def compute_query_start_loc(num_scheduled_tokens: ArrayLike) -> NDArray[np.int64]:
    """First token of each request in the flattened batch, and the total; shape [requests + 1].

    >>> compute_query_start_loc([1, 1, 4]).tolist()
    [0, 1, 2, 6]
    """
    lengths = np.asarray(num_scheduled_tokens, dtype=np.int64)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    lengths.cumsum(out=starts[1:])
    return starts


class BatchSplit(NamedTuple):
    """Leading decodes and the prefills behind them, in requests and in tokens."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_start_loc: ArrayLike, decode_threshold: int = 1, require_uniform: bool = False
) -> BatchSplit:
    """Split a batch, ordered decodes first, at its first prefill.

    Args:
        query_start_loc: as `compute_query_start_loc` gives it, shape [requests + 1].
        decode_threshold: most tokens of a decode.
        require_uniform: decodes must also all have as many tokens as the first one.

    >>> split_decodes_and_prefills([0, 1, 2, 6])
    BatchSplit(num_decodes=2, num_prefills=1, num_decode_tokens=2, num_prefill_tokens=4)
    """
    starts = np.asarray(query_start_loc, dtype=np.int64)
    lengths = np.diff(starts)
    num_reqs, num_tokens = len(lengths), int(starts[-1])
    is_prefill = lengths > decode_threshold
    if require_uniform and decode_threshold > 1 and num_reqs and not is_prefill[0]:
        is_prefill = lengths != lengths[0]
    first = int(np.argmax(is_prefill)) if is_prefill.any() else num_reqs
    decode_tokens = int(starts[first])
    return BatchSplit(first, num_reqs - first, decode_tokens, num_tokens - decode_tokens)


class Reordering(NamedTuple):
    """Swaps that bring decodes to the front, in order, and the old row in each new one."""

    swaps: list[tuple[int, int]]
    order: list[int]

    @property
    def modified(self) -> bool:
        """Whether any row moved."""
        return bool(self.swaps)


def reorder_batch_to_split_decodes_and_prefills(
    num_scheduled_tokens: Sequence[int], decode_threshold: int = 1
) -> Reordering:
    """Bring decodes (at most `decode_threshold` tokens) to the front with the fewest swaps.

    The first misplaced prefill changes places with the last misplaced decode, and so on inwards.

    >>> reorder_batch_to_split_decodes_and_prefills([5, 1, 1])
    Reordering(swaps=[(0, 2)], order=[2, 1, 0])
    """
    is_decode = [n <= decode_threshold for n in num_scheduled_tokens]
    num_decodes = sum(is_decode)
    prefills = [row for row in range(num_decodes) if not is_decode[row]]
    decodes = [row for row in range(num_decodes, len(is_decode)) if is_decode[row]]
    swaps = list(zip(prefills, reversed(decodes), strict=True))
    order = list(range(len(is_decode)))
    for first, second in swaps:
        order[first], order[second] = order[second], order[first]
    return Reordering(swaps, order)


class PersistentBatch:
    """Which request sits in which row of the batch that a model runner keeps between steps.

    >>> batch = PersistentBatch()
    >>> batch.update([], ["a", "b", "c"])
    []
    >>> batch.update(["a"], [])
    [(2, 0)]
    >>> batch.rows
    ['c', 'b']
    """

    def __init__(self) -> None:
        self.rows: list[str] = []

    def update(self, removed: Iterable[str], added: Iterable[str]) -> list[tuple[int, int]]:
        """Take requests out, put new ones into the lowest empty rows, then close the holes.

        The last row moves into the lowest hole until there is none. Returns the moves as
        (from, to). Raises ValueError if a removed request is not in the batch.
        """
        holes = sorted(self.rows.index(request_id) for request_id in removed)
        filled = 0
        for request_id in added:
            if filled < len(holes):
                self.rows[holes[filled]] = request_id
                filled += 1
            else:
                self.rows.append(request_id)
        return self._condense(holes[filled:])

    def _condense(self, holes: list[int]) -> list[tuple[int, int]]:
        """Fill the holes, lowest first, from the end; `holes` is sorted."""
        moves = []
        empty = set(holes)
        for hole in holes:
            while self.rows and len(self.rows) - 1 in empty:
                self.rows.pop()
            last = len(self.rows) - 1
            if hole >= last:
                break
            self.rows[hole] = self.rows.pop()
            empty.discard(hole)
            moves.append((last, hole))
        return moves
