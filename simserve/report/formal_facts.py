"""What a formal report is made of: facts with their values, or with what is missing about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.errors import RunDirectoryError
from simserve.metrics.arrow import column
from simserve.metrics.rundir import RunParts

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Fact", "Lookup", "Section", "figure", "missing"]


class Fact(NamedTuple):
    """A line of the report."""

    name: str
    value: str
    missing: str | None = None
    """What is not there, and where it would be recorded; None: all is."""


class Section(NamedTuple):
    """Facts under a heading, and tables below them, each a header and rows."""

    title: str
    facts: list[Fact]
    tables: Sequence[list[list[str]]] = ()


def missing(name: str, where: str) -> Fact:
    """A fact that the run directory does not tell."""
    return Fact(name, "**missing**", f"{name} ({where})")


def figure(value: object) -> str:
    """A number with two decimals, more if it is small, a whole one as it is; None as a dash.

    >>> figure(12345.678), figure(0.012345), figure(7000), figure(None), figure("inf")
    ('12,345.68', '0.0123', '7,000', '–', 'inf')
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


class Lookup:
    """Finds facts in what there is of a run directory."""

    def __init__(self, parts: RunParts) -> None:
        self.parts = parts
        self.config = _parse(parts.config)

    def summary(self, name: str, *keys: str, form: str = "") -> Fact:
        """Values of the summary, put in places of `form`. Null is shown as a dash: it was looked
        for and does not exist."""
        absent = [key for key in keys if key not in self.parts.summary]
        if absent:
            return missing(name, f"summary.json: {', '.join(absent)}")
        values = [figure(self.parts.summary[key]) for key in keys]
        return Fact(name, form.format(*values) if form else ", ".join(values))

    def known(self, name: str, key: str) -> Fact:
        """A value of the summary that has to be one."""
        value = self.parts.summary.get(key)
        return missing(name, f"summary.json: {key}") if value is None else Fact(name, str(value))

    def env(self, name: str, *path: str) -> Fact:
        """A value of env.json that has to be one."""
        value: Any = self.parts.env
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return missing(name, f"env.json: {'.'.join(path)}")
        return Fact(name, str(value))

    def setting(self, *path: str) -> Any:
        """A value of the configuration; None if it is not there."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def column(self, name: str) -> NDArray[Any] | None:
        """Numbers of requests.parquet; None if the column is not there."""
        return _column(self.parts.requests, name)

    def step_column(self, name: str) -> NDArray[Any] | None:
        """Numbers of steps.parquet; None if the column is not there."""
        return _column(self.parts.steps, name)

    def completed(self) -> NDArray[np.bool_]:
        """Mask of the requests that completed; requests.parquet has to be there."""
        return self.has_status("completed")

    def has_status(self, *statuses: str) -> NDArray[np.bool_]:
        """Mask of the requests that ended so."""
        assert self.parts.requests is not None
        found = self.parts.requests["status"].to_pylist()
        return np.array([status in statuses for status in found], dtype=np.bool_)

    @property
    def is_real(self) -> bool:
        """Whether steps were computed, not priced."""
        return self.parts.summary.get("backend") == "simserve-real"

    @property
    def window(self) -> str:
        """Prefix of the summary's keys for the measuring window."""
        return "window." if "window.start_s" in self.parts.summary else ""


def _column(table: pa.Table | None, name: str) -> NDArray[Any] | None:
    if table is None or name not in table.column_names:
        return None
    try:
        return column(table, name)
    except RunDirectoryError:  # whoever asked for it names it as missing
        return None


def _parse(text: str) -> Mapping[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return {}  # every setting of it will be named as missing
    return config if isinstance(config, dict) else {}
