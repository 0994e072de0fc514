"""Opens what `--profile` names: a preset's name or a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simserve.config.presets import load_gpu, load_model, model_names
from simserve.cost.noise import ResidualNoise
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import ProfileFile, load_profile
from simserve.fidelity.logs.vllm_log import StepLog, preset_in
from simserve.fidelity.validate.workload import Timing

__all__ = ["profile_timing"]


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
        remarks=tuple(_differences(file, logs[0], named)),
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


def _differences(file: ProfileFile, log: StepLog, model: str | None) -> Iterator[str]:
    """Where the log's engine, GPU or model is not the one whose step times these are."""
    if log.config.not_read:
        settings = ", ".join(f"{key} = {value!r}" for key, value in log.config.not_read.items())
        yield f"{log.name}: settings that are not read: {settings}"
    if model is None and log.model:
        yield (
            f"profile '{file.name}': the log's model, '{log.model}', is no preset; it is priced as "
            f"{file.model}"
        )
    elif model != file.model and model in file.measured_models:
        yield (
            f"profile '{file.name}': is that of {file.model}, the log is of {model}: the host's "
            "speed and the factors of graph sizes are not this model's"
        )
    timed = f"{file.engine.name}-{file.engine.timing_version}"
    if log.engine and log.engine != timed:
        yield f"profile '{file.name}': step times are those of {timed}, the log is of {log.engine}"
    if log.gpu and preset_in(log.gpu, [file.gpu]) is None:
        yield f"profile '{file.name}': measured on gpu '{file.gpu}', the log is of '{log.gpu}'"


def _is_path(profile: str) -> bool:
    return profile.endswith(".json") or Path(profile).is_file()
