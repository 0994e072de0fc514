"""Near saturation a few percent of step time decide how long the queue grows: TTFT is no number.

Whether a workload is there is asked of the simulation itself: how strongly does its median TTFT
follow the step times?
"""

from __future__ import annotations

from math import log as ln

from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.logs.measured import measured_run
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.replay.log_run import simulate_log
from simserve.protocols import CostModel, LoopCost, Price
from simserve.types import StepPlan, StepRun, TraceRequest

__all__ = ["NEAR_SATURATION", "ScaledCost", "ttft_elasticity"]

NEAR_SATURATION = 4.0
"""TTFT changes by so many percent when step times change by one: 1 without queues."""
_CHANGE = 0.03


class ScaledCost:
    """Another cost model's times, all multiplied by a factor."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost = cost
        self._loop = cost if isinstance(cost, LoopCost) else None
        self._factor = factor

    def price(self, run: StepRun) -> Price:
        """Durations and parts, scaled."""
        durations_s, parts = self._cost.price(run)
        factor = self._factor
        scaled_s = [duration_s * factor for duration_s in durations_s]
        return Price(scaled_s, {name: part * factor for name, part in parts.items()})

    def after_step_s(self, plan: StepPlan) -> float:
        """Time of the loop after a step, scaled (s)."""
        return 0.0 if self._loop is None else self._factor * self._loop.after_step_s(plan)

    def take_in_s(self, request: TraceRequest, first: bool) -> float:
        """Time to take in a request, scaled (s)."""
        return 0.0 if self._loop is None else self._factor * self._loop.take_in_s(request, first)


def ttft_elasticity(log: StepLog, cost: CostModel) -> float:
    """d ln(median TTFT) / d ln(step time) of a log's workload, by a central difference."""
    low, high = (
        measured_run(simulate_log(log, SimulatedExecutor(ScaledCost(cost, factor)))).get(
            "ttft", "p50"
        )
        for factor in (1.0 - _CHANGE, 1.0 + _CHANGE)
    )
    if not low or not high:
        return 1.0
    return ln(high / low) / ln((1.0 + _CHANGE) / (1.0 - _CHANGE))
