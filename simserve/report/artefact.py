"""Reads what a report is made of, and writes the files that it is."""

from __future__ import annotations

from pathlib import Path

from simserve.errors import RunDirectoryError
from simserve.metrics.result import RunResult
from simserve.metrics.rundir import read_run

__all__ = ["SIMULATED", "load_runs", "write_bytes", "write_text"]

SIMULATED = "simulated"
"""Within the directory of a real run: the same simulated."""


def load_runs(path: Path) -> dict[str, RunResult]:
    """The run of a directory by its name; `real` and `simulated` if it holds both.

    Raises:
        RunDirectoryError: it cannot be read.
    """
    run = read_run(path)
    if (path / SIMULATED).is_dir():
        return {"real": run, SIMULATED: read_run(path / SIMULATED)}
    return {path.resolve().name: run}


def write_text(path: Path, text: str) -> None:
    """Write a file, and the folders above it.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and the folders above it.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be written: {error.strerror}") from error
