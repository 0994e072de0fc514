"""Runs the points of a sweep and gathers them; what was done before it was killed is kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from simserve.config.loader import ConfigSource
from simserve.config.overrides import Overrides
from simserve.config.sweep_loader import LoadedSweep, Point, load_points, load_sweep
from simserve.errors import ConfigError
from simserve.sweep.directory import SweepDirectory
from simserve.sweep.process import ProcessBackend
from simserve.sweep.summary import write_summary
from simserve.sweep.task import Failure, Task

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Backend",
    "BackendName",
    "Listener",
    "SweepResult",
    "checked_jobs",
    "open_backend",
    "run_points",
    "run_sweep",
    "summary_row",
]

BackendName = Literal["process", "ray"]


class Backend(Protocol):
    """Where points run."""

    def run(
        self,
        tasks: Iterable[Task],
        folder: Path,
        timeout_s: float | None,
        started: Callable[[Task], object],
    ) -> Iterator[tuple[Task, Failure | None]]:
        """Run tasks, put their run directories into `folder`, yield each when it has ended."""

    def close(self) -> None:
        """End what runs."""


class Listener(Protocol):
    """Who wants to know how far a sweep is."""

    def started(self, name: str) -> object:
        """A point runs."""

    def ended(self, name: str, summary: Mapping[str, Any] | None, message: str) -> object:
        """A point is done, or was when the sweep was resumed; no summary: it failed."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Where a sweep's files are, and its summary."""

    directory: Path
    rows: Sequence[Mapping[str, Any]]
    """One flat dict a point, in the order of the file: its name, swept values and summary."""

    @property
    def num_failed(self) -> int:
        """Points without a run directory."""
        return sum(row["status"] == "failed" for row in self.rows)

    @property
    def summary(self) -> pd.DataFrame:
        """One row a point."""
        import pandas as pd

        return pd.DataFrame(self.rows)


def run_sweep(
    source: ConfigSource | LoadedSweep,
    overrides: Overrides = (),
    *,
    out: str | Path,
    jobs: int | None = None,
    backend: BackendName = "process",
    ray_address: str | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> SweepResult:
    """Run every point of a sweep in a process of its own and write a sweep directory.

    Equal files give equal summaries, whatever `jobs` and `backend` are, and whether it was killed
    and resumed in between. Points that fail leave a record, and the others go on.

    Args:
        source: a configuration with a `sweep` section.
        overrides: `KEY=VALUE` strings or values by dotted path, applied to it first.
        out: a new or empty folder; with `resume` that of a sweep which was not finished.
        jobs: points at a time. None: as many as CPUs. On a real GPU always one.
        backend: processes of this machine, or a Ray cluster.
        ray_address: of a running cluster. None: a Ray of its own on this machine.
        resume: run only the points that have no run directory, failed ones again.
        listener: is told when points start and end.

    Raises:
        ConfigError: the sweep is wrong, or Ray, or what all points need, is not there.
        RunDirectoryError: `out` cannot be used.
    """
    loaded = source if isinstance(source, LoadedSweep) else load_sweep(source, overrides)
    points = load_points(loaded)
    _check_torch(points)
    jobs = checked_jobs(points, jobs, backend)
    with closing(SweepDirectory(Path(out), loaded.plain, resume=resume)) as directory:
        left = [one for one in points if not directory.is_done(one.name, one.settings)]
        _tell_done(points, left, directory, listener)
        if left:
            with closing(open_backend(backend, jobs, ray_address)) as opened:
                run_points(left, directory, opened, loaded.sweep.timeout_s, listener)
        rows = [summary_row(point, directory) for point in points]
        write_summary(directory.path, rows)
    return SweepResult(Path(out), rows)


def open_backend(name: BackendName, jobs: int | None, ray_address: str | None) -> Backend:
    """The backend of that name.

    Raises:
        ConfigError: Ray is not there.
    """
    if name == "process":
        return ProcessBackend(jobs or len(os.sched_getaffinity(0)))
    from simserve.sweep.ray_cluster import RayBackend

    return RayBackend(jobs, ray_address)


def run_points(
    points: Sequence[Point],
    directory: SweepDirectory,
    backend: Backend,
    timeout_s: float | None,
    listener: Listener | None,
) -> None:
    """Run points, and put each in its place as soon as it has ended.

    Points whose values do not go together have failed already.
    """

    def started(task: Task) -> None:
        if listener is not None:
            listener.started(task.name)

    def ended(name: str, failure: Failure | None) -> None:
        directory.keep(name, failure)
        if listener is not None:
            listener.ended(name, directory.summary(name), failure.message if failure else "")

    for point in points:
        if point.error is not None:
            ended(point.name, Failure(type(point.error).__name__, str(point.error)))
    tasks = [Task.of(point) for point in points if point.error is None]
    for task, failure in backend.run(tasks, directory.partial, timeout_s, started):
        ended(task.name, failure)


def summary_row(point: Point, directory: SweepDirectory) -> dict[str, Any]:
    """A point's row of the summary. One that failed has its values and the first line of why."""
    scenario = {} if point.scenario is None else {"scenario": point.scenario}
    head = {"point": point.name, **scenario, **point.values}
    summary = directory.summary(point.name)
    if summary is not None:
        return head | summary
    message = directory.failure(point.name).message.partition("\n")[0]
    return {**head, "status": "failed", "failure": message}


def _check_torch(points: Sequence[Point]) -> None:
    """Every point would fail for the same reason."""
    configs = [one.loaded.config for one in points if one.loaded]
    is_real = bool(configs) and all(one.executor.kind == "real" for one in configs)
    if is_real and find_spec("torch") is None:
        raise ConfigError(
            "executor.kind: real needs torch, which is not installed: pip install 'simserve[gpu]'"
        )


def checked_jobs(points: Sequence[Point], jobs: int | None, backend: str) -> int | None:
    """How many points may run at a time: real runs measure it, so that nothing runs beside them.

    Raises:
        ConfigError: more were asked for, or another machine.
    """
    is_real = any(one.loaded and one.loaded.config.executor.kind == "real" for one in points)
    if is_real and (backend != "process" or jobs not in (None, 1)):
        raise ConfigError(
            "executor.kind: real measures time, so its points run one after another on this "
            "machine: leave out --jobs and --backend"
        )
    return 1 if is_real else jobs


def _tell_done(
    points: Sequence[Point],
    left: Sequence[Point],
    directory: SweepDirectory,
    listener: Listener | None,
) -> None:
    names = {point.name for point in left}
    for point in points:
        if listener is not None and point.name not in names:
            listener.ended(point.name, directory.summary(point.name), "")
