"""Robust least squares with bounds, linear and not, in NumPy alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["fit_bounded", "fit_non_negative"]

Floats = NDArray[np.float64]
Residuals = Callable[[Floats], Floats]

_STEP = 1e-4
"""Relative change of a parameter for a difference quotient."""


def fit_non_negative(
    columns: Floats, target: Floats, weights: Floats, outlier: float, rounds: int = 12
) -> Floats:
    """Coefficients of at least 0 that reproduce `target` from `columns`, robustly.

    Args:
        columns: shape [rows, coefficients].
        target: shape [rows], positive.
        weights: of each row's error; errors are weighed as they are, not squared.
        outlier: relative error beyond which a row counts linearly (Huber).
        rounds: reweightings.
    """
    scaled = weights
    coefficients = np.zeros(columns.shape[1])
    for _ in range(rounds):
        coefficients = _non_negative(columns * scaled[:, None], target * scaled)
        fitted = columns @ coefficients
        error = np.abs(fitted - target) / np.maximum(fitted, 1e-9)
        scaled = weights / np.sqrt(np.maximum(error / outlier, 1.0))
    return coefficients


def _non_negative(a: Floats, b: Floats) -> Floats:
    """Least squares over x >= 0 (Lawson and Hanson, Solving Least Squares Problems, chapter 23)."""
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    tiny = 1e-10 * float(np.abs(a.T @ b).max())
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        if not ((gradient > tiny) & ~free).any():
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if trial[free].min() > 0:
                break
            leaving = free & (trial <= 0)
            step = np.min(x[leaving] / (x[leaving] - trial[leaving]))
            x = x + step * (trial - x)
            free &= x > 0
            if not free.any():
                return x
        x = trial
    return x


def fit_bounded(
    residuals: Residuals,
    start: Floats,
    low: Floats,
    high: Floats,
    weights: Floats,
    outlier: float,
    rounds: int = 80,
) -> Floats:
    """Positive parameters between bounds that make residuals small, robustly.

    Levenberg-Marquardt steps in the logarithms of the parameters, cut at the bounds.

    Args:
        residuals: of shape [rows], for parameters of the shape of `start`.
        start: first guess; `low` and `high` bound it, all positive.
        weights: of each row's loss.
        outlier: residual beyond which a row counts linearly (Huber).
        rounds: most steps.
    """
    bounds = np.log(low), np.log(high)

    def at(x: Floats) -> Floats:
        return residuals(np.exp(x))

    def loss(r: Floats) -> float:
        size = np.abs(r)
        huber = np.where(size < outlier, size * size / 2, outlier * (size - outlier / 2))
        return float(weights @ huber)

    x = np.clip(np.log(start), *bounds)
    r = at(x)
    now, damping = loss(r), 1e-2
    for _ in range(rounds):
        matrix, gradient = _normal_equations(at, x, r, weights, outlier, bounds[1])
        for _ in range(12):
            trial = _damped_step(x, matrix, gradient, damping, bounds)
            r_trial = at(trial)
            then = loss(r_trial)
            if then < now:
                break
            damping *= 4
        else:
            break
        gain, now, x, r = now - then, then, trial, r_trial
        damping = max(damping / 4, 1e-9)
        if gain < 1e-7 * now:
            break
    fitted: Floats = np.exp(x)
    return fitted


def _normal_equations(
    at: Residuals, x: Floats, r: Floats, weights: Floats, outlier: float, high: Floats
) -> tuple[Floats, Floats]:
    """Weighted J'J and J'r; rows beyond `outlier` weigh less."""
    root = np.sqrt(weights * np.minimum(1.0, outlier / np.maximum(np.abs(r), 1e-12)))
    jacobian = np.empty((len(r), len(x)))
    for j in range(len(x)):
        step = _STEP if x[j] + _STEP <= high[j] else -_STEP
        moved = x.copy()
        moved[j] += step
        jacobian[:, j] = (at(moved) - r) * (root / step)
    return jacobian.T @ jacobian, jacobian.T @ (r * root)


def _damped_step(
    x: Floats, matrix: Floats, gradient: Floats, damping: float, bounds: tuple[Floats, Floats]
) -> Floats:
    low, high = bounds
    stuck = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))
    free = np.flatnonzero(~stuck)
    diagonal = np.diag(matrix)
    ridge = damping * (diagonal[free] + 1e-9 * diagonal.max() + 1e-300)
    step = np.zeros_like(x)
    step[free] = -np.linalg.solve(matrix[np.ix_(free, free)] + np.diag(ridge), gradient[free])
    return np.clip(x + np.clip(step, -1.0, 1.0), low, high)
