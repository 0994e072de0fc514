"""Checks of cost-model parameters, with one message for all faults."""

from __future__ import annotations

import math
from collections.abc import Mapping

from simserve.errors import ConfigError, Problem

__all__ = ["check_fractions", "check_not_negative", "check_positive"]


def check_not_negative(kind: str, parameters: Mapping[str, float]) -> None:
    """Raise ConfigError naming every parameter that is negative or not finite."""
    _raise_for(
        kind,
        {k: v for k, v in parameters.items() if not (math.isfinite(v) and v >= 0)},
        "must be a finite number of at least 0",
    )


def check_positive(kind: str, parameters: Mapping[str, float]) -> None:
    """Raise ConfigError naming every parameter that is not a finite number above 0."""
    _raise_for(
        kind,
        {k: v for k, v in parameters.items() if not (math.isfinite(v) and v > 0)},
        "must be a finite number above 0",
    )


def check_fractions(kind: str, parameters: Mapping[str, float]) -> None:
    """Raise ConfigError naming every parameter that is not above 0 and at most 1."""
    _raise_for(
        kind,
        {k: v for k, v in parameters.items() if not 0 < v <= 1},
        "must be above 0 and at most 1",
    )


def _raise_for(kind: str, wrong: Mapping[str, float], rule: str) -> None:
    if wrong:
        raise ConfigError(
            Problem(path=f"cost.{name}", message=f"{kind}: {rule}, not {value}")
            for name, value in wrong.items()
        )
