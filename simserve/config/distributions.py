"""Configuration of what a synthetic workload draws: lengths and arrivals."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from simserve.config.base import Count, Mean, Positive, Seconds, Shape, StrictModel

__all__ = [
    "Arrival",
    "Bursts",
    "ConstantLength",
    "ConstantRate",
    "EmpiricalLength",
    "Gamma",
    "Immediate",
    "Length",
    "LognormalLength",
    "Poisson",
    "Ramp",
    "UniformLength",
    "ZipfLength",
]


class ConstantLength(StrictModel):
    """Always the same length."""

    kind: Literal["constant"]
    value: Count
    """The length."""

    @property
    def least(self) -> int:
        """The smallest length that can be drawn."""
        return self.value


class _Bounded(StrictModel):
    min: Count = 1
    """Smallest length."""
    max: Count | None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max ({self.max}) is smaller than min ({self.min})")
        return self

    @property
    def least(self) -> int:
        """The smallest length that can be drawn."""
        return self.min


class UniformLength(_Bounded):
    """Every whole number from min to max is equally likely."""

    kind: Literal["uniform"]
    max: Count
    """Largest length, included."""


class LognormalLength(_Bounded):
    """Log-normal lengths, rounded; those outside [min, max] become min or max."""

    kind: Literal["lognormal"]
    mean: Mean
    """Arithmetic mean of the distribution before clipping."""
    sigma: Shape
    """Standard deviation of the logarithm."""
    max: Count | None = None
    """Largest length, included. null: no limit."""


class ZipfLength(_Bounded):
    """A power law: the probability of length k is proportional to k**-alpha."""

    kind: Literal["zipf"]
    alpha: Shape
    """Exponent: the larger, the more the short lengths prevail."""
    max: Count
    """Largest length, included."""


class EmpiricalLength(StrictModel):
    """Drawn from a list, each entry equally likely."""

    kind: Literal["empirical"]
    values: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
    """Lengths to draw from; repeat one to make it more likely."""

    @property
    def least(self) -> int:
        """The smallest length that can be drawn."""
        return min(self.values)


def _constant(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"kind": "constant", "value": value} if is_number else value


_Drawn = Annotated[
    ConstantLength | UniformLength | LognormalLength | ZipfLength | EmpiricalLength,
    Field(discriminator="kind"),
]
Length = Annotated[_Drawn, BeforeValidator(_constant, json_schema_input_type=Count | _Drawn)]
"""A distribution, or a number: always that."""


class Immediate(StrictModel):
    """Everything arrives at time 0."""

    kind: Literal["immediate"]


class ConstantRate(StrictModel):
    """Equal gaps."""

    kind: Literal["constant"]
    rate: Positive
    """Arrivals per second."""


class Poisson(StrictModel):
    """Exponential gaps."""

    kind: Literal["poisson"]
    rate: Positive
    """Arrivals per second."""


class Gamma(StrictModel):
    """Gamma-distributed gaps, as with `vllm bench serve --burstiness`."""

    kind: Literal["gamma"]
    rate: Positive
    """Arrivals per second."""
    burstiness: Positive = 1.0
    """Shape of the gamma distribution: 1 is Poisson, below it arrivals clump."""


class Bursts(StrictModel):
    """Groups of arrivals at one instant, at equal intervals."""

    kind: Literal["bursts"]
    size: Count
    """Arrivals in a burst."""
    gap_s: Seconds
    """From one burst to the next (seconds)."""


class Ramp(StrictModel):
    """A rate that moves from the first arrival to the last, as with `--ramp-up-strategy`."""

    kind: Literal["ramp"]
    strategy: Literal["linear", "exponential"] = "linear"
    """How the rate goes from start to end, counted in arrivals."""
    start_rps: Positive
    """Arrivals per second at the start."""
    end_rps: Positive
    """Arrivals per second at the end."""
    burstiness: Positive = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson."""


Arrival = Annotated[
    Immediate | ConstantRate | Poisson | Gamma | Bursts | Ramp,
    Field(discriminator="kind"),
]
