"""Fits what lies between schedule() and update(): inputs, kernels, launches and sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.cost.profile_file import Graphs
from simserve.cost.step_model import COEFFICIENTS, PARTS, Path, Sheet, rates, step_parts
from simserve.cost.step_work import StepWork
from simserve.errors import TraceError
from simserve.fidelity.least_squares import fit_bounded
from simserve.fidelity.observations import Observations, split_by_path

__all__ = ["FITTED_HERE", "Sample", "fit_steps", "predict"]

Floats = NDArray[np.float64]

FITTED_HERE = tuple(
    name
    for name in COEFFICIENTS
    if not name.startswith(("schedule_", "update_", "loop_", "intake_"))
)
"""The coefficients that are not timed by the engine itself."""
_MODEL_PARTS = slice(PARTS.index("inputs_s"), PARTS.index("update_s"))
_OUTLIER = 0.04
_REGIME_STEPS = 200
"""Steps of one model, kind and power of two of tokens weigh at most as so many."""
_SMALLEST = 1e-4
"""Of a coefficient's first guess: what is fitted below is 0."""


class Sample(NamedTuple):
    """One log's steps, the data-sheet times of its model, and its host's scale step by step."""

    steps: Observations
    sheet: Sheet
    host_scale: Floats


@dataclass(frozen=True, slots=True)
class _Group:
    """Steps of one model and kernel path, of all logs."""

    sheet: Sheet
    path: Path
    rows: NDArray[np.int64]
    work: StepWork
    host_scale: Floats


def fit_steps(
    samples: Sequence[Sample], graphs: Graphs, known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The coefficients `FITTED_HERE` that predict what schedule() and update() leave of a step.

    `known`: those of them that were measured by themselves, and stay as they are.

    Raises:
        TraceError: a step is shorter than its schedule() and update().
    """
    measured = np.concatenate([one.steps.duration_s - one.steps.engine_s for one in samples])
    if not measured.min() > 0:
        raise TraceError("a step takes no longer than its schedule() and update() together")
    groups = _groups(samples, graphs)
    fixed = {**dict.fromkeys(COEFFICIENTS, 0.0), **(known or {})}
    names = [name for name in FITTED_HERE if name not in (known or {})]
    specs = [COEFFICIENTS[name] for name in names]
    start = np.array([spec.start for spec in specs])
    low = np.array([max(spec.low, _SMALLEST * spec.start) for spec in specs])
    high = np.array([spec.high for spec in specs])

    def residuals(values: Floats) -> Floats:
        coefficients = {**fixed, **dict(zip(names, values.tolist(), strict=True))}
        predicted = np.empty(len(measured))
        for group in groups:
            of_model = rates(coefficients, group.sheet)
            parts = step_parts(of_model, group.work, group.path, group.host_scale)
            predicted[group.rows] = sum(parts[_MODEL_PARTS])
        return np.asarray(np.log(predicted / measured), dtype=np.float64)

    found = fit_bounded(residuals, start, low, high, _weights(samples), _OUTLIER).parameters
    at_zero = (found <= low * 1.001) & (np.array([spec.low for spec in specs]) == 0)
    fitted = dict(zip(names, np.where(at_zero, 0.0, found).tolist(), strict=True))
    return {name: fitted.get(name, fixed[name]) for name in FITTED_HERE}


def predict(
    coefficients: Mapping[str, float],
    sheet: Sheet,
    steps: Observations,
    graphs: Graphs,
    host_scale: float | Floats,
) -> Floats:
    """Durations of whole steps (s), shape [steps], on a host of one speed, or of one a step."""
    of_model = rates(coefficients, sheet)
    scales = np.broadcast_to(host_scale, len(steps))
    predicted = np.empty(len(steps))
    for path, rows, work in split_by_path(steps, graphs):
        predicted[rows] = sum(step_parts(of_model, work, path, scales[rows]))
    return predicted


def _groups(samples: Sequence[Sample], graphs: Graphs) -> list[_Group]:
    """The steps of all samples that one formula prices, joined."""
    pieces: dict[tuple[Any, ...], list[tuple[NDArray[np.int64], StepWork, Floats]]] = {}
    first = 0
    for steps, sheet, host_scale in samples:
        for path, rows, work in split_by_path(steps, graphs):
            key = (sheet, path, work.num_prefills is None)
            pieces.setdefault(key, []).append((first + rows, work, host_scale[rows]))
        first += len(steps)
    groups = []
    for (sheet, path, _), found in pieces.items():
        columns = (_join(column) for column in zip(*(work for _, work, _ in found), strict=True))
        groups.append(
            _Group(
                sheet=sheet,
                path=path,
                rows=np.concatenate([rows for rows, _, _ in found]),
                work=StepWork(*columns),
                host_scale=np.concatenate([scale for _, _, scale in found]),
            )
        )
    return groups


def _join(columns: Sequence[Any]) -> Any:
    return None if columns[0] is None else np.concatenate(columns).astype(np.float64)


def _weights(samples: Sequence[Sample]) -> Floats:
    """No kind of step outweighs the others by its mere number."""
    models = list(dict.fromkeys(sample.sheet for sample in samples))
    kinds = []
    for steps, sheet, _ in samples:
        size = np.ceil(np.log2(steps.num_tokens)).astype(np.int64)
        kinds.append(models.index(sheet) + len(models) * (2 * size + (steps.num_prefills > 0)))
    _, kind, count = np.unique(np.concatenate(kinds), return_inverse=True, return_counts=True)
    return np.asarray(np.minimum(1.0, _REGIME_STEPS / count)[kind], dtype=np.float64)
