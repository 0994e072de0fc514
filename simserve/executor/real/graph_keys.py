"""Which CUDA graph serves a batch, and which graphs are captured before a run."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from itertools import product

from simserve.executor.real.attention import AttentionPath
from simserve.executor.real.batch import Batch
from simserve.executor.real.step_inputs import StepShape

__all__ = ["GraphKeys", "graph_sizes", "mixed_graph_sizes"]

MAX_GRAPH_ROWS = 512
MAX_MIXED_TOKENS = 2048
"""Beyond so many tokens the kernels of a step take longer than their launches one by one, on a slow
host too: 8B's took 20 to 45 ms, and steps of 1,025 to 1,536 tokens take an H200 27 to 34 ms."""
SHORT_CONTEXT = 4096
"""Up to here prefills are computed in other tiles."""
MAX_SPLIT_TOKENS = 32
"""Up to so many tokens of decodes with drafts, each splits its keys among programs of its own. On
an H200, 8 requests of 4 tokens and 8 K/V heads take as long either way; fewer are faster split."""
WARM_BOUNDS = (512, 1024, 2048, 4096, 8192)
"""Longest contexts that graphs are captured for beforehand, where these depend on them."""


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
    """Rounds batches up to the shapes that graphs are captured for.

    Batches of decodes have graphs by the number of requests; those in which some verify drafts, by
    the number of tokens, whichever request they belong to. Others have them up to some number of
    tokens. Where tokens are counted, a graph is for as many requests as there may be: what is not
    there costs nothing but a look. A few decodes with drafts take the graph of as many decodes as
    they have tokens: a program a request would leave most of a GPU idle, and what each token reads
    again is found in its L2 cache.

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

    def of(self, batch: Batch) -> StepShape | None:
        """What the graph that serves a batch is captured for; None if none does."""
        query_len, num_tokens = batch.num_wanted_each, int(batch.query_start_loc[-1])
        if len(batch.slots) > self.sizes[-1]:
            return None
        longest = int(batch.seq_lens.max())
        if not 1 <= query_len <= self._path.decode_threshold:
            return self._mixed(num_tokens, len(batch.logit_rows), longest)
        most = 1 if query_len == 1 else self._path.decode_threshold
        size = self.sizes[bisect.bisect_left(self.sizes, -(-num_tokens // most))]
        return self._of_decodes(size, most, self._bound(most, longest))

    def beforehand(self) -> Iterable[StepShape]:
        """All sizes for decodes, for decodes with drafts, and for others; the largest first."""
        return dict.fromkeys(self._beforehand())

    def _beforehand(self) -> Iterator[StepShape]:
        for most in sorted({1, self._path.decode_threshold}):
            bounds = {self._bound(most, length) for length in WARM_BOUNDS}
            for size, bound in product(reversed(self.sizes), sorted(bounds, reverse=True)):
                yield self._of_decodes(size, most, bound)
        lengths = sorted({min(SHORT_CONTEXT, self._longest), self._longest}, reverse=True)
        for size, length in product(reversed(self.mixed_sizes), lengths):
            yield self._of_others(size, length)

    def _of_decodes(self, size: int, most: int, length: int) -> StepShape:
        """For requests of at most `most` tokens, `size` times as many in all."""
        num_tokens = size * most
        if most == 1 or (num_tokens <= MAX_SPLIT_TOKENS and not self._path.sizes_by_length):
            return StepShape(num_tokens, num_tokens, None, num_tokens, 1, length)
        num_rows = min(num_tokens, self.sizes[-1])
        return StepShape(num_rows, num_tokens, None, 0, most, length)

    def _of_others(self, num_tokens: int, length: int) -> StepShape:
        num_rows = min(num_tokens, self.sizes[-1])
        num_logits = min(num_tokens, num_rows * self._path.decode_threshold)
        return StepShape(num_rows, num_tokens, num_logits, 0, num_tokens, length)

    def _mixed(self, num_tokens: int, num_logits: int, longest: int) -> StepShape | None:
        """For requests with any numbers of tokens."""
        at = bisect.bisect_left(self.mixed_sizes, num_tokens)
        most_logits = self.sizes[-1] * self._path.decode_threshold
        if at == len(self.mixed_sizes) or num_logits > most_logits:
            return None
        short = min(SHORT_CONTEXT, self._longest)
        return self._of_others(self.mixed_sizes[at], short if longest <= short else self._longest)

    def _bound(self, query_len: int, max_seq_len: int) -> int:
        """The longest context that a graph is captured for."""
        if query_len > 1 or not self._path.sizes_by_length:
            return self._longest
        return min(self._path.length_bound(max_seq_len), self._longest)
