"""CUDA graphs of steps: one a padded size, replayed for any lengths and any requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from simserve.executor.real.batch import EMPTY_BATCH, Batch
from simserve.executor.real.forward import Forward
from simserve.executor.real.graph_keys import GraphKeys
from simserve.executor.real.marks import LayerMarks
from simserve.executor.real.step_inputs import StepInputs, StepShape

__all__ = ["StepGraphs"]


class _Captured(NamedTuple):
    """The two halves of a step, so that time can be taken between them."""

    inputs: StepInputs
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    marks: LayerMarks | None


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

    All inputs come from a buffer at a fixed address. A request that pads a batch sits in the spare
    row: it has length 0, its token is written nowhere, and nothing is read for it.

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
        size = max(StepInputs(key).size for key in keys.beforehand())
        self._buffer = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[StepShape, _Captured] = {}

    def __contains__(self, key: StepShape) -> bool:
        return key in self._captured

    def warm_up(self) -> None:
        """Capture what is captured beforehand. Smaller graphs use the memory of larger ones."""
        for key in self.keys.beforehand():
            self.capture(key)

    def fill(self, batch: Batch, key: StepShape) -> None:
        """Send a batch's inputs to where its graph reads them."""
        self._send(batch, self._captured[key].inputs)

    def forward(self, key: StepShape) -> None:
        """Replay the forward pass."""
        self._captured[key].forward.replay()

    def sample(self, key: StepShape) -> LayerMarks | None:
        """Replay the choice of tokens; returns the marks that the forward pass takes."""
        captured = self._captured[key]
        captured.sample.replay()
        return captured.marks

    def capture(self, key: StepShape) -> None:
        """Capture a graph. What it reads meanwhile is padding alone."""
        step_inputs, rows = StepInputs(key), self._step.rows
        self._send(EMPTY_BATCH, step_inputs)
        marks = LayerMarks(self._device, in_graph=True) if self._breakdown else None
        current, stream = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # what a first call compiles and loads is not captured
            inputs, batch = step_inputs.read(self._buffer, rows)
            first = self._step.first_layer()
            first.sample(inputs, first.logits(inputs, batch, None))
        current.wait_stream(stream)

        forward, sample = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _no_garbage_collection():
            with torch.cuda.graph(forward, pool=self._pool):
                inputs, batch = step_inputs.read(self._buffer, rows)
                logits = self._step.logits(inputs, batch, marks)
            with torch.cuda.graph(sample, pool=self._pool):
                self._step.sample(inputs, logits)
        self._captured[key] = _Captured(step_inputs, forward, sample, marks)

    def _send(self, batch: Batch, inputs: StepInputs) -> None:
        piece = self._step.rows.staging.take(inputs.size)
        inputs.write(piece.numpy(), batch, self._step.rows)
        self._buffer[: inputs.size].copy_(piece, non_blocking=True)
