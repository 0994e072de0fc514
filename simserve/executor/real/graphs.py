"""CUDA graphs of decode batches: one a padded size, replayed for any lengths and any requests."""

from __future__ import annotations

import bisect
from itertools import product
from typing import NamedTuple

import torch

from simserve.executor.real.batch import Batch
from simserve.executor.real.forward import Forward
from simserve.executor.real.graph_inputs import GraphInputs
from simserve.executor.real.marks import LayerMarks

__all__ = ["DecodeGraphs", "GraphKey", "graph_sizes"]

MAX_GRAPH_ROWS = 512
WARM_BOUNDS = (512, 1024, 2048, 4096, 8192)
"""Longest contexts that graphs are captured for beforehand, where these depend on them."""


class GraphKey(NamedTuple):
    """What a graph is captured for."""

    num_rows: int
    query_len: int
    max_seq_len: int


class _Captured(NamedTuple):
    """The two halves of a step, so that time can be taken between them."""

    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    marks: LayerMarks | None


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests that graphs are captured for: 1, 2, 4, then every 8, from 256 every 16.

    >>> graph_sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    top = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, MAX_GRAPH_ROWS + 1, 16), top}
    return sorted(size for size in sizes if size <= top)


class DecodeGraphs:
    """Captures and replays steps in which every request has the same number of new tokens.

    All inputs come from one buffer at a fixed address. A request that pads a batch sits in the
    spare row: it has length 0, its token is written nowhere, and nothing is read for it.

    The decode kernel `auto` takes any length. Others size their scratch by the longest context and
    choose by it: they have a graph for each power of two of it, beyond 8192 tokens captured when
    it is first met.

    Args:
        step: what is captured.
        sizes: numbers of requests, ascending.
        breakdown: take times inside the forward pass.
    """

    def __init__(self, step: Forward, sizes: list[int], breakdown: bool) -> None:
        rows = step.rows
        self.sizes = sizes
        self._step = step
        self._breakdown = breakdown
        self._device = rows.ids.device
        self._max_seq_len: int = rows.tables.shape[1] * rows.block_size
        most_tokens = sizes[-1] * step.attention.path.decode_threshold
        memory = torch.zeros(GraphInputs.size(most_tokens), dtype=torch.int64)
        self._inputs = GraphInputs(memory.pin_memory())
        self._on_device = GraphInputs(memory.to(self._device))
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[GraphKey, _Captured] = {}

    def key(self, batch: Batch) -> GraphKey | None:
        """The graph that serves a batch; None if none does."""
        num_rows, query_len = len(batch.slots), batch.uniform_query_len
        most = self._step.attention.path.decode_threshold
        if not 1 <= query_len <= most or num_rows > self.sizes[-1]:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        return GraphKey(size, query_len, self._bound(query_len, int(batch.seq_lens.max())))

    def _bound(self, query_len: int, max_seq_len: int) -> int:
        """The longest context that a graph is captured for."""
        if query_len > 1 or not self._step.attention.path.sizes_by_length:
            return self._max_seq_len
        power = 1 << (max(max_seq_len, WARM_BOUNDS[0]) - 1).bit_length()
        return min(power, self._max_seq_len)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def warm_up(self, query_len: int) -> None:
        """Capture all sizes for decodes, and for `query_len` tokens if those are more.

        The largest come first: smaller ones use their memory.
        """
        for tokens in sorted({1, query_len}):
            bounds = {self._bound(tokens, longest) for longest in WARM_BOUNDS}
            for size, bound in product(reversed(self.sizes), sorted(bounds, reverse=True)):
                self.capture(GraphKey(size, tokens, bound))

    def fill(self, batch: Batch) -> None:
        """Send a batch's inputs to where the graphs read them."""
        self._inputs.fill(batch, self._step.rows)
        self._on_device.memory.copy_(self._inputs.memory, non_blocking=True)

    def forward(self, key: GraphKey) -> None:
        """Replay the forward pass."""
        self._captured[key].forward.replay()

    def sample(self, key: GraphKey) -> LayerMarks | None:
        """Replay the choice of tokens; returns the marks that the forward pass takes."""
        captured = self._captured[key]
        captured.sample.replay()
        return captured.marks

    def capture(self, key: GraphKey) -> None:
        """Capture a graph. What it reads meanwhile is padding alone."""
        rows = self._step.rows
        self._inputs.pad(0, 0, rows)
        self._on_device.memory.copy_(self._inputs.memory)
        marks = LayerMarks(self._device, in_graph=True) if self._breakdown else None
        current, stream = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # what a first call compiles and loads is not captured
            inputs, batch = self._on_device.derive(rows, *key)
            self._step.sample(inputs, self._step.logits(inputs, batch, None))
        current.wait_stream(stream)

        forward, sample = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool):
            inputs, batch = self._on_device.derive(rows, *key)
            logits = self._step.logits(inputs, batch, marks)
        with torch.cuda.graph(sample, pool=self._pool):
            self._step.sample(inputs, logits)
        self._captured[key] = _Captured(forward, sample, marks)
