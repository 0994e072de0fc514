"""Which CUDA graph serves a batch, and which graphs are captured before a run."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from simserve.executor.real.attention import AttentionPath
from simserve.executor.real.batch import Batch

__all__ = ["GraphKey", "GraphKeys", "graph_sizes", "mixed_graph_sizes"]

MAX_GRAPH_ROWS = 512
MAX_MIXED_TOKENS = 1024
"""From so many tokens on the kernels of a step take longer than their launches one by one."""
SHORT_CONTEXT = 4096
"""Up to here prefills are computed in other tiles."""
WARM_BOUNDS = (512, 1024, 2048, 4096, 8192)
"""Longest contexts that graphs are captured for beforehand, where these depend on them."""


class GraphKey(NamedTuple):
    """What a graph is captured for: at most so many requests, tokens, and tokens of a context."""

    num_rows: int
    num_tokens: int
    query_len: int
    """New tokens of every request; 0: of any number."""
    max_seq_len: int


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests that graphs are captured for: 1, 2, 4, then every 8, from 256 every 16.

    >>> graph_sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    top = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, MAX_GRAPH_ROWS + 1, 16), top}
    return sorted(size for size in sizes if size <= top)


def mixed_graph_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens that graphs of steps with prefills are captured for.

    >>> mixed_graph_sizes(200)
    [16, 32, 64, 128, 192, 200]
    """
    top = min(max_num_batched_tokens, MAX_MIXED_TOKENS)
    sizes = {16, 32, *range(64, MAX_MIXED_TOKENS + 1, 64), top}
    return sorted(size for size in sizes if size <= top)


class GraphKeys:
    """Rounds batches up to what graphs are captured for.

    Batches in which all requests have equally many tokens, one or one and their drafts, have graphs
    by the number of requests. Others, up to some size, have graphs by the number of tokens, for the
    largest number of requests: what is not there costs them nothing but a look.

    The decode kernel `auto` takes any length. Others size their scratch by the longest context and
    choose by it: they have a graph for each power of two of it, beyond 8192 tokens captured when
    it is first met.

    Args:
        max_num_seqs: requests that run at the same time, at most.
        max_num_batched_tokens: tokens of a step, at most.
        longest: tokens that a block table holds.
        path: which kernels attend. Where it takes decodes and prefills apart, a mixed batch has no
            graph: how many decodes it has is not the same from step to step.
    """

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, longest: int, path: AttentionPath
    ) -> None:
        self.sizes = graph_sizes(max_num_seqs)
        self.mixed_sizes = [] if path.reorders else mixed_graph_sizes(max_num_batched_tokens)
        self._longest = longest
        self._path = path

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest graph of decodes."""
        return self.sizes[-1] * self._path.decode_threshold

    @property
    def most_mixed_tokens(self) -> int:
        """Tokens, or requests, of the largest graph of other batches."""
        return max([self.sizes[-1], *self.mixed_sizes])

    def of(self, batch: Batch) -> GraphKey | None:
        """The graph that serves a batch; None if none does."""
        num_rows, query_len = len(batch.slots), batch.uniform_query_len
        if num_rows > self.sizes[-1]:
            return None
        longest = int(batch.seq_lens.max())
        if not 1 <= query_len <= self._path.decode_threshold:
            return self._mixed(int(batch.query_start_loc[-1]), len(batch.logit_rows), longest)
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        return GraphKey(size, size * query_len, query_len, self._bound(query_len, longest))

    def beforehand(self) -> Iterator[GraphKey]:
        """All sizes for decodes, for decodes with all drafts, and for others; the largest first."""
        for tokens in sorted({1, self._path.decode_threshold}):
            bounds = {self._bound(tokens, length) for length in WARM_BOUNDS}
            for size, bound in product(reversed(self.sizes), sorted(bounds, reverse=True)):
                yield GraphKey(size, size * tokens, tokens, bound)
        lengths = sorted({min(SHORT_CONTEXT, self._longest), self._longest}, reverse=True)
        for size, length in product(reversed(self.mixed_sizes), lengths):
            yield GraphKey(self.sizes[-1], size, 0, length)

    def _mixed(self, num_tokens: int, num_logits: int, longest: int) -> GraphKey | None:
        """The graph for requests with any numbers of tokens."""
        at = bisect.bisect_left(self.mixed_sizes, num_tokens)
        if at == len(self.mixed_sizes) or num_logits > self.sizes[-1]:
            return None
        short = min(SHORT_CONTEXT, self._longest)
        length = short if longest <= short else self._longest
        return GraphKey(self.sizes[-1], self.mixed_sizes[at], 0, length)

    def _bound(self, query_len: int, max_seq_len: int) -> int:
        """The longest context that a graph is captured for."""
        if query_len > 1 or not self._path.sizes_by_length:
            return self._longest
        return min(self._path.length_bound(max_seq_len), self._longest)
