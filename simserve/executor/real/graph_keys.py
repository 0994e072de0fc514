"""Which CUDA graph serves a batch of decodes, and which graphs are captured before a run."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from simserve.executor.real.attention import AttentionPath
from simserve.executor.real.batch import Batch

__all__ = ["GraphKey", "GraphKeys", "graph_sizes"]

MAX_GRAPH_ROWS = 512
WARM_BOUNDS = (512, 1024, 2048, 4096, 8192)
"""Longest contexts that graphs are captured for beforehand, where these depend on them."""


class GraphKey(NamedTuple):
    """What a graph is captured for."""

    num_rows: int
    query_len: int
    max_seq_len: int


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests that graphs are captured for: 1, 2, 4, then every 8, from 256 every 16.

    >>> graph_sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    top = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, MAX_GRAPH_ROWS + 1, 16), top}
    return sorted(size for size in sizes if size <= top)


class GraphKeys:
    """Rounds batches up to what graphs are captured for.

    The decode kernel `auto` takes any length. Others size their scratch by the longest context and
    choose by it: they have a graph for each power of two of it, beyond 8192 tokens captured when
    it is first met.

    Args:
        max_num_seqs: requests that run at the same time, at most.
        longest: tokens that a block table holds.
        path: which kernels attend.
    """

    def __init__(self, max_num_seqs: int, longest: int, path: AttentionPath) -> None:
        self.sizes = graph_sizes(max_num_seqs)
        self._longest = longest
        self._path = path

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest graph."""
        return self.sizes[-1] * self._path.decode_threshold

    def of(self, batch: Batch) -> GraphKey | None:
        """The graph that serves a batch; None if none does."""
        num_rows, query_len = len(batch.slots), batch.uniform_query_len
        if not 1 <= query_len <= self._path.decode_threshold or num_rows > self.sizes[-1]:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        return GraphKey(size, query_len, self._bound(query_len, int(batch.seq_lens.max())))

    def beforehand(self) -> Iterator[GraphKey]:
        """All sizes for decodes, and for decodes with all drafts; the largest first."""
        for tokens in sorted({1, self._path.decode_threshold}):
            bounds = {self._bound(tokens, length) for length in WARM_BOUNDS}
            for size, bound in product(reversed(self.sizes), sorted(bounds, reverse=True)):
                yield GraphKey(size, tokens, bound)

    def _bound(self, query_len: int, max_seq_len: int) -> int:
        """The longest context that a graph is captured for."""
        if query_len > 1 or not self._path.sizes_by_length:
            return self._longest
        return min(self._path.length_bound(max_seq_len), self._longest)
