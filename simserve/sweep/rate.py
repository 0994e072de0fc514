"""The highest request rate that keeps bounds on latency: doubling, then bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simserve.api import run
from simserve.config.loader import LoadedConfig, load_config
from simserve.config.overrides import Overrides
from simserve.errors import ConfigError, did_you_mean

__all__ = ["Bound", "RateSearch", "Trial", "bisect", "parse_bound", "search_rate"]

_MAX_DOUBLINGS = 10
_AT_LEAST = ("slo_attainment",)
"""Keys of a summary of which more is better, that may be bounded from below."""


class Bound(NamedTuple):
    """A bound on a number of the summary: the most, or for shares the least, that it may be."""

    key: str
    limit: float

    @property
    def is_least(self) -> bool:
        """Whether the number has to reach the limit."""
        return self.key.startswith(_AT_LEAST)

    def is_met(self, value: Any) -> bool:
        """Whether a number keeps it; one that was not measured does not."""
        if not isinstance(value, int | float):
            return False
        return value >= self.limit if self.is_least else value <= self.limit

    def __str__(self) -> str:
        return f"{self.key} {'>=' if self.is_least else '<='} {self.limit:g}"


class Trial(NamedTuple):
    """One rate that was tried."""

    value: float
    """Of the key that was searched: `arrival.rate`, or a trace's `speedup`."""
    rate: float
    """Requests per second."""
    is_met: bool
    num_met: int
    """Repetitions that keep all bounds by themselves."""
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RateSearch:
    """What a search has found."""

    rate: float | None
    """The highest rate that kept the bounds (requests per second); None: not even the lowest."""
    above: float | None
    """The lowest rate above it that did not; None: none was found."""
    trials: Sequence[Trial]
    """In the order in which they were made."""

    @property
    def is_monotone(self) -> bool:
        """Whether every rate below `rate` kept the bounds too, and none above it did."""
        met = [trial.rate for trial in self.trials if trial.is_met]
        failed = [trial.rate for trial in self.trials if not trial.is_met]
        return not met or not failed or max(met) < min(failed)


def parse_bound(text: str) -> Bound:
    """`p99_ttft_ms=500`: latencies are at most so many milliseconds, attainments at least a share.

    Raises:
        ConfigError: it is no such bound.

    >>> str(parse_bound("p99_ttft_ms=500")), str(parse_bound("slo_attainment=0.99"))
    ('p99_ttft_ms <= 500', 'slo_attainment >= 0.99')
    """
    key, equals, number = (part.strip() for part in text.partition("="))
    if not key.endswith("_ms") and not key.startswith(_AT_LEAST):
        raise ConfigError(
            f"--slo {text}: bound a latency, such as p99_ttft_ms=500, or a share of requests, "
            "such as slo_attainment=0.99 (with metrics.goodput)"
        )
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not equals or not (limit > 0 and math.isfinite(limit)):
        raise ConfigError(f"--slo {text}: needs a positive number after the equals sign")
    bound = Bound(key, limit)
    if bound.is_least and limit > 1:
        raise ConfigError(f"--slo {text}: a share of requests is from 0 to 1, such as {key}=0.99")
    return bound


def bisect(
    is_met: Callable[[float], bool], start: float, tolerance: float
) -> tuple[float | None, float | None]:
    """The highest value that meets a condition which holds below some value and fails above it.

    From `start` the value is doubled or halved until the condition changes; then the interval is
    bisected (geometrically) until its ends are no more than `tolerance` apart, relative to the
    lower one.

    Returns:
        The highest value found that meets it, and the lowest above it that does not; None where
        there was none within a factor of 1024 of `start`.
    """
    low, high = (start, None) if is_met(start) else (None, start)
    for _ in range(_MAX_DOUBLINGS):
        if low is not None and high is not None:
            break
        value = 2 * low if low is not None else (high or start) / 2
        low, high = (value, high) if is_met(value) else (low, value)
    if low is None or high is None:
        return low, high
    while high > low * (1 + tolerance):
        value = math.sqrt(low * high)
        low, high = (value, high) if is_met(value) else (low, value)
    return low, high


def search_rate(
    config: str | LoadedConfig,
    bounds: Sequence[Bound],
    overrides: Overrides = (),
    *,
    tolerance: float = 0.02,
    tried: Callable[[Trial], object] | None = None,
) -> RateSearch:
    """Find the highest request rate at which a configuration keeps bounds.

    A synthetic workload is searched by `arrival.rate`, a trace by `speedup`. All rates have the
    same seeds: the same requests, closer together. With `metrics.repetitions` the means over the
    repetitions have to keep the bounds. A rate at which a request fails does not keep them.

    Args:
        config: a YAML file's path, or a configuration already loaded.
        bounds: on numbers of the summary.
        overrides: `KEY=VALUE` strings or values by dotted path.
        tolerance: how close to get, relative to the rate.
        tried: is told of each rate.

    Raises:
        ConfigError: the workload has no rate, a bound names nothing in the summary, or is one on a
            share of requests without `metrics.goodput`.
    """
    loaded = config if isinstance(config, LoadedConfig) else load_config(config, overrides)
    shares = [bound.key for bound in bounds if bound.is_least]
    if shares and loaded.config.metrics.goodput is None:
        raise ConfigError(
            f"--slo {shares[0]}: nothing says which requests attain it: set metrics.goodput, for "
            "example -o metrics.goodput.ttft=500"
        )
    key, start = _knob(loaded)
    trials: list[Trial] = []

    def is_met(value: float) -> bool:
        result = run(_with(loaded, key, value))
        if result.summary_dict["status"] != "completed":
            raise KeyboardInterrupt  # a run ends early by Ctrl-C only, and that in good order
        trials.append(_judge(value, key, result.summary_dict, result.repetitions, bounds))
        if tried is not None:
            tried(trials[-1])
        return trials[-1].is_met

    low, high = bisect(is_met, start, tolerance)
    rates = {trial.value: trial.rate for trial in trials}
    return RateSearch(
        None if low is None else rates[low], None if high is None else rates[high], trials
    )


def _knob(loaded: LoadedConfig) -> tuple[str, float]:
    """The key that sets the rate, and its value."""
    workload = loaded.config.workload
    if workload.trace is not None:
        return "workload.trace.speedup", workload.trace.speedup
    assert workload.synthetic is not None  # one of the two, says the model
    rate = getattr(workload.synthetic.arrival, "rate", None)
    if rate is None:
        raise ConfigError(
            f"{loaded.source or 'the configuration'}: workload.synthetic.arrival: kind "
            f"{workload.synthetic.arrival.kind} has no rate to search; take poisson, gamma or "
            "constant"
        )
    return "workload.synthetic.arrival.rate", float(rate)


def _with(loaded: LoadedConfig, key: str, value: float) -> LoadedConfig:
    plain = loaded.config.model_dump(mode="json", exclude_unset=True)
    return load_config(plain, {key: value, "metrics.plot": False}, base_dir=loaded.base_dir)


def _judge(
    value: float,
    key: str,
    summary: Mapping[str, Any],
    repetitions: Sequence[Mapping[str, Any]],
    bounds: Sequence[Bound],
) -> Trial:
    for bound in bounds:
        if bound.key not in summary:
            raise ConfigError(
                f"--slo {bound.key}: the summary has no such number"
                f"{did_you_mean(bound.key, summary)}"
            )
    rate = summary["offered_request_rate"] if key.startswith("workload.trace") else value
    if rate is None:
        raise ConfigError("all requests of the trace arrive at once: it has no rate to search")
    return Trial(
        value=value,
        rate=rate,
        is_met=_is_met(summary, bounds),
        num_met=sum(_is_met(one, bounds) for one in repetitions or [summary]),
        summary=summary,
    )


def _is_met(summary: Mapping[str, Any], bounds: Sequence[Bound]) -> bool:
    return summary["failed"] == 0 and all(bound.is_met(summary[bound.key]) for bound in bounds)
