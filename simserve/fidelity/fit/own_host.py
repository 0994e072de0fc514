"""What the real executor's own times say of the host, and what they leave to its kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.fidelity.fit.least_squares import fit_non_negative
from simserve.fidelity.logs.step_watch import MeasuredSteps

__all__ = ["OwnHost", "own_host"]

Floats = NDArray[np.float64]

_HICCUP = 1.0
"""Of a part that takes longer than twice what is usual, only so much counts in full."""


class OwnHost(NamedTuple):
    """Host times of steps."""

    coefficients: dict[str, float]
    """`schedule_*`, `update_*` and `inputs_*`; the launch of a graph and the wait for it are inputs
    as well."""
    mixed_s: float
    """More in a step with prefills. It has no coefficient, and is priced with their kernels."""

    def kernels_s(self, measured: MeasuredSteps) -> Floats:
        """What is left of each step to the parts that are fitted; shape [steps]."""
        steps = measured.steps
        forward_s = steps.duration_s - steps.engine_s - measured.host_s
        return np.asarray(forward_s + self.mixed_s * (steps.num_prefills > 0))


def own_host(*groups: MeasuredSteps) -> OwnHost:
    """Fit schedule(), update() and inputs, each so that its times add up to those measured.

    What inputs take for a request that comes in, and update() for one that ends, is priced where
    schedule() takes it in.
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
    coefficients = {
        "schedule_step_s": float(schedule[0]),
        "schedule_request_s": float(schedule[1]),
        "schedule_new_request_s": new_request_s,
        "schedule_new_token_s": new_token_s,
        "inputs_step_s": float(inputs[0]),
        "inputs_request_s": float(inputs[1]),
        "update_step_s": float(update[0]),
        "update_request_s": float(update[1]),
        "launch_step_s": 0.0,
    }
    return OwnHost(coefficients, mixed_s)


def _columns(measured: MeasuredSteps) -> Floats:
    steps = measured.steps
    counts = steps.num_reqs, steps.num_new, steps.num_table_tokens, steps.num_prefills > 0
    return np.stack((np.ones(len(steps)), *counts), axis=1).astype(np.float64)


def _solve(columns: Floats, seconds: Floats) -> Floats:
    """Every step weighs alike, so that sums come out right and not the usual step alone."""
    weights = np.full(len(seconds), 1.0 / max(float(seconds.mean()), 1e-9))
    return fit_non_negative(columns, seconds, weights, _HICCUP)
