"""Configuration of a sweep: which keys vary, and how their values combine into points."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from simserve.config.base import Positive, StrictModel
from simserve.config.model import RunConfig

__all__ = ["Grid", "OneAtATime", "Scenarios", "Sweep", "SweepConfig", "SweepSection", "Zip"]


def _distinct(values: tuple[JsonValue, ...]) -> tuple[JsonValue, ...]:
    known: set[str] = set()
    for value in values:
        text = json.dumps(value)
        if text in known:
            raise ValueError(f"{value} stands in the list twice")
        known.add(text)
    return values


Values = Annotated[tuple[JsonValue, ...], Field(strict=False, min_length=1)]
Distinct = Annotated[Values, AfterValidator(_distinct)]


class _Sweep(StrictModel):
    timeout_s: Positive | None = 3600.0
    """Time that a point may take (seconds); then it counts as failed. null: any."""


class Grid(_Sweep):
    """Every combination of the values; those of the last parameter change fastest."""

    type: Literal["grid"]
    parameters: Annotated[dict[str, Distinct], Field(min_length=1)]
    """Lists of values by dotted key, such as scheduler.max_num_seqs."""


class Zip(_Sweep):
    """The first values of all parameters, then the second ones, and so on."""

    type: Literal["zip"]
    parameters: Annotated[dict[str, Values], Field(min_length=1)]
    """Lists of values by dotted key, all of one length."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        lengths = {key: len(values) for key, values in self.parameters.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            raise ValueError(f"lists to be zipped are of one length, but {listed}")
        return self


class OneAtATime(_Sweep):
    """The configuration as it stands, then each value of each parameter by itself."""

    type: Literal["one_at_a_time"]
    parameters: Annotated[dict[str, Distinct], Field(min_length=1)]
    """Lists of values by dotted key."""


class Scenarios(_Sweep):
    """Named sets of values; with parameters, each in every combination of these."""

    type: Literal["scenarios"]
    scenarios: Annotated[dict[str, dict[str, JsonValue]], Field(min_length=1)]
    """For each name, values by dotted key. {}: the configuration as it stands."""
    parameters: dict[str, Distinct] = {}
    """Lists of values by dotted key."""


Sweep = Annotated[Grid | Zip | OneAtATime | Scenarios, Field(discriminator="type")]


class SweepSection(StrictModel):
    """What a sweep adds to a configuration."""

    sweep: Sweep
    """Runs of this configuration with other values."""


class SweepConfig(RunConfig):
    """A configuration file: of one run, or with `sweep` of several."""

    sweep: Sweep | None = None
    """Runs of this configuration with other values, by `simserve sweep`."""
