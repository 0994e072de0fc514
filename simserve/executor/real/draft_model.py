"""A draft model beside the model: the same rows and block tables, and a KV cache of its own.

**What holds after every step:** for each token whose keys and values the model has in the slots of
a request, the draft model has its own in the same slots of its own cache.

It holds because the draft model computes, step by step, what the model has computed, with the
tokens that have turned out right. So whatever the block tables say of the model's cache is true of
the draft model's too: blocks that a prefix hit shares, that a fork shares, and that a request
computes again after a preemption. Nothing needs to be remembered from step to step.

Beyond those, a request's last token is known and computed by nobody yet, in position p. The pass
over a step's tokens takes it along, and chooses the first draft. Each pass of one token after it
computes a draft and chooses the next, so that k drafts write the slots p to p + k − 1. The last
draft is not computed: it is when the model has accepted it, with the next step's tokens. Rejected
drafts stay in their slots until the tokens that come instead are computed there, and nothing reads
them before.

A step of n tokens from position s leaves p ≤ s + n, so that the scheduler's k slots ahead of a
running request are all that is written. A request that has just been admitted has no slots ahead,
and gets as many drafts as its last block has room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.executor.real.batch import Batch, build_batch
from simserve.executor.real.decoder_shape import DecoderShape
from simserve.executor.real.forward import Forward
from simserve.executor.real.runner import ModelRunner, StepTimes

__all__ = ["DraftModel", "DraftRequest", "DraftSource"]


class DraftSource(NamedTuple):
    """Which draft model is loaded."""

    shape: DecoderShape
    weights: str | Path = "random"
    """`random`, or a local folder."""


class DraftRequest(NamedTuple):
    """A request of a step that has run."""

    row: int
    """Its place on the device."""
    start: int
    """Position of the step's first token."""
    num_computed: int
    """Right tokens that the model has computed in the step; one more is known if it gets drafts."""
    num_drafts: int
    """Drafts that are wanted."""


class DraftModel:
    """Keeps up with the steps of the model, and proposes the likeliest tokens.

    Args:
        step: its forward pass, with outputs.
        runner: launches it.
    """

    def __init__(self, step: Forward, runner: ModelRunner) -> None:
        assert step.outputs is not None
        self.decoder = step.decoder
        self.caches = step.attention.caches
        """K and V of each layer."""
        self._outputs = step.outputs
        self._runner = runner

    def run(self, requests: Sequence[DraftRequest]) -> tuple[list[list[int]], StepTimes]:
        """Compute a step's tokens; the drafts of each request, and what all passes took.

        Drafts also lie in the requests' rows, behind their tokens.

        Raises:
            CapacityError: it takes more memory than the GPU has left.
        """
        columns = np.array(requests, dtype=np.int64)
        times = self._runner.run_in_turn(_passes(columns))
        num_drafts = columns[:, 3]
        drafts: list[list[int]] = [[] for _ in requests]
        chosen = iter(self._outputs.arrived().tokens.tolist())
        for place in range(num_drafts.max()):
            for i in np.flatnonzero(num_drafts > place).tolist():
                drafts[i].append(next(chosen))
        return drafts, times


def _passes(columns: NDArray[np.int64]) -> Iterator[Batch]:
    """The pass over the tokens of a step, and those that each choose a draft of a place more.

    Args:
        columns: the fields of `DraftRequest`, one row a request.
    """
    row, start, num_computed, num_drafts = columns.T
    gets_drafts = np.minimum(num_drafts, 1)
    yield build_batch(row, start, num_computed + gets_drafts, gets_drafts)
    for place in range(1, num_drafts.max()):
        going = num_drafts > place
        ones = np.ones(going.sum(), dtype=np.int64)
        yield build_batch(row[going], (start + num_computed + place)[going], ones, ones)
