"""What the real executor's own times say of its host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simserve.fidelity.fit.least_squares import fit_non_negative
from simserve.fidelity.logs.step_watch import MeasuredSteps

__all__ = ["own_host"]

Floats = NDArray[np.float64]

_HICCUP = 1.0
"""Of a part that takes longer than twice what is usual, only so much counts in full."""


def own_host(*groups: MeasuredSteps) -> dict[str, float]:
    """Fit schedule(), update() and inputs, each so that its times add up to those measured.

    What inputs take for a request that comes in, and update() for one that ends, is priced where
    schedule() takes it in; what all three take more in a step with prefills, with the inputs. The
    launch of a graph and the wait for it are inputs as well.
    """
    steps = [group.steps for group in groups]
    columns = np.concatenate([_columns(group) for group in groups])
    schedule, update, inputs = (
        _solve(columns, np.concatenate(times))
        for times in (
            [one.schedule_s for one in steps],
            [one.update_s for one in steps],
            [group.host_s for group in groups],
        )
    )
    new_request_s, new_token_s, mixed_s = (schedule + update + inputs)[2:].tolist()
    return {
        "schedule_step_s": float(schedule[0]),
        "schedule_request_s": float(schedule[1]),
        "schedule_new_request_s": new_request_s,
        "schedule_new_token_s": new_token_s,
        "inputs_step_s": float(inputs[0]),
        "inputs_request_s": float(inputs[1]),
        "inputs_mixed_s": mixed_s,
        "update_step_s": float(update[0]),
        "update_request_s": float(update[1]),
        "launch_step_s": 0.0,
    }


def _columns(measured: MeasuredSteps) -> Floats:
    steps = measured.steps
    counts = steps.num_reqs, steps.num_new, steps.num_table_tokens, steps.num_prefills > 0
    return np.stack((np.ones(len(steps)), *counts), axis=1).astype(np.float64)


def _solve(columns: Floats, seconds: Floats) -> Floats:
    """Every step weighs alike, so that sums come out right and not the usual step alone."""
    weights = np.full(len(seconds), 1.0 / max(float(seconds.mean()), 1e-9))
    return fit_non_negative(columns, seconds, weights, _HICCUP)
