"""The configuration of a run: one pydantic model, the same for YAML files and Python mappings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from simserve.config import presets
from simserve.config.base import OneOf, StrictModel
from simserve.config.executor import Executor, Simulated
from simserve.config.kv_cache import KVCache
from simserve.config.metrics import Metrics
from simserve.config.model_spec import ModelSpec
from simserve.config.scheduler import Scheduler
from simserve.config.workload import Workload

__all__ = ["RunConfig"]


class RunConfig(StrictModel):
    """A simulation run. `model` and a workload are enough; all else has a default."""

    model: ModelSpec
    """Name of a preset, or path/to/config.json or {config: path/to/config.json}."""
    gpu: Annotated[str, OneOf("GPU preset", presets.gpu_names)] = "h200"
    """Name of a preset."""
    workload: Workload
    """Where requests come from."""
    scheduler: Scheduler = Scheduler()
    """Who decides what runs in each step."""
    kv_cache: KVCache = KVCache()
    """The block pool and the prefix cache."""
    executor: Executor = Simulated()
    """What runs the steps, and how long they take."""
    metrics: Metrics = Metrics()
    """What is measured and written."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random."""
    label: str | None = None
    """A name for the run in the results."""
    metadata: dict[str, JsonValue] = {}
    """Anything you want to find again in the results."""
