"""Whose fault an error is: the engine's plans or ours, at measured or at priced step times.

Four runs of one workload. The engine's plans at measured times are the log itself; our plans at
measured times are the replay; our plans at priced times are the simulation. This module makes the
fourth: the engine's plans at priced times.
"""

from __future__ import annotations

import numpy as np

from simserve.fidelity.logs.measured import Measured, measured_log
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.validate.step_errors import PricedSteps

__all__ = ["priced_plans"]


def priced_plans(log: StepLog, priced: PricedSteps) -> Measured:
    """The log with every step as long as it is priced.

    Plans only hold if the same requests have arrived by each step. So arrivals move along: the
    log's clock is stretched within each step by predicted over measured time, and runs as it did
    between steps.
    """
    steps = log.steps
    # The clock begins at 0, so that requests that came before the first step wait as long.
    real_s = np.append(0.0, np.stack((steps.start_s, steps.end_s), axis=1).ravel())
    changes = np.diff(real_s, prepend=0.0)
    changes[2::2] = priced.predicted_s
    stretched_s = changes.cumsum()
    return measured_log(log, lambda times_s: np.interp(times_s, real_s, stretched_s))
