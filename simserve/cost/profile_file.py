"""The file format of a cost profile: what it was measured on, and seconds per unit of a feature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from simserve.cost.features import UNITS
from simserve.errors import ConfigError, Problem, UnknownNameError, did_you_mean

__all__ = ["Engine", "ProfileFile", "Term", "load_profile", "profile_names"]

Finite = Annotated[float, Field(allow_inf_nan=False, strict=False)]
Point = tuple[Finite, Annotated[Finite, Field(ge=0)]]
STEP = "step"
"""The feature that is 1 in every step, in steps: its coefficient is the fixed cost."""
PROFILE_UNITS = {STEP: "steps", **UNITS}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Engine(_Strict):
    """What was measured, and whose decisions it followed."""

    name: str
    timing_version: str
    """Version of the engine whose step times these are."""
    decision_version: str
    """Version whose scheduling rules formed the measured steps."""


class Term(_Strict):
    """One addend: a slope, from a hinge on if given, or a table of points (unit, seconds)."""

    feature: str
    unit: str
    part: str = "gpu_s"
    seconds_per_unit: Finite | None = None
    above: Annotated[Finite, Field(ge=0)] = 0.0
    """The hinge: only what exceeds it counts."""
    points: Annotated[list[Point], Field(min_length=2)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Term:
        if self.feature not in PROFILE_UNITS:
            raise ValueError(
                f"feature '{self.feature}' is not known{did_you_mean(self.feature, PROFILE_UNITS)};"
                f" there are {', '.join(PROFILE_UNITS)}"
            )
        unit = PROFILE_UNITS[self.feature]
        if self.unit != unit:
            raise ValueError(f"feature '{self.feature}' is in {unit}, not in '{self.unit}'")
        if (self.seconds_per_unit is None) == (self.points is None):
            raise ValueError("give either seconds_per_unit or points")
        if self.points is not None and self.above:
            raise ValueError("points and above exclude each other")
        xs = [x for x, _ in self.points or ()]
        if any(left >= right for left, right in pairwise(xs)):
            raise ValueError("the points' first numbers must increase")
        return self


class ProfileFile(_Strict):
    """A profile as it stands in its JSON file."""

    schema_version: Literal[1]
    name: str
    model: str
    gpu: str
    engine: Engine
    attention_path: str
    """Attention kernel and graph mode that was measured."""
    measured_on: str
    """Machine, software and date."""
    out_of_domain: Literal["extrapolate", "error"] = "extrapolate"
    domain: dict[str, tuple[Finite, Finite]]
    """Smallest and largest measured value of every feature that a term uses."""
    terms: Annotated[list[Term], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> ProfileFile:
        used = {term.feature: None for term in self.terms if term.feature != STEP}
        for feature in used:
            if feature not in self.domain:
                raise ValueError(f"domain lacks feature '{feature}', which a term uses")
        for feature, (low, high) in self.domain.items():
            if feature not in used:
                raise ValueError(f"domain names '{feature}', which no term uses")
            if low > high:
                raise ValueError(f"domain of '{feature}' is empty: {low} to {high}")
        for feature in used:
            _check_monotone(feature, [term for term in self.terms if term.feature == feature])
        return self


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
        known = [*ProfileFile.model_fields, *Term.model_fields, *Engine.model_fields]
        message = f"this field is not known{did_you_mean(str(detail['loc'][-1]), known)}"
    return Problem(path=path, message=message, file=file)


def _check_monotone(feature: str, terms: Sequence[Term]) -> None:
    """Raise ValueError if the summed slope of a feature is negative anywhere."""
    changes: list[tuple[float, float]] = []
    for term in terms:
        if term.points is None:
            changes.append((term.above, term.seconds_per_unit or 0.0))
            continue
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(term.points)]
        knots = [0.0, *(x for x, _ in term.points[1:-1])]
        changes += zip(knots, (b - a for a, b in pairwise([0.0, *slopes])), strict=True)
    tolerance = 1e-12 * max(abs(change) for _, change in changes)
    slope = 0.0
    for knot in sorted({knot for knot, _ in changes}):
        slope += sum(change for at, change in changes if at == knot)
        if slope < -tolerance:
            raise ValueError(
                f"feature '{feature}' is not monotone: more of it costs less beyond {knot:g}"
            )
