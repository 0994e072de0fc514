"""Statistics of weighted samples, equal to numpy's on the sample written out in full.

Products are added up by `sum`, not by `@`: the last bits of that depend on how many threads it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sample", "mean", "percentiles", "std"]


class Sample(NamedTuple):
    """Values and how often each occurs, shapes [n] and [n]; weights are integers >= 0."""

    values: NDArray[np.float64]
    weights: NDArray[np.int64]

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Sample:
        """Every value once."""
        return cls(values, np.ones(len(values), dtype=np.int64))

    @property
    def size(self) -> int:
        """Number of values of the sample written out in full."""
        return int(self.weights.sum())

    def scaled(self, factor: float) -> Sample:
        """The same sample in another unit."""
        return Sample(self.values * factor, self.weights)


def mean(sample: Sample) -> float | None:
    """Arithmetic mean; None for an empty sample."""
    size = sample.size
    return float((sample.values * sample.weights).sum()) / size if size else None


def std(sample: Sample) -> float | None:
    """Population standard deviation (numpy's default, as vLLM reports); None if empty."""
    center = mean(sample)
    if center is None:
        return None
    squares = (sample.values - center) ** 2 * sample.weights
    return float(np.sqrt(squares.sum() / sample.size))


def percentiles(sample: Sample, asked: Iterable[float]) -> list[float | None]:
    """Percentiles by linear interpolation, bit-equal to `numpy.percentile` of the full sample.

    The rank r of value i in the sorted full sample runs over [cum[i-1], cum[i]), so a search in
    the cumulated weights finds the order statistics without writing the sample out.
    """
    quantiles = np.asarray(list(asked), dtype=np.float64) / 100.0
    size = sample.size
    if size == 0:
        return [None] * len(quantiles)
    order = np.argsort(sample.values, kind="stable")
    values, cumulated = sample.values[order], np.cumsum(sample.weights[order])
    virtual = (size - 1) * quantiles
    below = np.floor(virtual)
    low = values[np.searchsorted(cumulated, below, side="right")]
    high = values[np.searchsorted(cumulated, np.minimum(below + 1, size - 1), side="right")]
    # Both forms of the interpolation, as numpy has them: exact at either end.
    share, gap = virtual - below, high - low
    return [float(x) for x in np.where(share < 0.5, low + gap * share, high - gap * (1 - share))]
