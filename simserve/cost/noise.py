"""Scatter of step times: a profile's prices times a factor drawn from what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.cost.profile import ProfileCost
from simserve.errors import ConfigError
from simserve.protocols import Price
from simserve.types import StepPlan, StepRun, TraceRequest

__all__ = ["ResidualNoise"]

Floats = NDArray[np.float64]

_BLOCK = 4096
"""Numbers drawn at once; each belongs to one place, however steps are priced together."""


class ResidualNoise:
    """A profile whose steps scatter as the measured ones did about it.

    The host changes its speed every `host_residual_steps` steps, and each step scatters by itself.
    Both depend on the seed and the step's number alone: a run of steps scatters as its steps one by
    one would. All parts of a step are scaled alike.

    Args:
        cost: the profile.
        seed: of the draws.

    Raises:
        ConfigError: the profile carries no residuals.
    """

    def __init__(self, cost: ProfileCost, seed: int) -> None:
        profile = cost.profile
        if not profile.residuals:
            raise ConfigError(
                f"executor.noise: profile '{profile.name}' carries no residuals to draw from"
            )
        self._cost = cost
        self._steps, self._hosts = _Draws(seed, 0), _Draws(seed, 1)
        self._residuals = {
            regime: np.array(factors) for regime, factors in profile.residuals.items()
        }
        self._host_residuals = np.array(profile.host_residuals)
        self._host_steps = profile.host_residual_steps

    @property
    def out_of_domain_steps(self) -> int:
        """Steps outside what was measured."""
        return self._cost.out_of_domain_steps

    @property
    def timing(self) -> str:
        """Whose step times these are."""
        return f"{self._cost.timing} with residual noise"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Where the profile went beyond its measurements."""
        return self._cost.remarks

    def price(self, run: StepRun) -> Price:
        """Durations and parts, scattered.

        Raises:
            OutOfDomainError: as `ProfileCost.price` has it.
        """
        steps = np.arange(run.plan.step, run.plan.step + run.count)
        hosts = _quantiles_at(self._host_residuals, self._hosts.at(steps // self._host_steps))
        host: Any = float(hosts[0]) if run.count == 1 else hosts
        durations_s, parts = self._cost.price_on(run, host)
        residuals = self._residuals.get(self._cost.regime(run))
        if residuals is None:
            return Price(durations_s, parts)
        factors = _quantiles_at(residuals, self._steps.at(steps))
        scattered_s = (np.asarray(durations_s) * factors).tolist()
        return Price(scattered_s, {name: part * factors for name, part in parts.items()})

    def after_step_s(self, plan: StepPlan) -> float:
        """Time of the engine's loop after a step (s), as the profile has it."""
        return self._cost.after_step_s(plan)

    def take_in_s(self, request: TraceRequest, first: bool) -> float:
        """Time of the engine's loop to take in one request (s), as the profile has it."""
        return self._cost.take_in_s(request, first)


class _Draws:
    """Numbers from 0 to 1, each at a place of its own."""

    def __init__(self, seed: int, stream: int) -> None:
        self._key = (seed, stream)
        self._block = -1
        self._numbers: Floats = np.zeros(0)

    def at(self, places: NDArray[np.int64]) -> Floats:
        """The numbers at increasing places."""
        blocks = places // _BLOCK
        found = np.empty(len(places))
        for block in range(int(blocks[0]), int(blocks[-1]) + 1):
            if block != self._block:
                self._block = block
                self._numbers = np.random.default_rng([*self._key, block]).random(_BLOCK)
            inside = blocks == block
            found[inside] = self._numbers[places[inside] - block * _BLOCK]
        return found


def _quantiles_at(quantiles: Floats, draws: Floats) -> Floats:
    """Between evenly spaced quantiles, at draws from 0 to 1."""
    places = np.arange(len(quantiles))
    return np.asarray(np.interp(draws * (len(quantiles) - 1), places, quantiles))
