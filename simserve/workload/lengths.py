"""Distributions of prompt lengths, output lengths and numbers of turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simserve.workload.rows import MAX_TOKENS

__all__ = [
    "ConstantLength",
    "EmpiricalLength",
    "IndependentLengths",
    "Length",
    "LognormalLength",
    "UniformLength",
    "ZipfLength",
]

_MOST_RANKED = 1 << 24
"""Lengths of a power law, each of which takes some bytes of memory while numbers are drawn."""


class Length(Protocol):
    """Anything that draws whole numbers >= 1."""

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths, shape [count]."""
        ...


def _check_range(low: int, high: int | None) -> None:
    _check_length("min", low)
    if high is not None and high < low:
        raise ValueError(f"max must be at least min ({low}), got {high}")
    if high is not None:
        _check_length("max", high)


def _check_length(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    if value > MAX_TOKENS:
        raise ValueError(f"{name} must be at most {MAX_TOKENS}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLength:
    """Always `value`."""

    value: int

    def __post_init__(self) -> None:
        _check_length("value", self.value)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` times the value; takes nothing from `rng`."""
        return np.full(count, self.value, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformLength:
    """Every whole number from `min` to `max`, both included, is equally likely."""

    min: int
    max: int

    def __post_init__(self) -> None:
        _check_range(self.min, self.max)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths, shape [count]."""
        return rng.integers(self.min, self.max, count, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLength:
    """Lognormal with the given mean, rounded to the nearest whole number, then clipped.

    `mean` is the mean of the distribution itself before rounding and clipping, `sigma` the
    standard deviation of the logarithm: mu = ln(mean) - sigma² / 2. Values outside [min, max]
    become min or max, so that clipping shifts the mean of what is drawn.
    """

    mean: float
    sigma: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.mean < np.inf:
            raise ValueError(f"mean must be positive and finite, got {self.mean}")
        if not 0 <= self.sigma < np.inf:
            raise ValueError(f"sigma must be at least 0 and finite, got {self.sigma}")
        _check_range(self.min, self.max)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths, shape [count]."""
        mu = np.log(self.mean) - self.sigma**2 / 2
        raw = np.rint(rng.lognormal(mu, self.sigma, count))
        # Without a maximum, what is too large for an integer must still stay one.
        high = float(self.max) if self.max is not None else float(2**62)
        return np.clip(raw, self.min, high).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfLength:
    """A power law between two bounds: P(k) is proportional to k ** -alpha for min <= k <= max."""

    alpha: float
    min: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < np.inf:
            raise ValueError(f"alpha must be at least 0 and finite, got {self.alpha}")
        _check_range(self.min, self.max)
        if self.max - self.min >= _MOST_RANKED:
            raise ValueError(f"max must be less than min + {_MOST_RANKED}, got {self.max}")

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths, shape [count]."""
        # Relative to min: no weight underflows at the short end, where the mass is.
        support = np.arange(self.min, self.max + 1, dtype=np.float64) / self.min
        cumulative = np.cumsum(support**-self.alpha)
        points = rng.random(count) * cumulative[-1]
        ranks: NDArray[np.intp] = np.searchsorted(cumulative, points, side="right")
        return ranks.astype(np.int64) + self.min


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalLength:
    """Drawn with replacement from observed values."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1:
            raise ValueError("values must be a non-empty list of lengths of at least 1")

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths, shape [count]."""
        observed = np.asarray(self.values, dtype=np.int64)
        return observed[rng.integers(0, len(observed), count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentLengths:
    """Prompt and output lengths that know nothing of each other."""

    prompt_len: Length
    output_len: Length

    def draw(
        self, prompt_rng: np.random.Generator, output_rng: np.random.Generator, count: int
    ) -> NDArray[np.int64]:
        """`count` pairs, shape [count, 2]; each length is drawn from its own generator."""
        prompts = self.prompt_len.draw(prompt_rng, count)
        return np.stack([prompts, self.output_len.draw(output_rng, count)], axis=1)
