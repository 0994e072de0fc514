"""How fast the host was: it differs from process to process, and within one over time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simserve.fidelity.logs.observations import Observations

__all__ = ["host_scale", "local_host_scale"]

Seconds = NDArray[np.float64]

_PRIOR_STEPS = 10
"""A log counts as if it had so many more steps on a host of the reference's speed."""
_HALF_WINDOW = 8
_SHORTEST_FOR_WINDOWS = 60


def host_scale(steps: Observations, predicted_s: Seconds) -> float:
    """How much longer schedule() and update() took over a log than predicted.

    Steps of decodes tell it best; of one request alone they are left out, since an engine then
    walks its whole block table. A hiccup of one step says nothing of the others: in a long log each
    step counts with the speed around it. Few steps tell little: the scale of a short log is drawn
    to 1.
    """
    told = (steps.num_prefills == 0) & (steps.num_reqs > 1)
    if not told.any():
        told[:] = True
    is_long = len(steps) >= _SHORTEST_FOR_WINDOWS
    measured_s = _around(steps, predicted_s) * predicted_s if is_long else steps.engine_s
    measured, predicted = measured_s[told].sum(), predicted_s[told].sum()
    if not measured > 0 or not predicted > 0:
        return 1.0
    num = int(told.sum())
    return float((num * measured / predicted + _PRIOR_STEPS) / (num + _PRIOR_STEPS))


def local_host_scale(steps: Observations, predicted_s: Seconds) -> Seconds:
    """The same around each step: the median over a window, or over all of a short log."""
    if len(steps) < _SHORTEST_FOR_WINDOWS:
        return np.full(len(steps), host_scale(steps, predicted_s))
    return _around(steps, predicted_s)


def _around(steps: Observations, predicted_s: Seconds) -> Seconds:
    """Medians over windows, mirrored at both ends."""
    ratio = np.divide(steps.engine_s, predicted_s, out=np.ones(len(steps)), where=predicted_s > 0.0)
    ends = ratio[:_HALF_WINDOW][::-1], ratio[-_HALF_WINDOW:][::-1]
    windows = np.lib.stride_tricks.sliding_window_view(
        np.concatenate((ends[0], ratio, ends[1])), 2 * _HALF_WINDOW + 1
    )
    return np.asarray(np.median(windows, axis=1), dtype=np.float64)
