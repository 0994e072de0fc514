"""Settings that no other ones beat in all objectives, found with Optuna among those of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simserve.config.loader import ConfigSource
from simserve.config.overrides import Overrides
from simserve.config.sweep import Grid
from simserve.config.sweep_cells import Cell
from simserve.config.sweep_loader import LoadedSweep, Point, load_sweep
from simserve.errors import ConfigError, did_you_mean
from simserve.sweep.directory import SweepDirectory
from simserve.sweep.runner import (
    Backend,
    Listener,
    checked_jobs,
    open_backend,
    run_points,
    summary_row,
)
from simserve.sweep.summary import write_summary

__all__ = ["SettingsSearch", "search_settings"]


@dataclass(frozen=True, slots=True)
class SettingsSearch:
    """What a search has found."""

    directory: Path
    keys: Sequence[str]
    """Those that the search chose values of."""
    rows: Sequence[Mapping[str, Any]]
    """One flat dict a point that was tried, `pareto` among its keys."""

    @property
    def pareto(self) -> list[Mapping[str, Any]]:
        """The rows that no other one beats."""
        return [row for row in self.rows if row["pareto"]]


def search_settings(
    source: ConfigSource,
    objectives: Sequence[str],
    overrides: Overrides = (),
    *,
    out: str | Path,
    num_trials: int,
    jobs: int = 1,
    listener: Listener | None = None,
) -> SettingsSearch:
    """Try points of a grid, chosen by Optuna's sampler after what the ones before came to.

    Of latencies (`…_ms`) less is better, of all else more. The sampler is seeded with the
    configuration's `seed`; equal files, trials and jobs try equal points. A point that is asked for
    again is not run again. The directory is that of a sweep, with a column `pareto` in its summary.

    Args:
        source: a configuration with a `sweep` section of type grid: the values to choose from.
        objectives: numbers of the summary.
        overrides: `KEY=VALUE` strings or values by dotted path.
        out: a new or empty folder.
        num_trials: how often the sampler is asked.
        jobs: points at a time; the sampler does not know of those that still run.
        listener: is told when points start and end.

    Raises:
        ConfigError: Optuna is not installed, the sweep is wrong or no grid, real runs would run
            side by side, or the summary has no such objective.
    """
    loaded = load_sweep(source, overrides)
    if not isinstance(loaded.sweep, Grid):
        raise ConfigError(
            f"{loaded.source or 'the sweep'}: sweep.type: a search chooses from type grid, "
            f"not {loaded.sweep.type}"
        )
    seed = loaded.plain.get("seed", 0)
    # A wrong one is refused with the first point, which says where it stands.
    study = _study(objectives, seed if isinstance(seed, int) else 0)
    with (
        closing(SweepDirectory(Path(out), loaded.plain, resume=False)) as directory,
        closing(open_backend("process", jobs, None)) as backend,
    ):
        search = _Search(loaded, loaded.sweep, objectives, directory, backend, listener)
        while left := num_trials - len(study.trials):
            search.try_some(study, min(jobs, left))
        best = {trial.user_attrs["point"] for trial in study.best_trials}
        rows = [
            {**summary_row(point, directory), "pareto": name in best}
            for name, point in search.points.items()
        ]
        write_summary(directory.path, rows)
    return SettingsSearch(Path(out), loaded.keys, rows)


class _Search:
    """Asks the sampler for points, runs them, and tells it what they came to."""

    def __init__(
        self,
        loaded: LoadedSweep,
        grid: Grid,
        objectives: Sequence[str],
        directory: SweepDirectory,
        backend: Backend,
        listener: Listener | None,
    ) -> None:
        self.points: dict[str, Point] = {}
        """Those tried so far, by name."""
        self._loaded = loaded
        self._grid = grid
        self._objectives = objectives
        self._directory = directory
        self._backend = backend
        self._listener = listener

    def try_some(self, study: Any, count: int) -> None:
        """Run `count` trials at a time."""
        asked = [study.ask() for _ in range(count)]
        points = [self._point(trial) for trial in asked]
        checked_jobs(points, count, "process")
        new = {point.name: point for point in points if point.name not in self.points}
        self.points |= new
        run_points(
            list(new.values()),
            self._directory,
            self._backend,
            self._loaded.sweep.timeout_s,
            self._listener,
        )
        for trial, point in zip(asked, points, strict=True):
            trial.set_user_attr("point", point.name)
            values = self._values(point.name)
            study.tell(trial, values, **({} if values else {"state": _failed()}))

    def _point(self, trial: Any) -> Point:
        """The sampler chooses places in the lists of values, which it takes to be in order."""
        picks = {
            key: ("parameters", key, trial.suggest_int(key, 0, len(values) - 1))
            for key, values in self._grid.parameters.items()
        }
        return self._loaded.point(Cell(None, picks))

    def _values(self, name: str) -> list[float] | None:
        summary = self._directory.summary(name)
        if summary is None:
            return None
        for key in self._objectives:
            if key not in summary or isinstance(summary[key], str):
                hint = did_you_mean(key, summary) if key not in summary else ""
                raise ConfigError(f"--objective {key}: the summary has no such number{hint}")
        values = [summary[key] for key in self._objectives]
        return None if None in values else values


def _study(objectives: Sequence[str], seed: int) -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "a search over settings needs Optuna: pip install 'simserve[optuna]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = ["minimize" if key.endswith("_ms") else "maximize" for key in objectives]
    return optuna.create_study(
        directions=directions, sampler=optuna.samplers.TPESampler(seed=seed % 2**32)
    )


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL
