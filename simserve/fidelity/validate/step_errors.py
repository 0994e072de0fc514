"""Prices the steps that an engine logged, and compares step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.cost.regimes import REGIMES, regime_of_counts
from simserve.fidelity.logs.log_plans import log_plans
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.protocols import CostModel
from simserve.types import StepRun, seconds_at

__all__ = ["SLOWER_HOST", "PricedSteps", "StepError", "errors_by_regime", "price_log"]

_ENGINE_PARTS = ("schedule_s", "update_s")
SLOWER_HOST = 1.1
"""So much slower is the host that tells what bounds a step."""


class StepError(NamedTuple):
    """How far predicted step times are from measured ones, over some steps."""

    num_steps: int
    mape: float
    """Mean of |predicted − measured| / measured."""
    bias: float
    """Sum of predicted over sum of measured times, minus 1."""

    @classmethod
    def of(cls, predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> StepError:
        """Compare two columns of at least one step."""
        relative = np.abs(predicted / measured - 1.0)
        return cls(
            len(measured), float(relative.mean()), float(predicted.sum() / measured.sum()) - 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSteps:
    """A log's steps under a cost model; shape [steps]."""

    measured_s: NDArray[np.float64]
    predicted_s: NDArray[np.float64]
    engine_s: NDArray[np.float64]
    """The share of `predicted_s` that is schedule() and update(); 0 if it has no such parts."""
    host_bound: NDArray[np.bool_]
    """Whether a step follows the host's speed more than the GPU's: half or more of what the host
    loses is lost to the step. A GPU that waits for launches makes a step follow the host alone."""
    regimes: tuple[str, ...]


def price_log(log: StepLog, cost: CostModel, slower: CostModel | None = None) -> PricedSteps:
    """Predict every step of a log from the plan that the engine ran.

    `slower` is the cost model on a host slower by `SLOWER_HOST`; without it no step is host-bound.
    """
    num_steps = len(log.steps)
    columns = np.zeros((3, num_steps))
    regimes = []
    for step, plan in enumerate(log_plans(log)):
        durations_s, parts = cost.price(StepRun(plan))
        slower_s = durations_s if slower is None else slower.price(StepRun(plan)).durations_s
        engine_s = sum(seconds_at(parts[name], 0) for name in _ENGINE_PARTS if name in parts)
        columns[:, step] = durations_s[0], engine_s, slower_s[0]
        counts = plan.num_tokens
        regimes.append(regime_of_counts(sum(counts), len(counts), counts.count(1)))
    predicted_s, engine_s_each, slower_s_each = columns
    return PricedSteps(
        measured_s=log.steps.duration_s,
        predicted_s=predicted_s,
        engine_s=engine_s_each,
        host_bound=slower_s_each > (1.0 + 0.5 * (SLOWER_HOST - 1.0)) * predicted_s,
        regimes=tuple(regimes),
    )


def errors_by_regime(priced: Sequence[PricedSteps]) -> dict[str, StepError]:
    """Errors over all steps of some logs, by what bounds them, and by regime."""
    measured = np.concatenate([steps.measured_s for steps in priced])
    predicted = np.concatenate([steps.predicted_s for steps in priced])
    host = np.concatenate([steps.host_bound for steps in priced])
    regimes = np.array([regime for steps in priced for regime in steps.regimes])
    ran = predicted > 0.0  # a step without tokens runs no model
    masks = {"all": ran, "GPU-bound": ran & ~host, "host-bound": ran & host}
    masks |= {name: ran & (regimes == name) for name in REGIMES}
    return {
        name: StepError.of(predicted[mask], measured[mask])
        for name, mask in masks.items()
        if mask.any()
    }
