"""How busy the engine was: time-weighted means and peaks in buckets of one second."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.latency import View
from simserve.metrics.recorder import RunData, StepRows

__all__ = ["concurrency", "kv_cache_usage", "peak_concurrency", "peak_tokens", "step_mean"]

Floats = NDArray[np.float64]


def kv_cache_usage(data: RunData | StepRows) -> Floats:
    """Share of the usable blocks (all but the null block) in use, shape [steps]."""
    return 1.0 - data.steps.num_free_blocks / max(data.num_gpu_blocks - 1, 1)


def step_mean(
    data: RunData, values: NDArray[np.float64] | NDArray[np.int64], start_s: float, end_s: float
) -> float | None:
    """Time-weighted mean of a per-step value over [start_s, end_s]; idle time counts as 0."""
    if end_s <= start_s:
        return None
    overlap = _overlap(data.steps.start_s, data.steps.end_s, start_s, end_s)
    return float((values * overlap).sum()) / (end_s - start_s)  # as in `quantiles`, without `@`


def concurrency(data: RunData, start_s: float, end_s: float) -> float | None:
    """Mean number of requests that have arrived and not ended; rejected ones never count."""
    if end_s <= start_s:
        return None
    requests = data.requests
    ended = np.where(np.isnan(requests.ended_s), data.end_s, requests.ended_s)
    present = ~np.isnan(requests.queued_s)
    overlap = _overlap(requests.arrival_s[present], ended[present], start_s, end_s)
    return float(overlap.sum()) / (end_s - start_s)


def _overlap(starts: Floats, ends: Floats, start_s: float, end_s: float) -> Floats:
    return np.clip(ends, start_s, end_s) - np.clip(starts, start_s, end_s)


def peak_tokens(data: RunData, view: View) -> float | None:
    """Most tokens that came out within one second, the seconds counted from the first arrival."""
    tokens = data.times.tokens_per_step(view.requests)
    used = np.flatnonzero(tokens)
    if not len(used):
        return None
    # Steps are in order of time, so equal seconds stand together.
    seconds = np.floor(data.times.ends_s[used] - data.start_s)
    heads = np.flatnonzero(np.diff(seconds, prepend=seconds[0] - 1))
    return float(np.add.reduceat(tokens[used], heads).max())


def peak_concurrency(data: RunData, view: View) -> int | None:
    """Most requests that were in the system at some time within one second, as vLLM counts."""
    arrivals = data.requests.arrival_s[view.requests] - data.start_s
    ends = data.times.last_token_s[view.requests] - data.start_s
    if not len(arrivals):
        return None
    seconds = np.concatenate((np.floor(arrivals), np.floor(ends) + 1))
    changes = np.concatenate((np.ones(len(arrivals)), -np.ones(len(ends))))
    order = np.lexsort((changes, seconds))
    return int(np.cumsum(changes[order]).max())
