"""The one reader and writer of run directories.

    summary.json      a list of one flat dict        run=K.json   the summary of repetition K
    requests.parquet  one row a request              run.png      the picture, if there is one
    steps.parquet     one row a step                 config.yaml  the resolved configuration
    env.json          versions and machine

A directory is written under a temporary name beside its place and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from simserve.errors import RunDirectoryError
from simserve.metrics.result import RunResult

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PICTURE", "check_writable", "read_run", "write_run"]

SUMMARY = "summary.json"
PICTURE = "run.png"


def write_run(
    path: str | Path, result: RunResult, *, overwrite: bool = False, picture: bytes | None = None
) -> Path:
    """Write a run directory; whatever goes wrong leaves nothing under its name.

    Raises:
        RunDirectoryError: `path` exists and `overwrite` is not set, or what stands there is no
            run directory, or the files cannot be written.
    """
    from simserve.metrics.tables import write_parquet

    path = Path(path)
    _check_target(path, overwrite)
    try:
        with _complete_or_absent(path) as folder:
            _write_json(folder / SUMMARY, [_with_details(result)])
            for number, summary in enumerate(result.repetitions):
                _write_json(folder / f"run={number}.json", dict(summary))
            write_parquet(result.requests_table, folder / "requests.parquet")
            write_parquet(result.steps_table, folder / "steps.parquet")
            (folder / "config.yaml").write_text(result.config, encoding="utf-8", newline="\n")
            _write_json(folder / "env.json", {**result.env, "warnings": list(result.warnings)})
            if picture is not None:
                (folder / PICTURE).write_bytes(picture)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot write the run directory: {error}") from error
    return path


def check_writable(path: str | Path, *, overwrite: bool = False) -> None:
    """Find out before a long run whether its directory could be written.

    Raises:
        RunDirectoryError: as `write_run` would.
    """
    path = Path(path)
    try:
        str(path).encode()
        _check_target(path, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.parent / f".{path.name}.{uuid4().hex[:8]}.partial"
        probe.mkdir()
        probe.rmdir()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path!s:.200}: cannot write there: {error}") from error


def read_run(path: str | Path) -> RunResult:
    """Read a run directory back.

    Raises:
        RunDirectoryError: a file is missing or broken; the message names it.
    """
    path = Path(path)
    if not path.is_dir():
        raise RunDirectoryError(f"{path}: there is no run directory of this name")
    summaries = _read_json(path / SUMMARY)
    if not isinstance(summaries, list) or len(summaries) != 1 or not isinstance(summaries[0], dict):
        raise RunDirectoryError(f"{path / SUMMARY}: expected a list of one JSON object")
    env = _read_json(path / "env.json")
    if not isinstance(env, dict):
        raise RunDirectoryError(f"{path / 'env.json'}: expected a JSON object")
    repetitions = sorted(path.glob("run=*.json"), key=lambda file: (len(file.name), file.name))
    return RunResult(
        summary_dict={k: v for k, v in summaries[0].items() if not isinstance(v, list)},
        requests_table=_read_table(path / "requests.parquet"),
        steps_table=_read_table(path / "steps.parquet"),
        config=_read_text(path / "config.yaml"),
        warnings=tuple(env.pop("warnings", ())),
        env=env,
        repetitions=tuple(_read_json(file) for file in repetitions),
    )


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


@contextmanager
def _complete_or_absent(path: Path) -> Iterator[Path]:
    """A new folder beside `path` that takes its place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f".{path.name}.{uuid4().hex[:8]}.partial"
    folder.mkdir()
    try:
        yield folder
        _take_place(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


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


def _with_details(result: RunResult) -> dict[str, Any]:
    """The summary, and vLLM's lists (seconds) if every gap was kept."""
    summary: dict[str, Any] = dict(result.summary_dict)
    table = result.requests_table
    if "itl_ms" not in table.column_names:
        return summary
    rows = table.select(
        [
            "input_length",
            "output_length",
            "ttft_ms",
            "itl_ms",
            "e2el_ms",
            "arrival_time_s",
            "queue_time_ms",
            "error",
        ]
    ).to_pydict()
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
        raise RunDirectoryError(f"{path}: cannot be read: {error}") from error


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
        raise RunDirectoryError(f"{path}: cannot be read: {error}") from error
