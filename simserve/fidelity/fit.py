"""From step logs to a profile: fit, held-out errors, scatter, domain and provenance."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.config.presets import gpu_names, load_gpu, load_model, model_names
from simserve.cost.profile_file import Engine, Graphs, LogFile, ProfileFile, RegimeError
from simserve.cost.regimes import REGIMES
from simserve.cost.step_model import COEFFICIENTS, Sheet, sheet
from simserve.errors import TraceError
from simserve.fidelity.fit_host import engine_seconds, fit_host
from simserve.fidelity.fit_step import Sample, fit_steps, predict
from simserve.fidelity.host_speed import host_scale, local_host_scale
from simserve.fidelity.observations import Observations, observe
from simserve.fidelity.vllm_log import StepLog

__all__ = ["VLLM_GRAPHS", "LoadedLog", "fit_profile", "load_log", "step_errors_of"]

Floats = NDArray[np.float64]

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
_QUANTILES = (np.arange(101) + 0.5) / 101
_FEWEST_FOR_QUANTILES = 100
_FEWEST_FOR_HOLDING = 500
_LONG_LOG_STEPS = 60
_ENOUGH_LONG_LOGS = 3
_REFERENCE_STEPS = 200
"""A longer log weighs as one of so many where logs of unlike length are averaged."""


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """A log, counted, with what its model and GPU are called here."""

    name: str
    sha256: str
    engine: str
    model: str
    gpu: str
    steps: Observations

    @property
    def sheet(self) -> Sheet:
        """Data-sheet times of the log's model."""
        model = load_model(self.model)
        return sheet(model, load_gpu(self.gpu), model.dtype)


def load_log(log: StepLog, *, model: str | None = None, gpu: str | None = None) -> LoadedLog:
    """Count a log's steps, those without tokens left out.

    `model` and `gpu` are names of presets, for a log that does not name them.

    Raises:
        TraceError: the log names no model or GPU that is known here.
    """
    steps = observe(log)
    return LoadedLog(
        name=log.name,
        sha256=hashlib.sha256(log.path.read_bytes()).hexdigest(),
        engine=log.engine,
        model=model or _preset(log, "model", log.model.lower(), model_names()),
        gpu=gpu or _preset(log, "gpu", log.gpu.lower(), gpu_names()),
        steps=steps.take(steps.num_tokens > 0),
    )


def _preset(log: StepLog, what: str, text: str, known: Sequence[str]) -> str:
    """The longest preset's name that is a word of a log's text."""
    for name in sorted(known, key=len, reverse=True):
        if name in text.split():
            return name
    raise TraceError(
        f"{log.path}: {what}: '{text}' names no preset; say which it is with --{what} "
        f"({', '.join(known)})"
    )


def fit_profile(
    fitted: Sequence[LoadedLog],
    held_out: Sequence[LoadedLog],
    *,
    name: str,
    model: str,
    attention_path: str = "not said",
    measured_on: str = "not said",
    graphs: Graphs = VLLM_GRAPHS,
    known: Mapping[str, float] | None = None,
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
        known: coefficients of a step that were measured by themselves, on a host of scale 1.

    Raises:
        TraceError: no log of `model` is there to fit on, logs are of several GPUs or engines, or a
            log is fitted and held out at once.
    """
    own = [log for log in fitted if log.model == model]
    _check(fitted, held_out, own, model)
    coefficients = _coefficients(fitted, graphs, model, known or {})
    unseen = [log for log in held_out if log.model == model]
    host_residuals, hold = _host_residuals(own, coefficients)
    engine, _, version = fitted[0].engine.rpartition("-")
    return ProfileFile(
        schema_version=1,
        name=name,
        model=model,
        measured_models=sorted({log.model for log in fitted}),
        gpu=fitted[0].gpu,
        engine=Engine(name=engine, timing_version=version, decision_version=version),
        attention_path=attention_path,
        measured_on=measured_on,
        host="adds",
        graphs=graphs,
        domain={feature: _range(own, feature) for feature in _DOMAIN},
        coefficients={key: float(f"{value:.5g}") for key, value in coefficients.items()},
        residuals=_residuals(own, coefficients, graphs),
        host_residuals=host_residuals,
        host_residual_steps=hold,
        errors=step_errors_of(unseen, coefficients, graphs),
        fitted=[_log_file(log, coefficients) for log in fitted],
        held_out=[_log_file(log, coefficients) for log in unseen],
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


def _coefficients(
    logs: Sequence[LoadedLog], graphs: Graphs, model: str, known: Mapping[str, float]
) -> dict[str, float]:
    """Coefficients for a host scale of 1 at the reference; `known` ones are given for that."""
    host, scales = fit_host([log.steps for log in logs])
    reference = _reference_scale(logs, scales, model)
    samples = [Sample(log.steps, log.sheet, scale) for log, scale in zip(logs, scales, strict=True)]
    at = {name: reference if spec.host else 1.0 for name, spec in COEFFICIENTS.items()}
    fixed = {name: value / at[name] for name, value in known.items()}
    found = {**host, **fit_steps(samples, graphs, fixed)}
    return {name: found[name] * factor for name, factor in at.items()}


def _reference_scale(logs: Sequence[LoadedLog], scales: Sequence[Floats], model: str) -> float:
    """The host's scale in the typical log of `model`.

    That is the median of its long logs. A short log shows one moment of a host: such logs count,
    by their steps, only if there are few others.
    """
    own = [scale for log, scale in zip(logs, scales, strict=True) if log.model == model]
    long = [scale.mean() for scale in own if len(scale) >= _LONG_LOG_STEPS]
    if len(long) >= _ENOUGH_LONG_LOGS:
        return float(np.median(long))
    weights = [min(len(scale), _REFERENCE_STEPS) for scale in own]
    return float(np.average([scale.mean() for scale in own], weights=weights))


def _scale_of(log: LoadedLog, coefficients: Mapping[str, float]) -> float:
    return host_scale(log.steps, engine_seconds(coefficients, log.steps))


def _range(logs: Sequence[LoadedLog], feature: str) -> tuple[float, float]:
    columns = [getattr(log.steps, feature) for log in logs]
    return float(min(c.min() for c in columns)), float(max(c.max() for c in columns))


def _by_regime(
    logs: Sequence[LoadedLog],
    coefficients: Mapping[str, float],
    graphs: Graphs,
    host_known: bool,
) -> dict[str, tuple[Floats, Floats]]:
    """Predicted and measured durations (s) of all steps, by regime, and of all as `all`."""
    regimes, predicted, measured = [], [], []
    for log in logs:
        scale = _scale_of(log, coefficients) if host_known else 1.0
        predicted.append(predict(coefficients, log.sheet, log.steps, graphs, scale))
        measured.append(log.steps.duration_s)
        regimes += log.steps.regimes
    if not regimes:
        return {}
    names, p, m = np.array(regimes), np.concatenate(predicted), np.concatenate(measured)
    masks = {"all": np.ones(len(names), dtype=bool)}
    masks |= {regime: names == regime for regime in REGIMES}
    return {regime: (p[mask], m[mask]) for regime, mask in masks.items() if mask.any()}


def step_errors_of(
    logs: Sequence[LoadedLog], coefficients: Mapping[str, float], graphs: Graphs = VLLM_GRAPHS
) -> dict[str, dict[str, RegimeError]]:
    """Errors on all steps of some logs, `blind` and `host_known`, by regime and for `all`."""
    return {
        known: {
            regime: RegimeError(
                num_steps=len(measured),
                mape=_round(np.mean(np.abs(predicted / measured - 1.0))),
                bias=_round(predicted.sum() / measured.sum() - 1.0),
            )
            for regime, (predicted, measured) in _by_regime(
                logs, coefficients, graphs, known == "host_known"
            ).items()
        }
        for known in ("blind", "host_known")
    }


def _residuals(
    logs: Sequence[LoadedLog], coefficients: Mapping[str, float], graphs: Graphs
) -> dict[str, list[float]]:
    """Quantiles of measured over predicted by regime, each step at its host's own speed."""
    ratios, regimes = [], []
    for log in logs:
        local = local_host_scale(log.steps, engine_seconds(coefficients, log.steps))
        predicted = predict(coefficients, log.sheet, log.steps, graphs, local)
        ratios.append(log.steps.duration_s / predicted)
        regimes += log.steps.regimes
    ratio, names = np.concatenate(ratios), np.array(regimes)
    return {
        regime: _quantiles(ratio[names == regime])
        for regime in REGIMES
        if (names == regime).sum() >= _FEWEST_FOR_QUANTILES
    }


def _host_residuals(
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


def _log_file(log: LoadedLog, coefficients: Mapping[str, float]) -> LogFile:
    return LogFile(
        name=log.name,
        sha256=log.sha256,
        num_steps=len(log.steps),
        host_scale=_round(_scale_of(log, coefficients)),
    )


def _round(value: Any) -> float:
    return round(float(value), 4)
