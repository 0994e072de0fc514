"""What every reader offers: a name, options, how to know its files, and their rows."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from simserve.errors import ConfigError, did_you_mean
from simserve.segments import Segments
from simserve.types import TraceRequest
from simserve.workload.rows import Row, RowLog

__all__ = [
    "Option",
    "OptionTable",
    "Options",
    "Reader",
    "check_options",
    "first_fields",
    "first_object",
    "private_prompt",
    "row_id",
]

Options = Mapping[str, Any]
"""Values of options by name."""


@dataclass(frozen=True, slots=True)
class Option:
    """A reader's option: its type, its default, what it means, and its least value."""

    type: type
    default: Any
    doc: str
    minimum: float | None = None


OptionTable = Mapping[str, Option]
"""What options a reader has, by name."""


class Reader(ABC):
    """Base of the built-in readers. Reads one file format row by row, in file order."""

    name: ClassVar[str]
    options: ClassVar[OptionTable] = {}
    ticks_per_s: ClassVar[int] = 1
    names_requests: ClassVar[bool] = False
    """Whether request ids come from the file, so that they may clash."""
    shares_prefixes: ClassVar[bool] = True
    """Whether two prompts can begin alike."""

    @abstractmethod
    def sniff(self, path: Path, head: str) -> bool:
        """Whether the first kilobytes of a file look like this format."""

    @abstractmethod
    def rows(self, path: Path, log: RowLog, options: Options) -> Iterator[Row]:
        """Checked rows in file order; bad ones go to `log`. `options` holds every option.

        Raises:
            TraceError: the file is not of this format, or a row is bad and bad rows are errors.
        """

    def read(self, path: Path, **options: Any) -> Iterator[TraceRequest]:
        """Requests in file order; arrivals in seconds on the file's own clock.

        Raises:
            ConfigError: an option is unknown or wrong.
            TraceError: a row is bad; the message names file, row and field.
        """
        for row in self.rows(path, RowLog(path), check_options(self.name, self.options, options)):
            yield TraceRequest(arrival_s=row.ticks / self.ticks_per_s, **row.fields)


def check_options(format: str, known: OptionTable, given: Options) -> dict[str, Any]:
    """Every option of a format: those given, checked, and the defaults of the others.

    Raises:
        ConfigError: an option is unknown, or its value has the wrong type or is too small.
    """
    for name, value in given.items():
        if name not in known:
            there = ", ".join(known) or "none"
            raise ConfigError(
                f"trace format '{format}' has no option '{name}'{did_you_mean(name, known)}; "
                f"its options: {there}"
            )
        fault = _fault(known[name], value)
        if fault:
            raise ConfigError(f"option '{name}' of trace format '{format}' {fault}")
    return {name: given.get(name, option.default) for name, option in known.items()}


def _fault(option: Option, value: object) -> str:
    """What is wrong with the value of an option; empty if nothing."""
    if value is None and option.default is None:
        return ""
    accepted = (int, float) if option.type is float else option.type
    if not isinstance(value, accepted) or (isinstance(value, bool) and option.type is not bool):
        return f"is {value!r}, not of type {option.type.__name__}"
    number = float(value) if isinstance(value, int | float) else 0.0
    if not isfinite(number):
        return f"is {value}, not a finite number"
    if option.minimum is not None and number < option.minimum:
        return f"is {value}, but must be at least {option.minimum}"
    return ""


def private_prompt(request_id: str, length: int) -> Segments:
    """A prompt that shares nothing: what is not known to be shared never hits a cache."""
    return ((f"{request_id}/prompt", length),)


def row_id(number: int) -> str:
    """The id of a request whose trace gives it none: stable, because it is the row's number."""
    return f"r{number}"


def first_object(head: str) -> dict[str, Any]:
    """The first line of `head` that is a JSON object; empty if there is none."""
    for line in head.split("\n"):  # a JSON text may hold the other breaks of `splitlines`
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def first_fields(head: str) -> list[str]:
    """The comma-separated fields of the first line that is not blank."""
    lines = (line for line in head.splitlines() if line.strip())
    return [field.strip() for field in next(lines, "").split(",")]
