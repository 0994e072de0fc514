"""Arrival processes. Times are absolute seconds, the first request comes at 0.

Every process hands out its times in chunks of arrays, so that a million arrivals are neither a
million calls nor one large array. A rate of infinity means that all requests come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ArrivalProcess",
    "BurstArrivals",
    "ConstantArrivals",
    "GammaArrivals",
    "PoissonArrivals",
    "RampArrivals",
]

_CHUNK = 1 << 16
Times = Iterator[NDArray[np.float64]]


class ArrivalProcess(Protocol):
    """Anything that says when requests come."""

    def times(self, rng: np.random.Generator, num_requests: int) -> Times:
        """`num_requests` arrival times (s) that never go backwards, in consecutive chunks."""
        ...


def _chunks(num_requests: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_requests, _CHUNK):
        yield start, min(start + _CHUNK, num_requests)


def _from_gaps(draw: Callable[[int, int], NDArray[np.float64]], num_requests: int) -> Times:
    """Running sums of the gaps before requests [start, stop); that before the first counts 0."""
    last_s = 0.0
    for start, stop in _chunks(num_requests):
        gaps_s = draw(start, stop)
        if start == 0:
            gaps_s[0] = 0.0
        gaps_s[0] += last_s
        times_s = np.cumsum(gaps_s)
        last_s = float(times_s[-1])
        yield times_s


def _check_rate(name: str, rate: float) -> None:
    if not rate > 0:
        raise ValueError(f"{name} must be greater than 0 (requests per second), got {rate}")


def _check_burstiness(burstiness: float) -> None:
    if not 0 < burstiness < np.inf:
        raise ValueError(f"burstiness must be positive and finite, got {burstiness}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantArrivals:
    """One request every 1 / rate seconds, computed as i / rate: nothing accumulates."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)

    def times(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Arrival times (s); takes nothing from `rng`."""
        for start, stop in _chunks(num_requests):
            yield np.arange(start, stop, dtype=np.float64) / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonArrivals:
    """Independent exponential gaps of mean 1 / rate."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)

    def times(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Arrival times (s). They are not rescaled to last num_requests / rate exactly."""
        return _from_gaps(lambda a, b: rng.exponential(1 / self.rate, b - a), num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Independent gamma gaps of mean 1 / rate and shape `burstiness`.

    1 is Poisson, below it arrivals clump, above it they become regular: the coefficient of
    variation of the gaps is 1 / sqrt(burstiness).
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)
        _check_burstiness(self.burstiness)

    def times(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Arrival times (s)."""
        scale_s = 1 / (self.rate * self.burstiness)
        return _from_gaps(lambda a, b: rng.gamma(self.burstiness, scale_s, b - a), num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstArrivals:
    """`size` requests at once, again every `gap_s` seconds."""

    size: int
    gap_s: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if not 0 <= self.gap_s < np.inf:
            raise ValueError(f"gap_s must be at least 0 and finite, got {self.gap_s}")

    def times(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Arrival times (s); takes nothing from `rng`."""
        for start, stop in _chunks(num_requests):
            yield (np.arange(start, stop) // self.size).astype(np.float64) * self.gap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RampArrivals:
    """Gamma gaps whose rate moves from `start_rps` to `end_rps` over the requests.

    As in `vllm bench serve --ramp-up-strategy`, progress is counted in requests, not in time:
    the gap before the last request has mean 1 / end_rps. `exponential` multiplies the rate by
    the same factor from each request to the next.
    """

    start_rps: float
    end_rps: float
    strategy: Literal["linear", "exponential"] = "linear"
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name, rate in (("start_rps", self.start_rps), ("end_rps", self.end_rps)):
            _check_rate(name, rate)
            if rate == np.inf:
                raise ValueError(f"{name} must be finite")
        if self.strategy not in ("linear", "exponential"):
            raise ValueError(f"strategy must be linear or exponential, got '{self.strategy}'")
        _check_burstiness(self.burstiness)

    def rates(self, start: int, stop: int, num_requests: int) -> NDArray[np.float64]:
        """Rate before each of the requests [start, stop) (requests/s), shape [stop - start]."""
        progress = np.arange(start, stop, dtype=np.float64) / max(num_requests - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return np.asarray(self.start_rps * (self.end_rps / self.start_rps) ** progress)

    def times(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Arrival times (s)."""

        def gaps_s(start: int, stop: int) -> NDArray[np.float64]:
            scales_s = 1 / (self.rates(start, stop, num_requests) * self.burstiness)
            return rng.gamma(self.burstiness, scales_s)

        return _from_gaps(gaps_s, num_requests)
