"""What is left of a profile's errors where the speed of a log's host is known better than by one
factor: the factor that fits the log's steps best, and the host's speed around each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.config.presets import load_gpu, load_model
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import ProfileFile
from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.fit.host import engine_seconds
from simserve.fidelity.fit.host_speed import host_scale, local_host_scale
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.logs.loaded_log import LoadedLog, load_log
from simserve.fidelity.logs.measured import Measured, measured_log, measured_run
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.replay.log_run import simulate_log
from simserve.fidelity.validate.step_errors import StepError
from simserve.protocols import Price
from simserve.types import StepPlan, StepResult, StepRun, TraceRequest

Floats = NDArray[np.float64]

FACTORS = np.linspace(0.5, 1.7, 121)
"""Among which the best is looked for."""


def host_errors(profile: ProfileFile, log: StepLog, metrics: Sequence[str]) -> dict[str, Any]:
    """Errors of steps under three kinds of knowledge, and of latencies under the last."""
    prices, loaded = Prices.of(profile), load_log(log)
    predicted_s = engine_seconds(profile.coefficients, loaded.steps)
    told = host_scale(loaded.steps, predicted_s)
    local = local_host_scale(loaded.steps, predicted_s)
    best = min(FACTORS.tolist(), key=lambda factor: _error(prices, loaded, factor).mape)
    steps = {"told": told, "best": best, "followed": local}
    real, followed = measured_log(log), _simulated(profile, log, local)
    return {
        "log": log.name,
        "factors": {"told": round(told, 3), "best": round(best, 2)},
        "steps": {way: _error(prices, loaded, scale)._asdict() for way, scale in steps.items()},
        "errors": {
            name: round(_value(followed, name) / _value(real, name) - 1, 4) for name in metrics
        },
    }


def _error(prices: Prices, log: LoadedLog, scale: float | Floats) -> StepError:
    return StepError.of(prices.predict(log, scale), log.steps.duration_s)


def _value(run: Measured, name: str) -> float:
    metric, _, statistic = name.partition("_")
    value = run.get(metric, statistic) if statistic else run.output_throughput
    assert value is not None
    return value


def _simulated(profile: ProfileFile, log: StepLog, local: Floats) -> Measured:
    cost = ProfileCost(load_model(profile.model), load_gpu(profile.gpu), name=profile.name)
    return followed_run(HostCost(cost), log, local)


def followed_run(cost: HostCost, log: StepLog, local: Floats) -> Measured:
    """The workload on a host that has, at each time, the speed that it had in the log."""
    starts_s = log.steps.start_s[np.diff(log.steps.row_offsets) > 0]
    return measured_run(simulate_log(log, FollowedHost(cost, starts_s, local)))


class HostCost:
    """A profile's prices on a host of the speed that is set."""

    def __init__(self, cost: ProfileCost) -> None:
        self._cost = cost
        self.scale = 1.0

    def price(self, run: StepRun) -> Price:
        """Durations and parts."""
        return self._cost.price_on(run, self.scale)

    def after_step_s(self, plan: StepPlan) -> float:
        """Time of the loop after a step (s)."""
        return self.scale * self._cost.after_step_s(plan)

    def take_in_s(self, request: TraceRequest, first: bool) -> float:
        """Time to take in a request (s)."""
        return self.scale * self._cost.take_in_s(request, first)


class FollowedHost(SimulatedExecutor):
    """Prices each step on a host as fast as a log's was at that time."""

    def __init__(self, cost: HostCost, starts_s: Floats, scales: Floats) -> None:
        super().__init__(cost)
        self.single_steps = True
        self._cost, self._starts_s, self._scales = cost, starts_s, scales

    def taken_in_s(self, request: TraceRequest, now_s: float) -> float:
        """When a request is taken in (s)."""
        self._set(now_s)
        return super().taken_in_s(request, now_s)

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Price one step."""
        self._set(start_s)
        return super().submit(run, start_s)

    def _set(self, now_s: float) -> None:
        at = int(np.searchsorted(self._starts_s, now_s, side="right")) - 1
        self._cost.scale = float(self._scales[max(at, 0)])
