"""From measured steps to a profile: prices, held-out errors, scatter, domain and provenance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from simserve.cost.coefficients import COEFFICIENTS
from simserve.cost.dealing import AttentionPlan
from simserve.cost.profile_file import Clock, Engine, Graphs, LogFile, ProfileFile
from simserve.cost.step_work import SizeFactors
from simserve.errors import TraceError
from simserve.fidelity.fit.coefficients import fit_prices
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.fit.residuals import (
    host_residuals,
    host_scale_of,
    step_errors_of,
    step_residuals,
)
from simserve.fidelity.logs.loaded_log import LoadedLog

__all__ = ["VLLM_GRAPHS", "fit_profile"]

VLLM_GRAPHS = Graphs(sizes=[1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)], full_up_to=256)
"""The sizes that vLLM captures by default, for a `max_num_seqs` of 256."""

_DOMAIN = (
    "num_tokens",
    "num_reqs",
    "decode_kv_tokens",
    "num_prefills",
    "prefill_pairs",
    "prefill_kv_tokens",
)
_DOMAIN_OF_PLANS = (*_DOMAIN, "shared_kv_tokens")


def fit_profile(
    fitted: Sequence[LoadedLog],
    held_out: Sequence[LoadedLog],
    *,
    name: str,
    model: str,
    attention_path: str = "not said",
    measured_on: str = "not said",
    graphs: Graphs = VLLM_GRAPHS,
    attention_plan: AttentionPlan | None = None,
    known: Mapping[str, float] | None = None,
    own_hosts: Collection[str] = (),
) -> ProfileFile:
    """Fit the coefficients on some logs, and see on others how good they are.

    Args:
        fitted: logs to fit on; those of other models than `model` help with what models share.
        held_out: logs to see errors on; of these only `model`'s count.
        name: of the profile.
        model: whose steps it is for: its logs define host speed, domain, scatter and errors.
        attention_path: attention kernels and graph modes, in words.
        measured_on: machine, software and date, in words.
        graphs: what the engine captured.
        attention_plan: by which the steps' attention was dealt out, if that is known.
        known: coefficients that were measured by themselves, on a host of scale 1.
        own_hosts: names of logs whose host had a speed of its own, which their schedule() and
            update() times do not tell. It is fitted, and they define no host speed and no scatter.

    Raises:
        TraceError: no log of `model` is there, logs are of several GPUs or engines, or one is
            fitted and held out at once, has no schedule() and update() times, or other units.
    """
    own = [log for log in fitted if log.model == model]
    _check(fitted, held_out, own, model)
    prices = _checked(fit_prices(fitted, graphs, model, known or {}, own_hosts))
    told = [log for log in own if log.has_host and log.name not in own_hosts]
    unseen = [log for log in held_out if log.model == model]
    return ProfileFile(
        schema_version=1,
        name=name,
        model=model,
        measured_models=sorted({log.model for log in fitted}),
        gpu=fitted[0].gpu,
        engine=_engine(fitted[0]),
        attention_path=attention_path,
        measured_on=measured_on,
        host="adds",
        graphs=graphs,
        attention_plan=attention_plan,
        domain={n: _range(own, n) for n in (_DOMAIN_OF_PLANS if attention_plan else _DOMAIN)},
        coefficients=dict(prices.coefficients),
        size_factors=dict(prices.size_factors.prefills),
        decode_size_factors=_decodes_apart(prices.size_factors),
        clock=prices.clock and Clock(prefills=prices.clock[0], decodes=prices.clock[1]),
        residuals=step_residuals(told, prices),
        **_host_scatter(told, prices),
        errors=step_errors_of(unseen, prices),
        fitted=[_log_file(log, prices.coefficients) for log in fitted],
        held_out=[_log_file(log, prices.coefficients) for log in unseen],
    )


def _check(
    fitted: Sequence[LoadedLog], held_out: Sequence[LoadedLog], own: Sequence[LoadedLog], model: str
) -> None:
    if not own:
        raise TraceError(f"there is no log of model '{model}' to fit on")
    for what in ("gpu", "engine"):
        if len(found := sorted({getattr(log, what) for log in fitted})) > 1:
            raise TraceError(f"a profile is of one {what}, the logs are of {', '.join(found)}")
    held = {log.sha256: log.name for log in held_out}
    if both := [log.name for log in fitted if log.sha256 in held]:
        raise TraceError(f"fitted and held out at once: {', '.join(both)}")
    for log in fitted:
        if log.has_host and log.kernels_s is None and not log.steps.engine_s.any():
            raise TraceError(
                f"{log.name}: all its schedule() and update() times are 0, so nothing tells the "
                "host's part of its steps from the GPU's"
            )


def _checked(prices: Prices) -> Prices:
    for name, value in prices.coefficients.items():
        known = COEFFICIENTS[name]
        if not known.low <= value <= known.high:
            raise TraceError(
                f"the steps give {name} = {value:g} {known.unit}, which is not from {known.low:g} "
                f"to {known.high:g}: are their times in other units?"
            )
    return prices


def _engine(log: LoadedLog) -> Engine:
    name, _, version = log.engine.rpartition("-")
    return Engine(name=name, timing_version=version, decision_version=version)


def _host_scatter(logs: Sequence[LoadedLog], prices: Prices) -> dict[str, Any]:
    residuals, hold = host_residuals(logs, prices.coefficients)
    return {"host_residuals": residuals, "host_residual_steps": hold}


def _decodes_apart(factors: SizeFactors) -> dict[int, float] | None:
    """Factors of decodes' graphs; None: they are those of the others."""
    return None if factors.decodes is factors.prefills else dict(factors.decodes)


def _range(logs: Sequence[LoadedLog], feature: str) -> tuple[float, float]:
    columns = [getattr(log.steps, feature) for log in logs]
    return float(min(c.min() for c in columns)), float(max(c.max() for c in columns))


def _log_file(log: LoadedLog, coefficients: Mapping[str, float]) -> LogFile:
    return LogFile(
        name=log.name,
        sha256=log.sha256,
        num_steps=len(log.steps),
        host_scale=round(host_scale_of(log, coefficients), 4),
    )
