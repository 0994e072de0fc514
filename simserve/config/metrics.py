"""Configuration of what is measured and written."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simserve.config.base import Milliseconds, Positive, Seconds, StrictModel

__all__ = ["Goodput", "Metrics", "Window"]

MetricName = Literal["ttft", "tpot", "itl", "e2el", "queue_time"]


class Goodput(StrictModel):
    """Upper bounds (milliseconds); a request that keeps all of them counts as good."""

    ttft: Milliseconds | None = None
    """Time to first token."""
    tpot: Milliseconds | None = None
    """Mean time per output token of a request, without the first."""
    e2el: Milliseconds | None = None
    """End-to-end latency."""


class Window(StrictModel):
    """Part of the run that counts as steady state; every event is judged by its own time."""

    start_s: Seconds = 0.0
    """Start, on the engine's clock (seconds)."""
    end_s: Positive | None = None
    """End (seconds). null: the end of the run."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s ({self.end_s:g}) is not after start_s ({self.start_s:g})")
        return self


class Metrics(StrictModel):
    """What is measured, and what of it is written."""

    percentile_metrics: Annotated[tuple[MetricName, ...], Field(strict=False)] = (
        "ttft",
        "tpot",
        "itl",
        "e2el",
        "queue_time",
    )
    """Latencies to report."""
    percentiles: Annotated[
        tuple[Annotated[float, Field(ge=0, le=100)], ...], Field(strict=False, min_length=1)
    ] = (50, 90, 95, 99)
    """Percentiles of each; 50, 90, 95 and 99 are always there."""
    goodput: Goodput | None = None
    """Bounds (milliseconds) for request_goodput. null: not measured."""
    window: Window | None = None
    """Steady-state window. null: the whole run."""
    repetitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Runs with seeds seed, seed + 1, …"""
    plot: bool = True
    """Whether to draw the picture of the run."""
    save_detailed: bool = False
    """Whether to write every ITL of every request."""
