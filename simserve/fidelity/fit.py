"""From step logs to a profile: fit, held-out errors, scatter, domain and provenance."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.config.presets import gpu_names, load_gpu, load_model, model_names
from simserve.cost.profile_file import Clock, Engine, Graphs, LogFile, ProfileFile, RegimeError
from simserve.cost.regimes import REGIMES
from simserve.cost.step_model import COEFFICIENTS, Sheet, sheet
from simserve.errors import TraceError
from simserve.fidelity.fit_host import engine_seconds, fit_host
from simserve.fidelity.fit_sizes import bounded_factors, fit_size_factors
from simserve.fidelity.fit_step import FITTED_HERE, Sample, fit_steps, predict, slowed
from simserve.fidelity.host_speed import host_scale, local_host_scale
from simserve.fidelity.observations import Observations, observe
from simserve.fidelity.vllm_log import StepLog, preset_in

__all__ = ["VLLM_GRAPHS", "LoadedLog", "Prices", "fit_profile", "load_log", "step_errors_of"]

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
_HOST_TIMES = ("inputs_step_s", "inputs_request_s", "launch_step_s", "launch_eager_layer_s")
_ENGINE_TIMES = tuple(name for name in COEFFICIENTS if name not in FITTED_HERE)
_ONE_LAUNCH = "vllm-"
"""Engines whose attention takes decodes and prefills in one launch: `context_apart` is 0."""
_QUANTILES = (np.arange(101) + 0.5) / 101
_FEWEST_FOR_QUANTILES = 100
_FEWEST_FOR_HOLDING = 500
_LONG_LOG_STEPS = 60
_ENOUGH_LONG_LOGS = 3
_SIZE_ROUNDS = 2
"""Coefficients and size factors are fitted in turn so often: more rounds change neither."""
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
    has_host: bool = field(default=True, kw_only=True)
    """Whether the host's time is in its steps; if not, they tell nothing of it."""
    kernels_s: Floats | None = field(default=None, kw_only=True)
    """What each step took beside schedule(), update() and inputs, if that was timed by itself."""
    heat: Floats | None = field(default=None, kw_only=True)
    """The share of the GPU's FLOP/s that the latest steps had used; None: not known."""

    @property
    def sheet(self) -> Sheet:
        """Data-sheet times of the log's model."""
        model = load_model(self.model)
        return sheet(model, load_gpu(self.gpu), model.dtype)


@dataclass(frozen=True, slots=True)
class Prices:
    """What steps cost, as a profile has it."""

    model: str
    """Whose `size_factors` these are."""
    coefficients: Mapping[str, float]
    size_factors: Mapping[int, float]
    graphs: Graphs
    clock: tuple[float, float] | None = None
    """What heat adds to the kernels of steps with prefills, and of others."""

    @classmethod
    def of(cls, profile: ProfileFile) -> Prices:
        """Those of a profile."""
        clock = (profile.clock.prefills, profile.clock.decodes) if profile.clock else None
        return cls(profile.model, profile.coefficients, profile.size_factors, profile.graphs, clock)

    def predict(self, log: LoadedLog, host_scale: float | Floats) -> Floats:
        """Durations of a log's steps (s) on a host of one speed, or of one a step."""
        factors = self.size_factors if log.model == self.model else {}
        slower = slowed(self.clock, log.heat, log.steps)
        return predict(
            self.coefficients, log.sheet, log.steps, self.graphs, host_scale, factors, slower
        )


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
        model=model or _preset(log, "model", log.model, model_names()),
        gpu=gpu or _preset(log, "gpu", log.gpu, gpu_names()),
        steps=steps.take(steps.num_tokens > 0),
    )


def _preset(log: StepLog, what: str, text: str, known: Sequence[str]) -> str:
    name = preset_in(text, known)
    if name is not None:
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
        known: coefficients that were measured by themselves, on a host of scale 1.
        own_hosts: names of logs whose host had a speed of its own, which their schedule() and
            update() times do not tell. It is fitted, and they define no host speed and no scatter.

    Raises:
        TraceError: no log of `model` is there to fit on, logs are of several GPUs or engines, or a
            log is fitted and held out at once.
    """
    own = [log for log in fitted if log.model == model]
    _check(fitted, held_out, own, model)
    prices = _fit(fitted, graphs, model, known or {}, own_hosts)
    told = [log for log in own if log.has_host and log.name not in own_hosts]
    unseen = [log for log in held_out if log.model == model]
    host_residuals, hold = _host_residuals(told, prices.coefficients)
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
        coefficients=dict(prices.coefficients),
        size_factors=dict(prices.size_factors),
        clock=prices.clock and Clock(prefills=prices.clock[0], decodes=prices.clock[1]),
        residuals=_residuals(told, prices),
        host_residuals=host_residuals,
        host_residual_steps=hold,
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


def _fit(
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
    if logs[0].engine.startswith(_ONE_LAUNCH):
        known = {**known, "context_apart": 0.0}
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
    factors: dict[str, dict[int, float]] = {}
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
    sizes = bounded_factors(factors[model], coefficients)
    clock = clock and (_round(clock[0]), _round(clock[1]))
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


def _scale_of(log: LoadedLog, coefficients: Mapping[str, float]) -> float:
    return host_scale(log.steps, engine_seconds(coefficients, log.steps))


def _range(logs: Sequence[LoadedLog], feature: str) -> tuple[float, float]:
    columns = [getattr(log.steps, feature) for log in logs]
    return float(min(c.min() for c in columns)), float(max(c.max() for c in columns))


def _by_regime(
    logs: Sequence[LoadedLog], prices: Prices, host_known: bool
) -> dict[str, tuple[Floats, Floats]]:
    """Predicted and measured durations (s) of all steps, by regime, and of all as `all`."""
    regimes, predicted, measured = [], [], []
    for log in logs:
        scale = _scale_of(log, prices.coefficients) if host_known else 1.0
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


def _residuals(logs: Sequence[LoadedLog], prices: Prices) -> dict[str, list[float]]:
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
