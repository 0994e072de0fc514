"""Step times from measured coefficients: a sum of slopes, hinges and tables over the features."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from simserve.cost.features import Features, extract
from simserve.cost.profile_file import STEP, ProfileFile, Term, load_profile
from simserve.errors import ConfigError, OutOfDomainError
from simserve.protocols import Price
from simserve.types import GPU, ModelShape, StepRun

__all__ = ["ProfileCost"]

Number = Any
"""A float for a single step, a float64 array for a run: the same operations serve both."""


class ProfileCost:
    """Prices steps by a profile (see `profile_file` for the format).

    Outside the measured domain the outermost slope goes on, which keeps the price monotone, and
    the step is counted in `out_of_domain_steps`; a profile may forbid it instead.

    Args:
        model: the model that is simulated; its name must be the profile's.
        gpu: the GPU that is simulated; its name must be the profile's.
        name: a profile that comes with the package, or
        path: a profile's file, relative to `base_dir`.

    Raises:
        UnknownNameError, ConfigError: see `load_profile`; or the profile is of something else.
    """

    def __init__(
        self,
        model: ModelShape,
        gpu: GPU,
        *,
        name: str | None = None,
        path: str | Path | None = None,
        base_dir: Path | None = None,
    ) -> None:
        self.profile = load_profile(name, path, base_dir)
        _check_subject(self.profile, model, gpu)
        self.out_of_domain_steps = 0
        self._window = model.sliding_window
        self._parts = tuple(dict.fromkeys(term.part for term in self.profile.terms))
        self._terms = [
            (self._parts.index(term.part), term.feature, _evaluator(term))
            for term in self.profile.terms
        ]

    def price(self, run: StepRun) -> Price:
        """Durations and parts of the steps of a run; a step without tokens costs 0.

        Raises:
            OutOfDomainError: a step lies outside the measured domain and the profile forbids that,
                or the profile gives it no time at all.
        """
        features = extract(run, self._window)
        table = np.zeros((1 + len(self._parts), run.count))
        if features.num_tokens == 0:
            return self._price(table)
        self._check_domain(features, run.count)
        totals: list[Number] = [0.0] * len(self._parts)
        for part, feature, seconds in self._terms:
            value = 1 if feature == STEP else getattr(features, feature)
            totals[part] = totals[part] + seconds(value)
        for row, total in zip(table[1:], totals, strict=True):
            row[:] = total
            table[0] += row
        if not table[0].min() > 0.0:
            raise OutOfDomainError(
                f"profile '{self.profile.name}' gives a step of {features.num_tokens} tokens no "
                "time; give it a positive 'step' term"
            )
        return self._price(table)

    def _price(self, table: Any) -> Price:
        return Price(table[0], dict(zip(self._parts, table[1:], strict=True)))

    def _check_domain(self, features: Features, count: int) -> None:
        """Count the steps outside the domain, or refuse them."""
        outside: Any = False
        for feature, (low, high) in self.profile.domain.items():
            value = getattr(features, feature)
            beyond = (value < low) | (value > high)
            if self.profile.out_of_domain == "error" and np.any(beyond):
                worst = np.max(value) if np.max(value) > high else np.min(value)
                raise OutOfDomainError(
                    f"profile '{self.profile.name}': {feature} = {worst} is outside the measured "
                    f"{low:g} to {high:g}, and the profile forbids extrapolation"
                )
            outside = outside | beyond
        self.out_of_domain_steps += int(np.broadcast_to(outside, count).sum())


def _check_subject(profile: ProfileFile, model: ModelShape, gpu: GPU) -> None:
    """Raise ConfigError if the profile was measured on another model or GPU."""
    for what, measured, wanted in (
        ("model", profile.model, model.name),
        ("gpu", profile.gpu, gpu.name),
    ):
        if measured != wanted:
            raise ConfigError(
                f"profile '{profile.name}' was measured with {what} '{measured}', "
                f"the configuration has '{wanted}'"
            )


def _evaluator(term: Term) -> Callable[[Number], Number]:
    """The function of the feature's value that a term stands for."""
    if term.points is not None:
        return _table(term.points)
    slope, hinge = term.seconds_per_unit or 0.0, term.above

    def line(value: Number) -> Number:
        over = value - hinge
        return slope * (max(over, 0.0) if isinstance(over, float) else np.maximum(over, 0.0))

    return line


def _table(points: Sequence[tuple[float, float]]) -> Callable[[Number], Number]:
    """Linear interpolation in the value itself; outside, the outermost slope, never below 0."""
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
    slopes.append(slopes[-1])
    x_array, y_array, slope_array = np.array(xs), np.array(ys), np.array(slopes)

    def interpolate(value: Number) -> Number:
        if isinstance(value, int):
            i = max(bisect_right(xs, value) - 1, 0)
            return max(ys[i] + slopes[i] * (value - xs[i]), 0.0)
        at = np.maximum(np.searchsorted(x_array, value, side="right") - 1, 0)
        return np.maximum(y_array[at] + slope_array[at] * (value - x_array[at]), 0.0)

    return interpolate
