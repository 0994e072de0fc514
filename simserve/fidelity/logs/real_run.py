"""Opens the directory of a real run as a log to fit on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from simserve.config.loader import LoadedConfig, load_config
from simserve.cost.dealing import Dealer
from simserve.cost.profile_file import Graphs
from simserve.cost.step_model import Sheet, sheet
from simserve.errors import ConfigError, RunDirectoryError
from simserve.fidelity.logs import executor_facts
from simserve.fidelity.logs.loaded_log import LoadedLog
from simserve.fidelity.logs.run_steps import measured_steps
from simserve.fidelity.logs.step_watch import MeasuredSteps
from simserve.metrics.rundir import read_run
from simserve.shapes import resolve_kv_dtype

__all__ = ["RunLog", "load_run"]


@dataclass(frozen=True, slots=True)
class RunLog(LoadedLog):
    """A real run's steps; its model need not be a preset."""

    measured: MeasuredSteps = field(kw_only=True)
    loaded: LoadedConfig = field(kw_only=True)
    facts: Mapping[str, Any] = field(kw_only=True)
    """Of the machine that it ran on."""
    measured_on: str = field(kw_only=True)

    @property
    def sheet(self) -> Sheet:
        """Data-sheet times of the run's model."""
        model = self.loaded.model
        kv_dtype = resolve_kv_dtype(model, self.loaded.config.kv_cache.dtype)
        return sheet(model, self.loaded.gpu, kv_dtype)


def load_run(path: Path) -> RunLog:
    """Open the directory of a real run.

    Raises:
        RunDirectoryError: it cannot be read, was simulated, or holds no step that can be fitted.
        ConfigError: its model or GPU cannot be found from here, or its env.json breaks the format.
    """
    run = read_run(path)
    facts = run.env.get("executor")
    if facts is None:
        raise RunDirectoryError(
            f"{path}: was simulated, so its step times are a cost model's; fit a run with "
            "executor.kind: real, or an engine's step logs"
        )
    loaded = load_config(yaml.safe_load(run.config), base_dir=path)
    try:
        plan = executor_facts.attention_plan(facts)
    except ConfigError as error:
        raise ConfigError(f"{path / 'env.json'}: {error}") from error
    try:
        measured = measured_steps(
            run.requests_table,
            run.steps_table,
            loaded.model.sliding_window,
            Dealer(plan, loaded.model) if plan else None,
            _graphs(loaded, facts).sizes if plan else (),
        )
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{path}: {error}") from error
    if not len(measured):
        raise RunDirectoryError(f"{path}: holds no step that can be fitted")
    date = str(run.summary_dict["date"])
    day = f"{date[:4]}-{date[4:6]}-{date[6:8]}"
    log = RunLog(
        name=path.name,
        sha256=hashlib.sha256((path / "steps.parquet").read_bytes()).hexdigest(),
        engine=f"{executor_facts.ENGINE}-{run.env['simserve']}",
        model=loaded.model.name,
        gpu=loaded.gpu.name,
        steps=measured.steps,
        measured=measured,
        loaded=loaded,
        facts=facts,
        measured_on=executor_facts.measured_on(facts, run.env, day),
    )
    return replace(log, heat=measured.share_of_flops(log.sheet))


def _graphs(loaded: LoadedConfig, facts: Mapping[str, Any]) -> Graphs:
    scheduler = loaded.config.scheduler
    most_tokens = scheduler.max_num_batched_tokens or 1
    return executor_facts.graphs(facts, scheduler.max_num_seqs or 1, most_tokens)
