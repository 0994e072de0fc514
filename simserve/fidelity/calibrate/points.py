"""Steps of a calibration by regime, measured and predicted: what its picture shows."""

from __future__ import annotations

import numpy as np

from simserve.cost.profile_file import ProfileFile
from simserve.cost.regimes import REGIMES
from simserve.fidelity.calibrate.calibration import GROUPS, Calibration, predicted_s
from simserve.report.calibration_plot import Regime

__all__ = ["regimes"]


def regimes(calibration: Calibration, profile: ProfileFile) -> list[Regime]:
    """All steps, the held out ones too, by regime; without regimes that have none."""
    names: list[str] = []
    measured, predicted = [], []
    for group in GROUPS:
        steps, prices = predicted_s(calibration, profile, group)
        names += steps.steps.regimes
        measured.append(steps.steps.duration_s)
        predicted.append(prices)
    kind, m, p = np.array(names), np.concatenate(measured), np.concatenate(predicted)
    return [Regime(one, m[kind == one], p[kind == one]) for one in REGIMES if (kind == one).any()]
