"""What `validate` finds out: every number of a workload, real beside simulated, and its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simserve.fidelity.replay.plans import PlanDifference
from simserve.fidelity.validate.divergence import Divergence
from simserve.fidelity.validate.step_errors import StepError

__all__ = ["Cell", "StepVerdict", "Validation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One number of the logs (their mean) and of the simulation."""

    name: str
    """`ttft_p50`, …, or `throughput`."""
    real: float | None
    """Seconds, or tokens a second."""
    real_range: tuple[float, float] | None
    """Least and largest of the repeats."""
    simulated: float | None
    scattered: float | None
    """Simulated with step times that scatter as measured ones do; not judged."""
    spread: float
    """How far apart repeats on the real engine are: half their range over their mean."""
    limit: float | None
    """Largest error that passes; None: not judged."""
    in_range: bool = False
    """Judged by lying between the repeats instead, where the number has no single value."""

    @property
    def error(self) -> float | None:
        """(simulated − real) / real."""
        return _relative(self.simulated, self.real)

    @property
    def scattered_error(self) -> float | None:
        """The same of the simulation with scatter."""
        return _relative(self.scattered, self.real)

    @property
    def judged(self) -> bool:
        """Whether there is a verdict."""
        return self.error is not None and (self.limit is not None or self.in_range)

    @property
    def missed(self) -> bool:
        """Whether the verdict is a miss."""
        if self.error is None or self.simulated is None:
            return False
        if self.in_range and self.real_range is not None:
            low, high = self.real_range
            return not low <= self.simulated <= high
        return self.limit is not None and abs(self.error) > self.limit

    @property
    def larger(self) -> str:
        """Which is larger, the error or the spread of the real engine itself."""
        if self.error is None:
            return ""
        return "error" if abs(self.error) > self.spread else "spread"

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "name": self.name,
            "real": self.real,
            "real_range": list(self.real_range) if self.real_range else None,
            "simulated": self.simulated,
            "error": self.error,
            "scattered": self.scattered,
            "scattered_error": self.scattered_error,
            "spread": self.spread,
            "larger": self.larger,
            "limit": self.limit,
            "between_repeats": self.in_range,
            "missed": self.missed,
        }


def _relative(value: float | None, real: float | None) -> float | None:
    return None if value is None or not real else value / real - 1.0


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """A limit on step errors."""

    name: str
    value: float
    num_steps: int
    limit: float

    @property
    def missed(self) -> bool:
        """Whether the value is beyond the limit."""
        return abs(self.value) > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One workload: one log, or several repeats."""

    logs: tuple[str, ...]
    engine: str
    profile: str
    host_scale: float
    ttft_elasticity: float
    near_saturation: bool
    fitted_on: tuple[str, ...]
    """Those of the logs that the profile was fitted on."""
    remarks: tuple[str, ...]
    """Where the profile went beyond its measurements."""
    cells: tuple[Cell, ...]
    counts: Mapping[str, tuple[float, float]]
    """Real and simulated: steps, preemptions, prefix-hit tokens."""
    steps: Mapping[str, StepError]
    step_verdicts: tuple[StepVerdict, ...]
    divergence: Divergence | None
    replayed: tuple[PlanDifference | None, ...]
    """Of each log: where our scheduler, at the log's own times, first plans otherwise."""
    attribution: Mapping[str, Mapping[str, float | None]]
    """Error of each number under `scheduling` (our plans, measured times), `pricing` (the engine's
    plans, priced times) and `both` (the simulation)."""

    @property
    def misses(self) -> Sequence[str]:
        """Names of what is beyond its limit; a different scheduling rule is one."""
        missed = [cell.name for cell in self.cells if cell.missed]
        missed += [verdict.name for verdict in self.step_verdicts if verdict.missed]
        by_rule = self.divergence is not None and not self.divergence.by_arrival
        if by_rule or any(self.replayed):
            missed.append("scheduling rule")
        return missed

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        divergence = self.divergence
        return {
            "logs": list(self.logs),
            "decisions": self.engine,
            "timing": self.profile,
            "host_scale": self.host_scale,
            "ttft_elasticity": self.ttft_elasticity,
            "near_saturation": self.near_saturation,
            "fitted_on": list(self.fitted_on),
            "remarks": list(self.remarks),
            "metrics": [cell.as_json() for cell in self.cells],
            "counts": {name: {"real": a, "simulated": b} for name, (a, b) in self.counts.items()},
            "steps": {name: error._asdict() for name, error in self.steps.items()},
            "step_limits": [
                {
                    "name": v.name,
                    "value": v.value,
                    "num_steps": v.num_steps,
                    "limit": v.limit,
                    "missed": v.missed,
                }
                for v in self.step_verdicts
            ],
            "first_divergence": None
            if divergence is None
            else {
                "step": divergence.difference.step,
                "what": str(divergence.difference),
                "why": divergence.reason,
                "is_arrival": divergence.by_arrival,
            },
            "replay": [
                {"log": name, "first_difference": None if other is None else str(other)}
                for name, other in zip(self.logs, self.replayed, strict=True)
            ],
            "attribution": {name: dict(errors) for name, errors in self.attribution.items()},
            "misses": list(self.misses),
        }
