"""Fits prices to the steps of some logs: the host first, then kernels and sizes in turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from simserve.cost.coefficients import COEFFICIENTS, OF_PLANS
from simserve.cost.profile_file import Graphs
from simserve.cost.step_work import SizeFactors
from simserve.fidelity.fit.host import fit_host
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.fit.sizes import bounded, fit_size_factors
from simserve.fidelity.fit.step import FITTED_HERE, Sample, fit_steps
from simserve.fidelity.logs.loaded_log import LoadedLog

__all__ = ["fit_prices"]

Floats = NDArray[np.float64]

_HOST_TIMES = ("inputs_step_s", "inputs_request_s", "launch_step_s", "launch_eager_layer_s")
_ENGINE_TIMES = tuple(name for name in COEFFICIENTS if name not in FITTED_HERE)
_OF_SHARED_KV = ("shared_kv_saved",)
"""What no log tells in which nothing is shared."""
_OF_OWN_HOSTS = ("inputs_mixed_s",)
"""What no log tells whose kernels were not timed by themselves."""
_LONG_LOG_STEPS = 60
_ENOUGH_LONG_LOGS = 3
_SIZE_ROUNDS = 2
"""Coefficients and size factors are fitted in turn so often: more rounds change neither."""
_REFERENCE_STEPS = 200
"""A longer log weighs as one of so many where logs of unlike length are averaged."""


def fit_prices(
    logs: Sequence[LoadedLog],
    graphs: Graphs,
    model: str,
    known: Mapping[str, float],
    own_hosts: Collection[str],
) -> Prices:
    """Coefficients for a host scale of 1 at the reference; `known` ones are given for that.

    Coefficients and size factors are fitted in turn; each model has factors of its own.
    """
    host, scales = _hosts(logs)
    reference = _reference_scale(logs, scales, model, own_hosts)
    if not any(log.has_host for log in logs):
        known = {**known, **dict.fromkeys(_HOST_TIMES, 0.0)}
    has_plan = any(log.steps.dealt is not None for log in logs)
    unknown = [] if has_plan else [*OF_PLANS]
    if not any(log.steps.shared_kv_tokens.any() for log in logs):
        unknown += _OF_SHARED_KV
    if any(log.kernels_s is None for log in logs):
        unknown += _OF_OWN_HOSTS
    known = {**dict.fromkeys(unknown, 0.0), **known}
    samples = [
        Sample(
            log.steps,
            log.sheet,
            scale,
            log.name not in own_hosts,
            kernels_s=log.kernels_s,
            heat=log.heat,
        )
        for log, scale in zip(logs, scales, strict=True)
    ]
    at = {name: reference if spec.host else 1.0 for name, spec in COEFFICIENTS.items()}
    fixed = {name: value / at[name] for name, value in known.items()}
    of_steps, hosts, clock = fit_steps(samples, graphs, fixed)
    found = {**host, **of_steps}
    factors: dict[str, SizeFactors] = {}
    for _ in range(_SIZE_ROUNDS):
        samples = [
            one._replace(host_scale=factor * one.host_scale)
            for one, factor in zip(samples, hosts, strict=True)
        ]
        by_model = {
            name: [one for one, log in zip(samples, logs, strict=True) if log.model == name]
            for name in sorted({log.model for log in logs})
        }
        factors = {n: fit_size_factors(own, found, graphs, clock) for n, own in by_model.items()}
        sized = [
            one._replace(size_factors=factors[log.model])
            for one, log in zip(samples, logs, strict=True)
        ]
        of_steps, hosts, clock = fit_steps(sized, graphs, fixed, near=found)
        found = {**host, **of_steps}
    found = {**{name: value * at[name] for name, value in found.items()}, **known}
    coefficients = {name: float(f"{found[name]:.5g}") for name in COEFFICIENTS}
    sizes = bounded(factors[model], coefficients)
    clock = clock and (round(float(clock[0]), 4), round(float(clock[1]), 4))
    return Prices(model, coefficients, sizes, graphs, clock)


def _hosts(logs: Sequence[LoadedLog]) -> tuple[dict[str, float], list[Floats]]:
    """As `fit_host`, of the logs that tell of their host; the others' scale is 0."""
    timed = [log.steps for log in logs if log.has_host]
    if not timed:
        return dict.fromkeys(_ENGINE_TIMES, 0.0), [np.zeros(len(log.steps)) for log in logs]
    host, found = fit_host(timed)
    scales = iter(found)
    return host, [next(scales) if log.has_host else np.zeros(len(log.steps)) for log in logs]


def _reference_scale(
    logs: Sequence[LoadedLog],
    scales: Sequence[Floats],
    model: str,
    own_hosts: Collection[str],
) -> float:
    """The mean scale of the host over the logs of `model`, without `own_hosts`.

    A short log shows one moment of a host: such logs count only if there are few long ones.
    """
    own = [
        scale
        for log, scale in zip(logs, scales, strict=True)
        if log.model == model and log.has_host and log.name not in own_hosts
    ]
    if not own:
        return 1.0
    long = [scale for scale in own if len(scale) >= _LONG_LOG_STEPS]
    told = long if len(long) >= _ENOUGH_LONG_LOGS else own
    weights = [min(len(scale), _REFERENCE_STEPS) for scale in told]
    return float(np.average([scale.mean() for scale in told], weights=weights))
