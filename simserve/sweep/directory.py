"""A sweep's directory: what it is of, which points are done, and the lock that makes it one's own.

sweep.yaml                    the file that was run, overrides applied
NAME/                         the run directory of a point, with overrides.json
NAME.failure.json             why a point has none
summary.csv, summary.parquet  one row a point
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from simserve.config.dump import dump_plain
from simserve.errors import RunDirectoryError
from simserve.sweep.task import Failure
from simserve.sweep.worker import OVERRIDES

__all__ = ["SweepDirectory"]

_PARTIAL = ".partial"
_FILE = "sweep.yaml"


class SweepDirectory:
    """A sweep's directory, held while it is open.

    Args:
        path: a new or empty folder; with `resume` that of the same sweep.
        plain: the sweep's file, overrides applied.
        resume: keep the points that are done.

    Raises:
        RunDirectoryError: it is of another sweep, in use, or cannot be written.
    """

    def __init__(self, path: Path, plain: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self._is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot write there: {error}") from None
        try:
            self._take()
            self._was_empty = not any(path.iterdir())
            self._check(plain, resume)
        except RunDirectoryError:
            os.close(self._lock)  # what is there is not ours
            raise
        try:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir()
            (path / _FILE).write_text(dump_plain(plain), encoding="utf-8", newline="\n")
        except OSError as error:
            self.close()
            raise RunDirectoryError(f"{path}: cannot write there: {error}") from None
        except KeyboardInterrupt:
            self.close()
            raise

    @property
    def partial(self) -> Path:
        """Where processes write; points move from there when they are complete."""
        return self.path / _PARTIAL

    def is_done(self, name: str, settings: Mapping[str, Any]) -> bool:
        """Whether the point has a run directory.

        Raises:
            RunDirectoryError: the directory is there, and of other settings.
        """
        directory = self.path / name
        if not directory.exists():
            return False
        try:
            found = json.loads((directory / OVERRIDES).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{directory}: is no point of a sweep: {error}") from None
        if found != dict(settings):
            raise RunDirectoryError(
                f"{directory}: was run with other values than the file has now; name another --out"
            )
        return True

    def keep(self, name: str, failure: Failure | None) -> None:
        """Put a point in its place: its run directory, or why there is none."""
        record = self.path / f"{name}.failure.json"
        if failure is None:
            (self.partial / name).rename(self.path / name)
            record.unlink(missing_ok=True)
            return
        text = json.dumps({"point": name, **failure._asdict()}, indent=2, ensure_ascii=False)
        record.write_text(text + "\n", encoding="utf-8", newline="\n")

    def summary(self, name: str) -> dict[str, Any] | None:
        """The summary of a point that is done; None of one that failed."""
        path = self.path / name / "summary.json"
        if not path.exists():
            return None
        (summary,) = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in summary.items() if not isinstance(value, list)}

    def failure(self, name: str) -> Failure:
        """Why a point has no run directory."""
        record = json.loads((self.path / f"{name}.failure.json").read_text(encoding="utf-8"))
        return Failure(record["error"], record["message"])

    def close(self) -> None:
        """Let others have it; nothing half done stays, and nothing at all if no point has ended."""
        shutil.rmtree(self.partial, ignore_errors=True)
        with suppress(OSError):  # somebody has deleted it
            if self._was_empty and {path.name for path in self.path.iterdir()} <= {_FILE}:
                (self.path / _FILE).unlink(missing_ok=True)
                if self._is_new:
                    self.path.rmdir()
        os.close(self._lock)

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunDirectoryError(f"{self.path}: another sweep is writing there") from None

    def _check(self, plain: Mapping[str, Any], resume: bool) -> None:
        file = self.path / _FILE
        if not any(self.path.iterdir()):
            return
        if not resume:
            raise RunDirectoryError(
                f"{self.path}: is not empty; name a new folder for --out, or --resume what is there"
            )
        try:
            before = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise RunDirectoryError(f"{self.path}: is no sweep to resume: {error}") from None
        if changed := _changed(before, plain):
            raise RunDirectoryError(
                f"{self.path}: was begun with another {', '.join(changed)}; "
                "only `sweep` may change between then and --resume"
            )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The top-level keys that differ, apart from the sweep's own."""
    keys = dict.fromkeys([*before, *now])
    return [key for key in keys if key != "sweep" and before.get(key) != now.get(key)]
