"""Which settings each request has: an entry of the configuration, and what it says itself."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simserve.sampling import RequestSampling
from simserve.types import TraceRequest

__all__ = ["SamplingChoice", "SamplingChoices"]


class SamplingChoice(NamedTuple):
    """Settings of some of the requests."""

    weight: float
    """Their share, relative to the other choices' weights."""
    sampling: RequestSampling


class SamplingChoices:
    """Gives each request one of some settings.

    Choice and seed of a request follow from its id and the run's seed: they are the same after a
    preemption and under every schedule. Siblings have one choice, and seeds of their own: of a seed
    that is given, the next ones, as in vLLM.

    Args:
        choices: what requests take one of, by weight; of none the likeliest tokens are taken.
        seed: of the run.
    """

    def __init__(self, choices: Sequence[SamplingChoice], seed: int) -> None:
        self._choices = choices or [SamplingChoice(1.0, RequestSampling(temperature=0.0))]
        self._seed = seed
        shares = np.array([choice.weight for choice in self._choices], dtype=np.float64)
        self._bounds = np.cumsum(shares / shares.sum())

    def of(self, request: TraceRequest) -> RequestSampling:
        """The settings of a request, its seed written out. What it says itself comes first."""
        share, seed = self._drawn(request.request_id)
        if request.group is not None:
            share, _ = self._drawn(request.group)
        number = int(np.searchsorted(self._bounds[:-1], share, side="right"))
        chosen = self._choices[number].sampling
        own = dict(request.sampling or {})
        if request.logprobs is not None:
            own["logprobs"] = request.logprobs
        chosen = replace(chosen, **own) if own else chosen
        if chosen.seed is None:
            return replace(chosen, seed=seed)
        return replace(chosen, seed=min(chosen.seed + request.sibling, 2**63 - 1))

    def _drawn(self, name: str) -> tuple[float, int]:
        """Where a name stands among all shares, and its seed."""
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        return generator.random(), int(generator.integers(2**63))
