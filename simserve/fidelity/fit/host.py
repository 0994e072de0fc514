"""Fits what the engine times itself: schedule(), update(), and its loop between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from simserve.fidelity.fit.host_speed import local_host_scale
from simserve.fidelity.fit.least_squares import fit_non_negative
from simserve.fidelity.logs.observations import Observations

__all__ = ["engine_seconds", "fit_host"]

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]

_ROUNDS = 4
_OUTLIER = 0.15
_LOG_STEPS = 400
"""A log of more steps weighs as one of so many."""


def fit_host(logs: Sequence[Observations]) -> tuple[dict[str, float], list[Floats]]:
    """Coefficients for a host of speed 1, and each log's host scale step by step.

    Coefficients and scales are fitted in turn: times are coefficients times scale.
    """
    scales = [np.ones(len(log)) for log in logs]
    weights = np.concatenate([np.full(len(x), min(1.0, _LOG_STEPS / len(x))) ** 0.5 for x in logs])
    reqs = np.concatenate([log.num_reqs for log in logs])
    schedule = {n: np.concatenate([_schedule(x)[n] for x in logs]) for n in _schedule(logs[0])}
    update = {n: np.concatenate([_update(x)[n] for x in logs]) for n in _update(logs[0])}
    loop = {n: np.concatenate([_loop(x)[n] for x in logs]) for n in _loop(logs[0])}
    gap_s = np.concatenate([log.gap_s for log in logs])
    taken_in = np.concatenate([log.gap_requests for log in logs])
    known = ~np.isnan(gap_s)
    found: dict[str, float] = {}
    for _ in range(_ROUNDS):
        scale = np.concatenate(scales)
        typical = weights / (50e-6 + 8e-6 * reqs), weights / (25e-6 + 5e-6 * reqs)
        measured = np.concatenate([log.schedule_s for log in logs])
        found = _solve(schedule, scale, measured, typical[0])
        measured = np.concatenate([log.update_s for log in logs])
        found |= _solve(update, scale, measured, typical[1])
        loop_weights = weights / (15e-6 + 1e-6 * reqs + 100e-6 * taken_in)
        found |= _solve(
            {name: column[known] for name, column in loop.items()},
            scale[known],
            gap_s[known],
            loop_weights[known],
        )
        scales = [local_host_scale(log, engine_seconds(found, log)) for log in logs]
    found.pop("lone_token_s")
    return found, scales


def engine_seconds(coefficients: Mapping[str, float], steps: Observations) -> Floats:
    """schedule() and update() of each step on a host of speed 1 (s)."""
    columns = {**_schedule(steps), **_update(steps)}
    total = np.zeros(len(steps))
    for name, column in columns.items():
        total += coefficients.get(name, 0.0) * column
    return total


def _schedule(steps: Observations) -> dict[str, Floats]:
    lone = (steps.num_reqs == 1) * (steps.decode_kv_tokens + steps.prefill_kv_tokens)
    return {
        "schedule_step_s": np.ones(len(steps)),
        "schedule_request_s": _floats(steps.num_reqs),
        "schedule_new_request_s": _floats(steps.num_new),
        "schedule_new_token_s": _floats(steps.num_table_tokens),
        # A request alone shares its whole block table with all that run, so the engine walks it.
        # That is fitted beside the rest and not priced: a second request would make a step cheaper.
        "lone_token_s": _floats(lone),
    }


def _update(steps: Observations) -> dict[str, Floats]:
    return {
        "update_step_s": np.ones(len(steps)),
        "update_request_s": _floats(steps.num_reqs),
    }


def _loop(steps: Observations) -> dict[str, Floats]:
    return {
        "loop_step_s": np.ones(len(steps)),
        "loop_request_s": _floats(steps.num_reqs),
        "intake_first_s": _floats(np.minimum(steps.gap_requests, 1)),
        "intake_request_s": _floats(steps.gap_requests),
        "intake_token_s": _floats(steps.gap_tokens),
    }


def _solve(columns: Columns, scale: Floats, measured: Floats, weights: Floats) -> dict[str, float]:
    matrix = np.stack(list(columns.values()), axis=1) * scale[:, None]
    return dict(
        zip(
            columns,
            fit_non_negative(matrix, measured, weights, _OUTLIER).tolist(),
            strict=True,
        )
    )


def _floats(counts: NDArray[np.int64]) -> Floats:
    return counts.astype(np.float64)
