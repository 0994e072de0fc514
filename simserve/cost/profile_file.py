"""The file format of a cost profile: measured coefficients, on what, how well they fit."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from simserve.cost.coefficients import COEFFICIENTS, OF_PLANS
from simserve.cost.dealing import AttentionPlan
from simserve.cost.features import UNITS
from simserve.cost.regimes import REGIMES
from simserve.cost.step_work import SizeFactors
from simserve.errors import ConfigError, Problem, UnknownNameError, did_you_mean

__all__ = [
    "LARGEST_SIZE_FACTOR",
    "Clock",
    "Engine",
    "Graphs",
    "LogFile",
    "ProfileFile",
    "RegimeError",
    "least_size_factor",
    "load_profile",
    "profile_names",
]

Finite = Annotated[float, Field(allow_inf_nan=False, strict=False)]
Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]


LARGEST_SIZE_FACTOR = 2.0


def least_size_factor(coefficients: Mapping[str, float]) -> float:
    """The factor at which matrix products would be as fast as the data sheet says."""
    return max(coefficients["linear_bandwidth"], coefficients["linear_flops"])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Engine(_Strict):
    """What was measured, and whose decisions it followed."""

    name: str
    timing_version: str
    """Version of the engine whose step times these are."""
    decision_version: str
    """Version whose scheduling rules formed the measured steps."""


class Graphs(_Strict):
    """CUDA graphs: sizes captured, and up to which size decodes alone run as one graph."""

    sizes: Annotated[list[int], Field(min_length=1)]
    full_up_to: int
    piecewise: bool = True
    """Whether steps with prefills run as graphs between attention calls, up to the largest size;
    else kernel by kernel, without padding."""
    prefill_sizes: list[int] | None = None
    """Sizes of steps with prefills, if they are not those of decodes."""

    @model_validator(mode="after")
    def _check(self) -> Graphs:
        for sizes in (self.sizes, self.prefill_sizes or [1]):
            if sizes != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError("sizes must be positive and increase")
        return self

    @property
    def of_prefills(self) -> list[int]:
        """Sizes that steps with prefills are padded to; none: these run kernel by kernel."""
        return (self.prefill_sizes or self.sizes) if self.piecewise else []


class Clock(_Strict):
    """How kernels slow down while the GPU's clock is low: how much longer they take if the latest
    steps used all of its FLOP/s, beyond what they take after rest."""

    prefills: Annotated[float, Field(ge=0.0, le=1.0, strict=False)]
    """Of steps with prefills."""
    decodes: Annotated[float, Field(ge=0.0, le=1.0, strict=False)]


class LogFile(_Strict):
    """A file of measured steps."""

    name: str
    sha256: str
    num_steps: int
    host_scale: Ratio
    """How much longer schedule() and update() took there than this profile says."""


class RegimeError(_Strict):
    """How far predicted step times are from measured ones."""

    num_steps: int
    mape: float
    """Mean of |predicted - measured| / measured."""
    bias: float
    """Sum of predicted over sum of measured times, minus 1."""


class ProfileFile(_Strict):
    """A profile as it stands in its JSON file."""

    schema_version: Literal[1]
    name: str
    model: str
    """The model at whose host speed `host_scale` is 1."""
    measured_models: Annotated[list[str], Field(min_length=1)]
    """All models whose steps were fitted; others are priced by their shape, and flagged."""
    gpu: str
    engine: Engine
    attention_path: str
    """Attention kernel and graph mode that was measured."""
    measured_on: str
    """Machine, software and date."""
    host: Literal["adds", "overlaps"]
    """Whether host time came on top of GPU time, or ran beside it (asynchronous scheduling)."""
    graphs: Graphs
    attention_plan: AttentionPlan | None = None
    """How kernels deal attention out to the GPU; None: not known."""
    out_of_domain: Literal["extrapolate", "error"] = "extrapolate"
    domain: dict[str, tuple[Finite, Finite]]
    """Smallest and largest measured value of counts of a step."""
    coefficients: dict[str, Finite]
    size_factors: dict[int, Ratio] = {}
    """By size of a graph: how long its matrix products take, over what their work says. Libraries
    choose kernels by size. Of `model` alone."""
    decode_size_factors: dict[int, Ratio] | None = None
    """The same of graphs of decodes alone; None: those of all others."""
    clock: Clock | None = None
    """None: not measured, prices are of the mean clock."""
    residuals: dict[str, Annotated[list[Ratio], Field(min_length=2)]] = {}
    """By regime: quantiles of measured over predicted step time, evenly spaced, of mean 1. Each
    step is taken at its host's speed at that time."""
    host_residuals: Annotated[list[Ratio], Field(min_length=2)] = [1.0, 1.0]
    """Quantiles of the host's speed about a log's mean, evenly spaced, of mean 1."""
    host_residual_steps: Annotated[int, Field(ge=1)] = 1
    """For so many steps the host keeps a speed."""
    repeat_spread: dict[str, dict[str, Finite]] = {}
    """Half range over mean of what repeats on the real engine gave, `below` saturation and
    `near_saturation`, by names such as `ttft_p50`."""
    errors: dict[str, dict[str, RegimeError]] = {}
    """By what was known (`blind`, `host_known`) of files that were not fitted, by regime."""
    fitted: list[LogFile] = []
    held_out: list[LogFile] = []

    @model_validator(mode="before")
    @classmethod
    def _without_plan(cls, data: Any) -> Any:
        """Where nothing is dealt out, a file need not have the coefficients of that: they are 0."""
        if isinstance(data, dict) and data.get("attention_plan") is None:
            given = data.get("coefficients")
            if isinstance(given, dict):
                return {**data, "coefficients": {**dict.fromkeys(OF_PLANS, 0.0), **given}}
        return data

    @model_validator(mode="after")
    def _check(self) -> ProfileFile:
        _check_names("coefficient", self.coefficients, COEFFICIENTS)
        _check_names("count", self.domain, UNITS)
        _check_names("regime", self.residuals, REGIMES)
        if missing := [name for name in COEFFICIENTS if name not in self.coefficients]:
            raise ValueError(f"coefficients lack {', '.join(missing)}")
        for name, value in self.coefficients.items():
            low, high = COEFFICIENTS[name].low, COEFFICIENTS[name].high
            if not low <= value <= high:
                raise ValueError(f"coefficient '{name}' is {value:g}, not from {low:g} to {high:g}")
            if name in OF_PLANS and value and self.attention_plan is None:
                raise ValueError(f"coefficient '{name}' is of an attention_plan, and there is none")
        least = least_size_factor(self.coefficients)
        for size, factor in (*self.size_factors.items(), *self.factors.decodes.items()):
            if size not in (*self.graphs.sizes, *self.graphs.of_prefills):
                raise ValueError(f"size factor of {size} tokens: no graph is of this size")
            if not least <= factor <= LARGEST_SIZE_FACTOR:
                raise ValueError(
                    f"size factor of {size} tokens is {factor:g}, not from {least:g} (where "
                    f"products reach the data sheet) to {LARGEST_SIZE_FACTOR:g}"
                )
        for name, (low, high) in self.domain.items():
            if low > high:
                raise ValueError(f"domain of '{name}' is empty: {low:g} to {high:g}")
        if twice := {one.sha256 for one in self.fitted} & {one.sha256 for one in self.held_out}:
            raise ValueError(f"a file is both fitted and held out: sha256 {twice.pop()}")
        return self

    @property
    def factors(self) -> SizeFactors:
        """Those of both kinds of graphs."""
        apart = self.decode_size_factors
        return SizeFactors(self.size_factors, self.size_factors if apart is None else apart)


def _check_names(kind: str, given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(
                f"{kind} '{name}' is not known{did_you_mean(name, known)}; "
                f"there are {', '.join(known)}"
            )


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = files("simserve.presets").joinpath("profiles")
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry.name.removesuffix(".json") for entry in found)


def load_profile(
    name: str | None = None, path: str | Path | None = None, base_dir: Path | None = None
) -> ProfileFile:
    """Read a profile by name (it comes with the package) or by path (relative to `base_dir`).

    Raises:
        UnknownNameError: no profile has this name.
        ConfigError: the file cannot be read or breaks the format; each problem names its field.
    """
    if (name is None) == (path is None):
        raise ConfigError("profile cost: give either name or path")
    if path is not None:
        return _parse(str(path), _read(Path(base_dir or "") / path))
    if name not in profile_names():
        known = profile_names()
        raise UnknownNameError(
            f"no profile is called '{name}'{did_you_mean(str(name), known)}; there are "
            f"{', '.join(known) or 'none'}: give the path of your own with 'path'"
        )
    file = files("simserve.presets").joinpath("profiles", f"{name}.json")
    return _parse(f"{name}.json", file.read_text(encoding="utf-8"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read this profile: {error}") from error


def _parse(file: str, text: str) -> ProfileFile:
    try:
        return ProfileFile.model_validate(json.loads(text), strict=False)
    except json.JSONDecodeError as error:
        problem = Problem(path="", message=f"not JSON: {error.msg}", file=file, line=error.lineno)
        raise ConfigError([problem]) from error
    except RecursionError as error:
        raise ConfigError([Problem(path="", message="nested too deeply", file=file)]) from error
    except ValidationError as error:
        problems = [_problem(file, detail) for detail in error.errors()]
        raise ConfigError(problems) from error


def _problem(file: str, detail: ErrorDetails) -> Problem:
    path = ".".join(str(key) for key in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        known = [
            *ProfileFile.model_fields,
            *Engine.model_fields,
            *Graphs.model_fields,
            *AttentionPlan.model_fields,
            *LogFile.model_fields,
        ]
        message = f"this field is not known{did_you_mean(str(detail['loc'][-1]), known)}"
    return Problem(path=path, message=message, file=file)
