"""What prices leave unexplained: errors by regime, the scatter of steps and of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.cost.profile_file import RegimeError
from simserve.cost.regimes import REGIMES
from simserve.fidelity.fit.host import engine_seconds
from simserve.fidelity.fit.host_speed import host_scale, local_host_scale
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.logs.loaded_log import LoadedLog

__all__ = ["host_residuals", "host_scale_of", "step_errors_of", "step_residuals"]

Floats = NDArray[np.float64]

_QUANTILES = (np.arange(101) + 0.5) / 101
_FEWEST_FOR_QUANTILES = 100
_FEWEST_FOR_HOLDING = 500


def host_scale_of(log: LoadedLog, coefficients: Mapping[str, float]) -> float:
    """How slow a log's host was, as `host_scale` has it."""
    return host_scale(log.steps, engine_seconds(coefficients, log.steps))


def _by_regime(
    logs: Sequence[LoadedLog], prices: Prices, host_known: bool
) -> dict[str, tuple[Floats, Floats]]:
    """Predicted and measured durations (s) of all steps, by regime, and of all as `all`."""
    regimes, predicted, measured = [], [], []
    for log in logs:
        scale = host_scale_of(log, prices.coefficients) if host_known else 1.0
        scale = scale if log.has_host else 0.0
        predicted.append(prices.predict(log, scale))
        measured.append(log.steps.duration_s)
        regimes += log.steps.regimes
    if not regimes:
        return {}
    names, p, m = np.array(regimes), np.concatenate(predicted), np.concatenate(measured)
    masks = {"all": np.ones(len(names), dtype=bool)}
    masks |= {regime: names == regime for regime in REGIMES}
    return {regime: (p[mask], m[mask]) for regime, mask in masks.items() if mask.any()}


def step_errors_of(logs: Sequence[LoadedLog], prices: Prices) -> dict[str, dict[str, RegimeError]]:
    """Errors on all steps of some logs, `blind` and `host_known`, by regime and for `all`."""
    return {
        known: {
            regime: RegimeError(
                num_steps=len(measured),
                mape=_round(np.mean(np.abs(predicted / measured - 1.0))),
                bias=_round(predicted.sum() / measured.sum() - 1.0),
            )
            for regime, (predicted, measured) in _by_regime(
                logs, prices, known == "host_known"
            ).items()
        }
        for known in ("blind", "host_known")
    }


def step_residuals(logs: Sequence[LoadedLog], prices: Prices) -> dict[str, list[float]]:
    """Quantiles of measured over predicted by regime, each step at its host's own speed."""
    ratios, regimes = [], []
    for log in logs:
        local = local_host_scale(log.steps, engine_seconds(prices.coefficients, log.steps))
        predicted = prices.predict(log, local)
        ratios.append(log.steps.duration_s / predicted)
        regimes += log.steps.regimes
    if not ratios:
        return {}
    ratio, names = np.concatenate(ratios), np.array(regimes)
    return {
        regime: _quantiles(ratio[names == regime])
        for regime in REGIMES
        if (names == regime).sum() >= _FEWEST_FOR_QUANTILES
    }


def host_residuals(
    logs: Sequence[LoadedLog], coefficients: Mapping[str, float]
) -> tuple[list[float], int]:
    """Quantiles of the host's scale about its mean in a log, and for how many steps it holds.

    It holds for twice the lag at which its autocorrelation has fallen to one half: so long must
    pieces of one scale each be to have that autocorrelation.
    """
    scales, lags = [], []
    for log in logs:
        if len(log.steps) < _FEWEST_FOR_HOLDING:
            continue
        local = local_host_scale(log.steps, engine_seconds(coefficients, log.steps))
        scales.append(local / local.mean())
        centred = scales[-1] - 1.0
        power = float(centred @ centred)
        most = len(centred) // 2
        related = (float(centred[lag:] @ centred[:-lag]) for lag in range(1, most))
        lags.append(next((i for i, r in enumerate(related, 1) if r < 0.5 * power), most))
    if not scales:
        return [1.0, 1.0], 1
    return _quantiles(np.concatenate(scales)), 2 * int(np.median(lags))


def _quantiles(ratios: Floats) -> list[float]:
    quantiles = np.quantile(ratios, _QUANTILES)
    return [_round(value) for value in quantiles / quantiles.mean()]


def _round(value: Any) -> float:
    return round(float(value), 4)
