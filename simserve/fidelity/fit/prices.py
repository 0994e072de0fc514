"""What steps cost: coefficients and what goes with them, as a profile has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.cost.profile_file import Graphs, ProfileFile
from simserve.cost.step_work import NO_FACTORS, SizeFactors
from simserve.fidelity.fit.step import predict, slowed
from simserve.fidelity.logs.loaded_log import LoadedLog

__all__ = ["Prices"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prices:
    """What steps cost, as a profile has it."""

    model: str
    """Whose `size_factors` these are."""
    coefficients: Mapping[str, float]
    size_factors: SizeFactors
    graphs: Graphs
    clock: tuple[float, float] | None = None
    """What heat adds to the kernels of steps with prefills, and of others."""

    @classmethod
    def of(cls, profile: ProfileFile) -> Prices:
        """Those of a profile."""
        clock = (profile.clock.prefills, profile.clock.decodes) if profile.clock else None
        return cls(profile.model, profile.coefficients, profile.factors, profile.graphs, clock)

    def predict(self, log: LoadedLog, host_scale: float | Floats) -> Floats:
        """Durations of a log's steps (s) on a host of one speed, or of one a step."""
        factors = self.size_factors if log.model == self.model else NO_FACTORS
        slower = slowed(self.clock, log.heat, log.steps)
        return predict(
            self.coefficients, log.sheet, log.steps, self.graphs, host_scale, factors, slower
        )
