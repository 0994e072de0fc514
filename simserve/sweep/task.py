"""One point of a sweep as a parcel for another process, and how that can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from pydantic import JsonValue

from simserve.config.sweep_loader import Point

__all__ = ["Failure", "Task"]


class Failure(NamedTuple):
    """Why a point has no run directory."""

    error: str
    """Class of the error; `Timeout` or `Died`, if the process ended without one."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A run to make. Plain data that goes through JSON, and so to any node."""

    name: str
    settings: Mapping[str, JsonValue]
    """What the point changes: written into its run directory."""
    values: Mapping[str, JsonValue]
    """Swept keys and their values: they stand in its summary."""
    config: Mapping[str, Any]
    """What was given of the configuration: what does not go together may be left at its default."""
    base_dir: str
    """What paths in it are relative to."""

    @classmethod
    def of(cls, point: Point) -> Self:
        """The task of a point whose values go together."""
        assert point.loaded is not None
        scenario = {} if point.scenario is None else {"scenario": point.scenario}
        return cls(
            name=point.name,
            settings=point.settings,
            values={**scenario, **point.values},
            config=point.loaded.config.model_dump(mode="json", exclude_unset=True),
            base_dir=str(point.loaded.base_dir),
        )
