"""Requests that met their service-level objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.latency import Latencies

__all__ = ["SLO_METRICS", "Attainment"]

SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclass(slots=True, kw_only=True)
class Attainment:
    """Which requests met which objective, shape [requests] each."""

    by_metric: dict[str, NDArray[np.bool_]]

    @classmethod
    def of(cls, latencies: Latencies, goodput: Mapping[str, float]) -> Attainment:
        """Objectives in ms by metric. Met: observed <= objective; one token has TPOT 0 (vLLM)."""
        met = {}
        for metric, objective_ms in goodput.items():
            observed = getattr(latencies, metric) * 1000.0
            if metric == "tpot":
                observed = np.where(np.isnan(observed), 0.0, observed)
            met[metric] = observed <= objective_ms
        return cls(by_metric=met)

    @property
    def all_met(self) -> NDArray[np.bool_]:
        """Requests that met every objective."""
        return reduce(lambda one, other: one & other, self.by_metric.values())
