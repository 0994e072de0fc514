"""The one reader and writer of run directories.

    summary.json      a list of one flat dict        run=K.json   the summary of repetition K
    requests.parquet  one row a request              run.png      the picture, if there is one
    steps.parquet     one row a step                 config.yaml  the resolved configuration
    env.json          versions and machine
    outputs.parquet   one row a request with the tokens that a model has chosen, if they were kept
    choices.json      the sequences that were ranked best, of beams or of several, if they were real

A directory is written under a temporary name beside its place, its tables while the run goes on,
and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from simserve.errors import RunDirectoryError, why_unreadable
from simserve.metrics.options import Scalar
from simserve.metrics.result import RunFacts, RunResult
from simserve.metrics.table_file import REQUESTS, STEPS, TableFiles

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PICTURE", "NewRun", "RunParts", "new_run", "read_parts", "read_run", "write_run"]

SUMMARY = "summary.json"
PICTURE = "run.png"
CHOICES = "choices.json"


def write_run(
    path: str | Path, result: RunResult, *, overwrite: bool = False, picture: bytes | None = None
) -> Path:
    """Write a run directory; whatever goes wrong leaves nothing under its name.

    Raises:
        RunDirectoryError: `path` exists and `overwrite` is not set, or what stands there is no
            run directory, or the files cannot be written.
    """
    with new_run(path, overwrite=overwrite) as new:
        new.tables.write(result.requests_table, result.steps_table)
        new.close(result)
        return new.take_place(picture)


@contextmanager
def new_run(
    path: str | Path, *, overwrite: bool = False, save_detailed: bool = False
) -> Iterator[NewRun]:
    """Begin a run directory. If it has not taken its place when the block ends, it is gone.

    Raises:
        RunDirectoryError: as `write_run`.
    """
    path = Path(path)
    try:
        str(path).encode()
        _check_target(path, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent / f".{path.name}.{uuid4().hex[:8]}.partial"
        folder.mkdir()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path!s:.200}: cannot write there: {error}") from error
    try:
        yield NewRun(path, folder, save_detailed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class NewRun:
    """A run directory in the making, in a `folder` that becomes `path`."""

    def __init__(self, path: Path, folder: Path, save_detailed: bool) -> None:
        self.tables = TableFiles(folder, save_detailed)
        """Takes the rows while the run goes on."""
        self._path = path
        self._folder = folder

    def close(self, facts: RunFacts) -> None:
        """The run is over: complete the tables, and write what it came to."""
        folder = self._folder
        with self._naming_errors():
            self.tables.close()
            _write_json(folder / SUMMARY, [{**facts.summary_dict, **_details(folder / REQUESTS)}])
            for number, repetition in enumerate(facts.repetitions):
                _write_json(folder / f"run={number}.json", dict(repetition))
            (folder / "config.yaml").write_text(facts.config, encoding="utf-8", newline="\n")
            _write_json(folder / "env.json", {**facts.env, "warnings": list(facts.warnings)})
            if facts.choices:
                _write_json(folder / CHOICES, list(facts.choices))

    def result(self, facts: RunFacts) -> RunResult:
        """The run with its tables, read back."""
        return facts.with_tables(
            _read_table(self._folder / REQUESTS), _read_table(self._folder / STEPS)
        )

    def take_place(self, picture: bytes | None = None) -> Path:
        """Give the directory its name; `picture` is the PNG of the run."""
        with self._naming_errors():
            if picture is not None:
                (self._folder / PICTURE).write_bytes(picture)
            _take_place(self._folder, self._path)
        return self._path

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self._path}: cannot write the run directory: {error}"
            raise RunDirectoryError(message) from error


def read_run(path: str | Path) -> RunResult:
    """Read a run directory back.

    Raises:
        RunDirectoryError: a file is missing or broken; the message names it.
    """
    path = Path(path)
    summary, env = _read_summary(path), _read_env(path / "env.json")
    choices = path / CHOICES
    repetitions = sorted(path.glob("run=*.json"), key=lambda file: (len(file.name), file.name))
    return RunResult(
        summary_dict=summary,
        requests_table=_read_table(path / REQUESTS),
        steps_table=_read_table(path / STEPS),
        config=_read_text(path / "config.yaml"),
        warnings=tuple(env.pop("warnings", ())),
        env=env,
        repetitions=tuple(_read_json(file) for file in repetitions),
        choices=tuple(_read_json(choices)) if choices.is_file() else (),
    )


class RunParts(NamedTuple):
    """Whatever there is of a run directory; empty or None: the file is not there."""

    summary: Mapping[str, Scalar]
    env: Mapping[str, Any]
    config: str
    requests: pa.Table | None
    steps: pa.Table | None


def read_parts(path: str | Path) -> RunParts:
    """Read a run directory that may lack files: one of another tool, or of which some were lost.

    Raises:
        RunDirectoryError: there is no summary, or a file is broken; the message names it.
    """
    path = Path(path)
    env, config = path / "env.json", path / "config.yaml"
    requests, steps = (
        _read_table(file) if file.is_file() else None for file in (path / REQUESTS, path / STEPS)
    )
    return RunParts(
        summary=_read_summary(path),
        env=_read_env(env) if env.is_file() else {},
        config=_read_text(config) if config.is_file() else "",
        requests=requests,
        steps=steps,
    )


def _read_summary(path: Path) -> dict[str, Scalar]:
    if not path.is_dir():
        raise RunDirectoryError(f"{path}: there is no run directory of this name")
    if not (path / SUMMARY).exists():
        inner = next(iter(sorted(path.glob(f"*/{SUMMARY}"))), None)
        raise RunDirectoryError(
            f"{path / SUMMARY}: cannot be read: there is no such file, so {path} is no run "
            f"directory{f'; {inner.parent} is one' if inner else ''}"
        )
    summaries = _read_json(path / SUMMARY)
    if not isinstance(summaries, list) or len(summaries) != 1 or not isinstance(summaries[0], dict):
        raise RunDirectoryError(f"{path / SUMMARY}: expected a list of one JSON object")
    return {key: value for key, value in summaries[0].items() if not isinstance(value, list)}


def _read_env(path: Path) -> dict[str, Any]:
    env = _read_json(path)
    if not isinstance(env, dict):
        raise RunDirectoryError(f"{path}: expected a JSON object")
    return env


def _check_target(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise RunDirectoryError(
            f"{path}: exists already; choose another name, or allow it to be overwritten"
        )
    is_run = path.is_dir() and not path.is_symlink()
    if not is_run or (any(path.iterdir()) and not (path / SUMMARY).is_file()):
        raise RunDirectoryError(f"{path}: is not a run directory, so it is not overwritten")
    if path.samefile("."):  # whoever is in it would be in a folder without a name
        raise RunDirectoryError(f"{path}: is the current folder; name another, or a new one in it")


def _take_place(folder: Path, path: Path) -> None:
    if not path.is_dir():
        folder.rename(path)
        return
    old = folder.with_suffix(".old")
    path.rename(old)
    try:
        folder.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old)


def _details(path: Path) -> dict[str, Any]:
    """vLLM's lists (seconds), if every gap was kept in the table of requests."""
    import pyarrow.parquet as pq

    columns = [
        "input_length",
        "output_length",
        "ttft_ms",
        "itl_ms",
        "e2el_ms",
        "arrival_time_s",
        "queue_time_ms",
        "error",
    ]
    with pq.ParquetFile(path) as file:
        if "itl_ms" not in file.schema_arrow.names:
            return {}
        rows = file.read(columns).to_pydict()
    summary: dict[str, Any] = {}
    summary["input_lens"], summary["output_lens"] = rows["input_length"], rows["output_length"]
    summary["ttfts"] = _seconds(rows["ttft_ms"])
    summary["itls"] = [_seconds(gaps) for gaps in rows["itl_ms"]]
    summary["latencies"] = _seconds(rows["e2el_ms"])
    summary["start_times"] = rows["arrival_time_s"]
    summary["queue_times"] = _seconds(rows["queue_time_ms"])
    summary["errors"] = [error or "" for error in rows["error"]]
    return summary


def _seconds(milliseconds: list[float | None]) -> list[float | None]:
    return [None if value is None else value / 1000.0 for value in milliseconds]


def _write_json(path: Path, content: list[Any] | Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {why_unreadable(error)}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise RunDirectoryError(f"{path}:{error.lineno}: is not JSON: {error.msg}") from error


def _read_table(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {why_unreadable(error)}") from error
