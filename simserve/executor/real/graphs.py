"""CUDA graphs of decode batches: one a padded size, replayed for any lengths and any requests."""

from __future__ import annotations

from typing import NamedTuple

import torch

from simserve.executor.real.batch import Batch
from simserve.executor.real.forward import Forward
from simserve.executor.real.graph_inputs import GraphInputs
from simserve.executor.real.graph_keys import GraphKey, GraphKeys
from simserve.executor.real.marks import LayerMarks

__all__ = ["DecodeGraphs"]


class _Captured(NamedTuple):
    """The two halves of a step, so that time can be taken between them."""

    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    marks: LayerMarks | None


class DecodeGraphs:
    """Captures and replays steps in which every request has the same number of new tokens.

    All inputs come from one buffer at a fixed address. A request that pads a batch sits in the
    spare row: it has length 0, its token is written nowhere, and nothing is read for it.

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
        memory = torch.zeros(GraphInputs.size(keys.most_tokens), dtype=torch.int64)
        self._inputs = GraphInputs(memory.pin_memory())
        self._on_device = GraphInputs(memory.to(self._device))
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[GraphKey, _Captured] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def warm_up(self) -> None:
        """Capture what is captured beforehand. Smaller graphs use the memory of larger ones."""
        for key in self.keys.beforehand():
            self.capture(key)

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
