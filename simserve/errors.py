"""The exception tree. Every message says what is wrong, where, and what the user can do.

SimserveError
├── ConfigError          a configuration is wrong (exit status 2); holds one `Problem` a fault
├── TraceError           a trace file is wrong (exit status 2): file, row and field
├── UnknownNameError     a registry has no such name (exit status 2); suggests near ones
├── PluginError          a user's class cannot be imported, lacks a method or errs (exit status 2)
├── CapacityError        the model does not fit the GPU, or the KV pool is too small (exit status 2)
├── StalledError         no progress is possible any more: who waits for what (exit status 3)
├── OutOfDomainError     a profile cannot price this step (exit status 3)
└── RunDirectoryError    a run directory cannot be read or written (exit status 2)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = [
    "CapacityError",
    "ConfigError",
    "OutOfDomainError",
    "PluginError",
    "Problem",
    "RunDirectoryError",
    "SimserveError",
    "StalledError",
    "TraceError",
    "UnknownNameError",
    "counted",
    "did_you_mean",
    "why_unreadable",
]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the nearest known name in any case, or an empty string."""
    by_lower = {one.lower(): one for one in known}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean '{by_lower[near[0]]}'?)" if near else ""


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "request"), counted(2, "request")
    ('1 request', '2 requests')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def why_unreadable(error: Exception) -> str:
    """What is wrong with a file, in words and without its path."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return getattr(error, "strerror", None) or str(error)


class SimserveError(Exception):
    """Base of all errors that simserve raises on purpose."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault in a configuration: where it stands and what is wrong with it."""

    path: str
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    source: str | None = None

    def render(self) -> str:
        """`file:line:col: path: message`, then the source line with a caret under the column.

        The message alone, if it has no place: it is not about a configuration.
        """
        if self.file is None and not self.path:
            return self.message
        where = self.file or "<config>"
        if self.line is not None:
            where += f":{self.line}:{self.column or 1}"
        head = f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"
        if self.source is None or self.line is None:
            return head
        gutter = f"{self.line:>6} | "
        caret = " " * (len(gutter) - 2) + "| " + " " * ((self.column or 1) - 1) + "^"
        return f"{head}\n{gutter}{self.source}\n{caret}"


class ConfigError(SimserveError):
    """A configuration is wrong. All faults are reported at once."""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem(path="", message=problems)]
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.render() for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class TraceError(SimserveError):
    """A trace file is wrong; the message begins with `file:row: field:`."""


class UnknownNameError(SimserveError):
    """No built-in, entry point or class goes by this name."""


class PluginError(SimserveError):
    """A class given by name cannot be imported, or does not do what its protocol says."""


class CapacityError(SimserveError):
    """The weights leave no room for the KV cache, or the pool cannot hold a request."""


class StalledError(SimserveError):
    """Requests are waiting, nothing can be scheduled and no event is left that could change it."""

    exit_code = 3


class OutOfDomainError(SimserveError):
    """A step lies outside what a profile was measured on and the profile forbids extrapolation."""

    exit_code = 3


class RunDirectoryError(SimserveError):
    """A run directory is missing, incomplete or cannot be written."""
