"""What runs are compared on: samples of latencies, rates and counts, of a log or a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.fidelity.logs.vllm_log import StepLog
from simserve.metrics import quantiles
from simserve.metrics.latency import Latencies, sample, whole_run
from simserve.metrics.quantiles import Sample
from simserve.metrics.recorder import RunData

__all__ = ["METRICS", "STATISTICS", "Measured", "measured_log", "measured_run"]

METRICS = ("ttft", "itl", "tpot", "e2el")
STATISTICS = ("mean", "p50", "p95", "p99")
_PERCENTILES = (50.0, 95.0, 99.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run, reduced."""

    latency_s: Mapping[str, Mapping[str, float | None]]
    """By metric and statistic; None without a value."""
    output_throughput: float | None
    """Output tokens a second, from the first arrival to the last token."""
    num_steps: int
    num_preemptions: int
    prefix_hit_tokens: int
    """Found in the prefix cache when requests were first admitted."""

    def get(self, metric: str, statistic: str) -> float | None:
        """One latency (s)."""
        return self.latency_s[metric][statistic]


def measured_log(log: StepLog, clock: Callable[[Floats], Floats] | None = None) -> Measured:
    """What the real engine's clients saw; `clock` gives its times (s) on another clock."""
    arrivals_s = np.array([request.arrival_s for request in log.requests])
    token_times_s = list(log.token_times_s)
    if clock is not None:
        arrivals_s, token_times_s = clock(arrivals_s), [clock(times) for times in token_times_s]
    return Measured(
        latency_s=_of_lists(arrivals_s, token_times_s),
        output_throughput=_throughput(arrivals_s, token_times_s),
        num_steps=len(log.steps),
        num_preemptions=sum(map(len, log.steps.preempted.values())),
        prefix_hit_tokens=_hit_tokens(log),
    )


def measured_run(data: RunData) -> Measured:
    """The same of a simulation."""
    latencies, view = Latencies.of(data), whole_run(data)
    last_s = float(np.nanmax(data.times.last_token_s, initial=data.start_s))
    num_tokens = int(data.times.num_tokens.sum())
    return Measured(
        latency_s={m: _statistics(sample(data, latencies, m, view)) for m in METRICS},
        output_throughput=num_tokens / (last_s - data.start_s) if num_tokens else None,
        num_steps=data.steps.num_steps,
        num_preemptions=int(data.steps.num_preempted.sum()),
        prefix_hit_tokens=int(np.maximum(data.requests.cached_tokens, 0).sum()),
    )


def _of_lists(
    arrivals_s: Floats, token_times_s: Sequence[Floats]
) -> dict[str, dict[str, float | None]]:
    pairs = [(a, t) for a, t in zip(arrivals_s, token_times_s, strict=True) if len(t)]
    several = [t for _, t in pairs if len(t) > 1]
    gaps = [np.diff(t) for t in several]
    values = {
        "ttft": np.array([t[0] - a for a, t in pairs]),
        "itl": np.concatenate(gaps) if gaps else np.zeros(0),
        "tpot": np.array([(t[-1] - t[0]) / (len(t) - 1) for t in several]),
        "e2el": np.array([t[-1] - a for a, t in pairs]),
    }
    return {metric: _statistics(Sample.of(values[metric])) for metric in METRICS}


def _statistics(values: Sample) -> dict[str, float | None]:
    found = [quantiles.mean(values), *quantiles.percentiles(values, _PERCENTILES)]
    return dict(zip(STATISTICS, found, strict=True))


def _throughput(arrivals_s: Floats, token_times_s: Sequence[Floats]) -> float | None:
    some = [times for times in token_times_s if len(times)]
    if not some:
        return None
    last_s = max(float(times[-1]) for times in some)
    return sum(map(len, some)) / (last_s - float(arrivals_s.min()))


def _hit_tokens(log: StepLog) -> int:
    """Tokens computed before the first step of each request."""
    _, first_rows = np.unique(log.steps.request, return_index=True)
    return int(log.steps.num_computed[first_rows].sum())
