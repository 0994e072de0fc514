"""Measured steps, counted, with what their model and GPU are called here: what a fit takes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simserve.config.presets import gpu_names, load_gpu, load_model, model_names
from simserve.cost.step_model import Sheet, sheet
from simserve.errors import TraceError
from simserve.fidelity.logs.observations import Observations, observe
from simserve.fidelity.logs.vllm_log import StepLog, preset_in

__all__ = ["LoadedLog", "load_log"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """A log, counted, with what its model and GPU are called here."""

    name: str
    sha256: str
    engine: str
    model: str
    gpu: str
    steps: Observations
    has_host: bool = field(default=True, kw_only=True)
    """Whether the host's time is in its steps; if not, they tell nothing of it."""
    kernels_s: Floats | None = field(default=None, kw_only=True)
    """What each step took beside schedule(), update() and inputs, if that was timed by itself."""
    heat: Floats | None = field(default=None, kw_only=True)
    """The share of the GPU's FLOP/s that the latest steps had used; None: not known."""

    @property
    def sheet(self) -> Sheet:
        """Data-sheet times of the log's model."""
        model = load_model(self.model)
        return sheet(model, load_gpu(self.gpu), model.dtype)


def load_log(log: StepLog, *, model: str | None = None, gpu: str | None = None) -> LoadedLog:
    """Count a log's steps, those without tokens left out.

    `model` and `gpu` are names of presets, for a log that does not name them.

    Raises:
        TraceError: the log names no model or GPU that is known here.
    """
    steps = observe(log)
    return LoadedLog(
        name=log.name,
        sha256=hashlib.sha256(log.path.read_bytes()).hexdigest(),
        engine=log.engine,
        model=model or _preset(log, "model", log.model, model_names()),
        gpu=gpu or _preset(log, "gpu", log.gpu, gpu_names()),
        steps=steps.take(steps.num_tokens > 0),
    )


def _preset(log: StepLog, what: str, text: str, known: Sequence[str]) -> str:
    name = preset_in(text, known)
    if name is not None:
        return name
    raise TraceError(
        f"{log.path}: {what}: '{text}' names no preset; say which it is with --{what} "
        f"({', '.join(known)})"
    )
