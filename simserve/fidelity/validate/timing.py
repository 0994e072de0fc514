"""Opens what `--profile` names: a preset's name or a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from simserve.config.presets import load_gpu, load_model, model_names
from simserve.cost.noise import ResidualNoise
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import ProfileFile, load_profile
from simserve.fidelity.logs.vllm_log import StepLog, preset_in
from simserve.fidelity.validate.workload import Timing

__all__ = ["profile_timing"]

_LARGEST_GRAPH = 512
"""Tokens of the largest graph that vLLM captures unless it is told otherwise."""


def profile_timing(profile: str, *logs: StepLog) -> Timing:
    """Step times of a profile for the model of some logs.

    Args:
        profile: name of a profile that comes with the package, or the path of a file.
        logs: repeats; their `model` holds the name of a model preset; if not, it is the profile's.

    Raises:
        UnknownNameError, ConfigError: there is no such profile, or it is broken or of another
            model or GPU.
    """
    where: dict[str, Any] = {"path": profile} if _is_path(profile) else {"name": profile}
    file = load_profile(**where)
    named = preset_in(logs[0].model, model_names())
    model = load_model(named or file.model)
    gpu = load_gpu(file.gpu)

    def cost(host_scale: float) -> ProfileCost:
        return ProfileCost(model, gpu, host_scale=host_scale, **where)

    def scattered(host_scale: float) -> ResidualNoise:
        return ResidualNoise(cost(host_scale), seed=0)

    return Timing(
        name=file.name,
        cost=cost,
        scattered=scattered if file.residuals else None,
        repeat_spread=file.repeat_spread,
        fitted_on=tuple(log.name for log in logs if _is_fitted(file, log)),
        remarks=(*_not_read(logs), *_differences(file, logs[0], named)),
    )


def _is_fitted(file: ProfileFile, log: StepLog) -> bool:
    """Whether a profile was fitted on a log: one of the same name, or the same file."""
    if log.name in [one.name for one in file.fitted]:
        return True
    try:
        content = log.path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest() in [one.sha256 for one in file.fitted]


def _not_read(logs: Sequence[StepLog]) -> Iterator[str]:
    for log in logs:
        if log.config.not_read:
            settings = ", ".join(f"{key} = {value!r}" for key, value in log.config.not_read.items())
            yield f"{log.name}: settings that are not read: {settings}"


def _differences(file: ProfileFile, log: StepLog, model: str | None) -> Iterator[str]:
    """Where the log's engine, GPU or model is not the one whose step times these are."""
    if model is None:
        said = (
            f"the log's model, '{log.model}', is no preset"
            if log.model
            else "the log says no model"
        )
        yield f"profile '{file.name}': {said}; it is priced as {file.model}"
    elif model != file.model and model in file.measured_models:
        yield (
            f"profile '{file.name}': is that of {file.model}, the log is of {model}: the host's "
            "speed and the factors of graph sizes are not this model's"
        )
    timed = f"{file.engine.name}-{file.engine.timing_version}"
    if log.engine and log.engine != timed:
        yield f"profile '{file.name}': step times are those of {timed}, the log is of {log.engine}"
    yield from _other_graphs(file, log)
    if preset_in(log.gpu, [file.gpu]) is None:
        other = f"the log is of '{log.gpu}'" if log.gpu else "the log says none"
        yield f"profile '{file.name}': measured on gpu '{file.gpu}', {other}"


def _other_graphs(file: ProfileFile, log: StepLog) -> Iterator[str]:
    """That the log's engine captured other graphs, if it was started with the settings it had.

    By default vLLM captures graphs of up to twice `max_num_seqs` tokens (512, and a step's tokens,
    at most), and full ones for decodes of up to `max_num_seqs`.
    """
    config, has = log.config, (file.graphs.sizes[-1], file.graphs.full_up_to)
    most = min(2 * config.max_num_seqs, config.max_num_batched_tokens, _LARGEST_GRAPH)
    would = most, min(config.max_num_seqs, most)
    if file.engine.name == "vllm" and would != has:
        yield (
            f"profile '{file.name}': its CUDA graphs go up to {has[0]} tokens ({has[1]} decodes); "
            f"an engine started with the log's max_num_seqs = {config.max_num_seqs} and budget = "
            f"{config.max_num_batched_tokens} has them up to {would[0]} ({would[1]})"
        )


def _is_path(profile: str) -> bool:
    return profile.endswith(".json") or Path(profile).is_file()
