"""Draft tokens by looking up the sequence's own end earlier in it (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["NgramProposer", "ngram_propose"]


def ngram_propose(
    tokens: ArrayLike, min_n: int, max_n: int, max_model_len: int, k: int
) -> list[int]:
    """Up to `k` tokens that followed the longest suffix of min_n…max_n tokens seen before.

    Of several places the earliest counts. Drafts end with the sequence and at `max_model_len`.

    >>> ngram_propose([1, 2, 3, 9, 1, 2], min_n=2, max_n=3, max_model_len=100, k=3)
    [3, 9, 1]
    """
    ids = np.asarray(tokens, dtype=np.int64)
    total = len(ids)
    k = min(k, max_model_len - total)
    if total < min_n or k <= 0:
        return []
    length, end = _earliest_longest_match(ids, max_n)
    if length < min_n:
        return []
    drafts: list[int] = ids[end : end + k].tolist()
    return drafts


def _earliest_longest_match(ids: NDArray[np.int64], max_n: int) -> tuple[int, int]:
    """Length of the longest suffix (at most `max_n`) that also ends earlier, and where it ends.

    The places that match are narrowed down token by token, from the last one backwards.
    """
    ends = np.flatnonzero(ids[:-1] == ids[-1]) + 1
    length = 0
    while len(ends):
        length, found = length + 1, ends
        if length == max_n:
            break
        ends = ends[ends > length]
        ends = ends[ids[ends - 1 - length] == ids[-1 - length]]
    return (length, int(found[0])) if length else (0, 0)


class NgramProposer:
    """Drafts for a whole batch.

    With `quirks` "as_engine" it does what vLLM v0.11.0 does: results are kept by position in the
    list of eligible rows but read by batch row, so that a row may get another row's drafts, or
    ones left over from an earlier step. "fixed" gives every row its own.
    """

    def __init__(
        self,
        min_n: int,
        max_n: int,
        k: int,
        max_model_len: int,
        quirks: Literal["as_engine", "fixed"] = "as_engine",
    ) -> None:
        self.min_n, self.max_n, self.k = min_n, max_n, k
        self.max_model_len = max_model_len
        self.quirks = quirks
        self._kept: dict[int, list[int]] = {}

    def propose(self, rows: Sequence[ArrayLike | None]) -> list[list[int]]:
        """Drafts of each batch row; None stands for a row that is not eligible and gets none."""
        eligible = [row for row, tokens in enumerate(rows) if tokens is not None]
        found = [
            ngram_propose(tokens, self.min_n, self.max_n, self.max_model_len, self.k)
            for tokens in rows
            if tokens is not None
        ]
        if self.quirks == "fixed":
            self._kept = dict(zip(eligible, found, strict=True))
        else:
            self._kept.update(enumerate(found))
        return [
            list(self._kept.get(row, [])) if tokens is not None else []
            for row, tokens in enumerate(rows)
        ]
