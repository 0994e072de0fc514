"""What a summary says about its run, and what it is asked to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simserve.errors import ConfigError, did_you_mean
from simserve.metrics.goodput import SLO_METRICS
from simserve.metrics.latency import METRICS

__all__ = ["MetricOptions", "RunInfo", "Scalar"]

Scalar = str | int | float | bool | None

BASE_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
"""Always reported: those of `vllm bench serve` (50, 90, 99) and p95."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts that only those who set a run up know. None is written as null."""

    backend: str = "simserve-sim"
    date: str | None = None
    """Simulated runs have none: equal runs write equal bytes."""
    label: str | None = None
    model_id: str | None = None
    tokenizer_id: str | None = None
    request_rate: float | str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    """Further keys, such as swept parameters; they stand at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOptions:
    """What to report. Raises ConfigError for unknown metrics and percentiles outside 0 … 100."""

    percentiles: tuple[float, ...] = ()
    """Beside `BASE_PERCENTILES`."""
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el", "queue_time")
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Objectives in ms by metric."""
    window_s: tuple[float, float | None] | None = None
    """Steady state: start and end on the engine's clock; an end of None is the run's."""
    save_detailed: bool = False

    def __post_init__(self) -> None:
        for metric in self.percentile_metrics:
            _check_name(metric, METRICS, "percentile metric")
        for metric in self.goodput:
            _check_name(metric, SLO_METRICS, "goodput metric")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"percentile {percentile:g} is not between 0 and 100")

    @property
    def all_percentiles(self) -> list[float]:
        """The base percentiles and those asked for, ascending."""
        return sorted({*BASE_PERCENTILES, *map(float, self.percentiles)})


def _check_name(name: str, known: tuple[str, ...], what: str) -> None:
    if name not in known:
        raise ConfigError(
            f"unknown {what} '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}"
        )
