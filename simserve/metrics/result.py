"""What a run gives back: its summary and tables, in memory, ready for a notebook or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simserve.metrics.options import MetricOptions, RunInfo, Scalar
from simserve.metrics.recorder import RunData
from simserve.metrics.summary import summarise

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["RunFacts", "RunResult"]


@dataclass(slots=True, kw_only=True)
class RunFacts:
    """What a run came to, but for its tables."""

    summary_dict: dict[str, Scalar]
    """One flat dict under vLLM's keys."""
    config: str = field(default="", repr=False)
    """The resolved configuration as YAML."""
    env: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Versions, machine, commit: what may differ between runs that are otherwise equal."""
    warnings: tuple[str, ...] = ()
    repetitions: tuple[Mapping[str, Scalar], ...] = field(default=(), repr=False)
    """The summaries of all repetitions if there were several; the tables are the first's."""
    choices: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """The sequences that were returned to users, where several were ranked."""

    def with_tables(self, requests_table: pa.Table, steps_table: pa.Table) -> RunResult:
        """The same with tables."""
        return RunResult(
            summary_dict=self.summary_dict,
            config=self.config,
            env=self.env,
            warnings=self.warnings,
            repetitions=self.repetitions,
            choices=self.choices,
            requests_table=requests_table,
            steps_table=steps_table,
        )


@dataclass(slots=True, kw_only=True, repr=False)
class RunResult(RunFacts):
    """Everything a run came to. Holds plain data only: it pickles, and opens no file."""

    requests_table: pa.Table = field(repr=False)
    steps_table: pa.Table = field(repr=False)

    @classmethod
    def of(
        cls,
        data: RunData,
        info: RunInfo,
        options: MetricOptions,
        *,
        config: str = "",
        env: Mapping[str, Any] | None = None,
        warnings: Sequence[str] = (),
    ) -> RunResult:
        """Reduce what a recorder measured.

        Raises:
            SimserveError: the requests do not add up.
        """
        from simserve.metrics.tables import requests_table, steps_table

        return cls(
            summary_dict=summarise(data, info, options),
            requests_table=requests_table(data, options.save_detailed),
            steps_table=steps_table(data),
            config=config,
            env=env or {},
            warnings=tuple(warnings),
        )

    @property
    def summary(self) -> pd.DataFrame:
        """The summary as a table of one row."""
        import pandas as pd

        return pd.DataFrame([self.summary_dict])

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request."""
        frame: pd.DataFrame = self.requests_table.to_pandas()
        return frame

    @property
    def steps(self) -> pd.DataFrame:
        """One row a step."""
        frame: pd.DataFrame = self.steps_table.to_pandas()
        return frame

    def save(
        self, path: str | Path, *, overwrite: bool = False, picture: bytes | None = None
    ) -> Path:
        """Write a run directory and return its path. `picture` is the PNG of the run.

        Raises:
            RunDirectoryError: the path exists and `overwrite` is not set, or cannot be written.
        """
        from simserve.metrics.rundir import write_run

        return write_run(path, self, overwrite=overwrite, picture=picture)

    def __repr__(self) -> str:
        summary = self.summary_dict
        counts = " of ".join(str(summary.get(key)) for key in ("completed", "num_prompts"))
        return f"RunResult({summary.get('status')}: {counts} requests; see .summary, .requests)"

    def _repr_html_(self) -> str:
        from simserve.metrics.display import as_html

        return as_html(self)
