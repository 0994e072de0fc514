"""What a trace looks like: rate, burstiness, lengths, and what a prefix cache could serve."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.types import TraceRequest
from simserve.workload.prefix_tree import PrefixTree

__all__ = ["LengthStats", "TraceColumns", "TraceStats", "read_columns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Mean, percentiles (linear) and maximum of lengths, in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> LengthStats:
        """Of a non-empty array of lengths."""
        p50, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
        return cls(mean=float(lengths.mean()), p50=p50, p90=p90, p99=p99, max=int(lengths.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """The figures of `simserve trace inspect`. None: not defined for so few requests.

    Those of arrivals are of the requests that wait for no other: only theirs are known beforehand.
    """

    num_requests: int
    span_s: float
    """From the first arrival to the last."""
    rate_rps: float | None
    """Gaps between arrivals over the span."""
    gap_cv: float | None
    """Standard deviation of the gaps over their mean: 1 for Poisson arrivals."""
    iod: float | None
    """Variance over mean of the number of arrivals per second: 1 for Poisson arrivals."""
    num_ties: int
    """Requests that share their arrival with the one before."""
    prompt_len: LengthStats
    output_len: LengthStats
    block_size: int
    prefix_hit_share: float
    """Share of prompt tokens that a prefix cache without limit, in trace order, could serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceColumns:
    """The numbers of a trace, one entry a request, in arrival order."""

    arrival_s: NDArray[np.float64]
    waits: NDArray[np.bool_]
    """Whether it waits for the end of another one."""
    prompt_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    hit_len: NDArray[np.int64]
    """Prompt tokens found in a cache without limit."""
    block_size: int

    def stats(self) -> TraceStats:
        """The figures. Raises ValueError if there are no requests."""
        if not len(self.arrival_s):
            raise ValueError("no requests")
        arrival_s = self.arrival_s[~self.waits]
        gaps_s = np.diff(arrival_s)
        span_s = float(gaps_s.sum())
        return TraceStats(
            num_requests=len(self.arrival_s),
            span_s=span_s,
            rate_rps=len(gaps_s) / span_s if span_s else None,
            gap_cv=float(gaps_s.std() / gaps_s.mean()) if span_s else None,
            iod=_index_of_dispersion(arrival_s),
            num_ties=int((gaps_s == 0).sum()),
            prompt_len=LengthStats.of(self.prompt_len),
            output_len=LengthStats.of(self.output_len),
            block_size=self.block_size,
            prefix_hit_share=float(self.hit_len.sum() / self.prompt_len.sum()),
        )


def _index_of_dispersion(arrival_s: NDArray[np.float64]) -> float | None:
    """Variance over mean of arrivals per whole second, the last and incomplete one left out."""
    seconds = (arrival_s - arrival_s[0]).astype(np.int64)
    num_seconds = int(seconds[-1])
    if num_seconds < 2:
        return None
    # Over the distinct seconds only: a trace of years has few arrivals for its length.
    counts = np.unique(seconds[seconds < num_seconds], return_counts=True)[1].astype(np.float64)
    mean = counts.sum() / num_seconds
    return float((np.square(counts).sum() / num_seconds - mean**2) / mean)


def read_columns(requests: Iterable[TraceRequest], block_size: int = 16) -> TraceColumns:
    """Read requests once, keeping their numbers only."""
    tree = PrefixTree(block_size)
    rows = [
        (r.arrival_s, r.parent is not None, r.prompt_len, r.output_len, tree.hit_len(r))
        for r in requests
    ]
    arrival_s, waits, *lengths = zip(*rows, strict=True) if rows else ((),) * 5
    prompt_len, output_len, hit_len = (np.asarray(column, dtype=np.int64) for column in lengths)
    return TraceColumns(
        arrival_s=np.asarray(arrival_s, dtype=np.float64),
        waits=np.asarray(waits, dtype=np.bool_),
        prompt_len=prompt_len,
        output_len=output_len,
        hit_len=hit_len,
        block_size=block_size,
    )
