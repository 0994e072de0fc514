"""Simulates logged workloads on a cost model and judges how far the simulation is from the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.fit import host_speed
from simserve.fidelity.logs.measured import (
    METRICS,
    STATISTICS,
    Measured,
    measured_log,
    measured_run,
)
from simserve.fidelity.logs.observations import observe
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.replay.log_run import check_replay, simulate_log
from simserve.fidelity.replay.plans import PlanCheck
from simserve.fidelity.validate.attribution import priced_plans
from simserve.fidelity.validate.divergence import Divergence, explain
from simserve.fidelity.validate.judged_logs import check_can_be_judged
from simserve.fidelity.validate.saturation import NEAR_SATURATION, ttft_elasticity
from simserve.fidelity.validate.step_errors import (
    SLOWER_HOST,
    PricedSteps,
    StepError,
    errors_by_regime,
    price_log,
)
from simserve.fidelity.validate.tolerances import BLIND, HOST_KNOWN
from simserve.fidelity.validate.validation import Cell, StepVerdict, Validation
from simserve.metrics.recorder import RunData
from simserve.protocols import CostModel

__all__ = ["Timing", "validate_workload"]

_ATTRIBUTED = tuple(f"{metric}_{p}" for metric in METRICS for p in ("p50", "p95", "p99"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where step times come from."""

    name: str
    cost: Callable[[float], CostModel]
    """A cost model whose host is slower by this factor."""
    scattered: Callable[[float], CostModel] | None = None
    """The same with the scatter of measured step times, if that is known."""
    repeat_spread: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Half range over mean of repeats on the real engine: `below` saturation and `near_saturation`,
    by names such as `ttft_p50`."""
    fitted_on: tuple[str, ...] = ()
    """Logs that it was fitted on."""
    remarks: tuple[str, ...] = ()
    """What is to be said of it beside a log."""


def validate_workload(
    logs: Sequence[StepLog],
    timing: Timing,
    *,
    host_scale: float | None = 1.0,
    tolerances: Mapping[str, float] | None = None,
) -> Validation:
    """Simulate the workload of one log, or of several repeats, and compare.

    Args:
        logs: repeats of one workload.
        timing: the cost model.
        host_scale: factor on host times; None takes it from the log's schedule() and update()
            times, and judges by the limits for a known host.
        tolerances: relative limits by name instead of the default ones; exact, without the spread.

    Raises:
        TraceError: the log's engine is not known, or `check_can_be_judged` refuses a log.
        SimserveError: as the cost model has it.
    """
    first, knows_host = logs[0], host_scale is None
    for log in logs:
        check_can_be_judged(log, by_host=knows_host)
    scale = _host_scale(logs, timing) if host_scale is None else host_scale
    cost, slower = timing.cost(scale), timing.cost(scale * SLOWER_HOST)
    priced = [price_log(log, cost, slower) for log in logs]
    near = (elasticity := ttft_elasticity(first, cost)) >= NEAR_SATURATION
    simulated_cost = timing.cost(scale)
    simulated, divergence = _simulate(first, simulated_cost)
    real = [measured_log(log) for log in logs]
    replays = [check_replay(log) for log in logs]
    judge = _Judge(
        real,
        simulated,
        scattered=_scattered(first, timing, scale),
        limits=HOST_KNOWN if knows_host else BLIND,
        given=tolerances or {},
        spread=timing.repeat_spread.get("near_saturation" if near else "below", {}),
        spread_counts=not knows_host,
        near_saturation=near,
    )
    steps = errors_by_regime(priced)
    return Validation(
        logs=tuple(log.name for log in logs),
        engine=first.engine,
        profile=getattr(cost, "timing", timing.name),
        host_scale=scale,
        ttft_elasticity=elasticity,
        near_saturation=near,
        fitted_on=tuple(log.name for log in logs if log.name in timing.fitted_on),
        remarks=(*timing.remarks, *getattr(simulated_cost, "remarks", ())),
        cells=judge.cells(),
        counts=_counts(real, simulated),
        steps=steps,
        step_verdicts=judge.steps(steps),
        divergence=divergence,
        replayed=tuple(difference for _, difference in replays),
        attribution=_attribution(first, priced[0], real[0], replays[0][0], simulated),
    )


def _host_scale(logs: Sequence[StepLog], timing: Timing) -> float:
    """From the logs' schedule() and update() times; 1 if no such parts are priced."""
    cost = timing.cost(1.0)
    scales = [host_speed.host_scale(observe(log), price_log(log, cost).engine_s) for log in logs]
    return sum(scales) / len(scales)


def _simulate(log: StepLog, cost: CostModel) -> tuple[Measured, Divergence | None]:
    plans = PlanCheck(log)
    data = simulate_log(log, SimulatedExecutor(cost), plans)
    difference = plans.finish()
    return measured_run(data), explain(log, data, difference) if difference else None


def _scattered(log: StepLog, timing: Timing, scale: float) -> Measured | None:
    if timing.scattered is None:
        return None
    return measured_run(simulate_log(log, SimulatedExecutor(timing.scattered(scale))))


def _counts(real: Sequence[Measured], simulated: Measured) -> dict[str, tuple[float, float]]:
    names = ("num_steps", "num_preemptions", "prefix_hit_tokens")
    return {
        name: (sum(getattr(one, name) for one in real) / len(real), getattr(simulated, name))
        for name in names
    }


def _attribution(
    log: StepLog,
    priced: PricedSteps,
    real: Measured,
    replayed: RunData | None,
    simulated: Measured,
) -> dict[str, dict[str, float | None]]:
    runs = {
        "scheduling": None if replayed is None else measured_run(replayed),
        "pricing": priced_plans(log, priced),
        "both": simulated,
    }
    return {
        name: {run: _relative(_value(one, name), _value(real, name)) for run, one in runs.items()}
        for name in _ATTRIBUTED
    }


def _value(run: Measured | None, name: str) -> float | None:
    if run is None:
        return None
    if name == "throughput":
        return run.output_throughput
    metric, _, statistic = name.partition("_")
    return run.get(metric, statistic)


def _relative(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference - 1.0


@dataclass(frozen=True, slots=True)
class _Judge:
    """Puts limits to numbers."""

    real: Sequence[Measured]
    simulated: Measured
    scattered: Measured | None
    limits: Mapping[str, float]
    given: Mapping[str, float]
    spread: Mapping[str, float]
    spread_counts: bool
    near_saturation: bool

    def cells(self) -> tuple[Cell, ...]:
        """Latencies by metric and statistic, then throughput."""
        names = [f"{metric}_{statistic}" for metric in METRICS for statistic in STATISTICS]
        return tuple(self._cell(name) for name in [*names, "throughput"])

    def _cell(self, name: str) -> Cell:
        values = [value for one in self.real if (value := _value(one, name)) is not None]
        mean = sum(values) / len(values) if values else None
        spread = self.spread.get(name, 0.0)
        if len(values) > 1 and mean:
            spread = 0.5 * (max(values) - min(values)) / mean
        return Cell(
            name=name,
            real=mean,
            real_range=(min(values), max(values)) if values else None,
            simulated=_value(self.simulated, name),
            scattered=None if self.scattered is None else _value(self.scattered, name),
            spread=spread,
            limit=self._limit(name, spread),
            in_range=self._is_judged_by_range(name, len(values)),
        )

    def _limit(self, name: str, spread: float) -> float | None:
        if name in self.given:
            return self.given[name]
        limit = self.limits.get(name)
        has_no_value = self.near_saturation and not name.startswith(("itl", "throughput"))
        if limit is None or has_no_value:
            return None
        return max(limit, spread) if self.spread_counts and name != "throughput" else limit

    def _is_judged_by_range(self, name: str, num_repeats: int) -> bool:
        is_ttft = name.startswith("ttft") and name in self.limits and name not in self.given
        return is_ttft and self.near_saturation and num_repeats > 1

    def steps(self, errors: Mapping[str, StepError]) -> tuple[StepVerdict, ...]:
        """Limits on step errors, as far as there are any."""
        limits = {**self.limits, **self.given}
        found = {
            "step_mape_gpu": errors.get("GPU-bound"),
            "step_mape_host": errors.get("host-bound"),
            "step_bias": errors["all"],
        }
        return tuple(
            StepVerdict(
                name,
                error.bias if name == "step_bias" else error.mape,
                error.num_steps,
                limits[name],
            )
            for name, error in found.items()
            if error is not None and name in limits
        )
