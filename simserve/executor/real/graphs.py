"""CUDA graphs of steps: one a padded size, replayed for any lengths and any requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from simserve.executor.real.batch import Batch
from simserve.executor.real.forward import Forward
from simserve.executor.real.graph_inputs import GraphInputs
from simserve.executor.real.graph_keys import GraphKey, GraphKeys
from simserve.executor.real.marks import LayerMarks

__all__ = ["StepGraphs"]


class _Captured(NamedTuple):
    """The two halves of a step, so that time can be taken between them."""

    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    marks: LayerMarks | None


class _Buffers(NamedTuple):
    """The inputs of a step on the host, and where they are sent to."""

    host: GraphInputs
    device: GraphInputs

    def send(self) -> None:
        self.device.memory.copy_(self.host.memory, non_blocking=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Graphs of an earlier machine that are freed during a capture would break it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepGraphs:
    """Captures and replays steps.

    All inputs come from a buffer at a fixed address; decodes have a small one of their own. A
    request that pads a batch sits in the spare row: it has length 0, its token is written nowhere,
    and nothing is read for it.

    Args:
        step: what is captured.
        keys: for which sizes.
        breakdown: take times inside the forward pass.
    """

    def __init__(self, step: Forward, keys: GraphKeys, breakdown: bool) -> None:
        self.keys = keys
        self._step = step
        self._breakdown = breakdown
        self._device = step.rows.ids.device
        self._of_decodes = self._buffers(keys.most_tokens)
        self._of_others = self._buffers(keys.most_mixed_tokens)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[GraphKey, _Captured] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def warm_up(self) -> None:
        """Capture what is captured beforehand. Smaller graphs use the memory of larger ones."""
        for key in self.keys.beforehand():
            self.capture(key)

    def fill(self, batch: Batch, key: GraphKey) -> None:
        """Send a batch's inputs to where its graph reads them."""
        buffers = self._buffers_of(key)
        buffers.host.fill(batch, self._step.rows)
        buffers.send()

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
        rows, buffers = self._step.rows, self._buffers_of(key)
        buffers.host.pad(0, 0, 0, rows)
        buffers.send()
        marks = LayerMarks(self._device, in_graph=True) if self._breakdown else None
        current, stream = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # what a first call compiles and loads is not captured
            inputs, batch = buffers.device.derive(rows, key)
            self._step.sample(inputs, self._step.logits(inputs, batch, None))
        current.wait_stream(stream)

        forward, sample = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _no_garbage_collection():
            with torch.cuda.graph(forward, pool=self._pool):
                inputs, batch = buffers.device.derive(rows, key)
                logits = self._step.logits(inputs, batch, marks)
            with torch.cuda.graph(sample, pool=self._pool):
                self._step.sample(inputs, logits)
        self._captured[key] = _Captured(forward, sample, marks)

    def _buffers(self, most: int) -> _Buffers:
        memory = torch.zeros(GraphInputs.size(most), dtype=torch.int64)
        return _Buffers(GraphInputs(memory.pin_memory()), GraphInputs(memory.to(self._device)))

    def _buffers_of(self, key: GraphKey) -> _Buffers:
        return self._of_decodes if key.query_len else self._of_others
