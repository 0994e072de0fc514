"""Opens what `--profile` names: a preset's name or a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simserve.config.presets import load_gpu, load_model, model_names
from simserve.cost.noise import ResidualNoise
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import ProfileFile, load_profile
from simserve.fidelity.validate import Timing
from simserve.fidelity.vllm_log import StepLog

__all__ = ["profile_timing"]


def profile_timing(profile: str, log: StepLog) -> Timing:
    """Step times of a profile for the model of a log.

    Args:
        profile: name of a profile that comes with the package, or the path of a file.
        log: its `model` begins with the name of a model preset; if not, it is the profile's model.

    Raises:
        UnknownNameError, ConfigError: there is no such profile, or it is broken or of another
            model or GPU.
    """
    where: dict[str, Any] = {"path": profile} if _is_path(profile) else {"name": profile}
    file = load_profile(**where)
    name = log.model.partition(" ")[0]
    model = load_model(name if name in model_names() else file.model)
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
        fitted_on=tuple(log.name for log in file.fitted),
        remarks=tuple(_differences(file, log)),
    )


def _differences(file: ProfileFile, log: StepLog) -> Iterator[str]:
    """Where the log's engine or GPU is not the one whose step times these are."""
    timed = f"{file.engine.name}-{file.engine.timing_version}"
    if log.engine and log.engine != timed:
        yield f"profile '{file.name}': step times are those of {timed}, the log is of {log.engine}"
    if log.gpu and file.gpu not in log.gpu.lower().split():
        yield f"profile '{file.name}': measured on gpu '{file.gpu}', the log is of '{log.gpu}'"


def _is_path(profile: str) -> bool:
    return profile.endswith(".json") or Path(profile).is_file()
