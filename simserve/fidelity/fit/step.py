"""Fits what lies between schedule() and update(): inputs, kernels, launches and sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.cost.coefficients import COEFFICIENTS
from simserve.cost.dealing import Dealt
from simserve.cost.profile_file import Graphs
from simserve.cost.step_model import PARTS, Path, Sheet, rates, step_parts
from simserve.cost.step_work import NO_FACTORS, SizeFactors, StepWork
from simserve.errors import TraceError
from simserve.fidelity.fit.least_squares import fit_bounded
from simserve.fidelity.logs.observations import Observations, split_by_path

__all__ = ["FITTED_HERE", "Sample", "StepFit", "fit_steps", "predict", "slowed"]

Floats = NDArray[np.float64]

FITTED_HERE = tuple(
    name
    for name in COEFFICIENTS
    if not name.startswith(("schedule_", "update_", "loop_", "intake_"))
)
"""The coefficients that are not timed by the engine itself."""
_MODEL_PARTS = slice(PARTS.index("inputs_s"), PARTS.index("update_s"))
_KERNEL_PARTS = slice(_MODEL_PARTS.start + 1, _MODEL_PARTS.stop)
_OUTLIER = 0.04
_REGIME_STEPS = 200
"""Steps of one model, kind and power of two of tokens weigh at most as so many."""
_SMALLEST = 1e-4
"""Of a coefficient's first guess: what is fitted below is 0."""


_HOST_BOUNDS = 0.1, 10.0
"""Of the factor of a host that is not known."""


class Sample(NamedTuple):
    """One log's steps, the data-sheet times of its model, and its host's scale step by step."""

    steps: Observations
    sheet: Sheet
    host_scale: Floats
    host_known: bool = True
    """Or else its host is faster or slower than `host_scale` by a factor that is to be found."""
    size_factors: SizeFactors = NO_FACTORS
    kernels_s: Floats | None = None
    """What each step took beside schedule(), update() and inputs, if that was timed by itself."""
    heat: Floats | None = None
    """The share of the GPU's FLOP/s that the latest steps had used; None: not known."""

    @property
    def fitted_s(self) -> Floats:
        """Of each step, what `fitted_parts` are to add up to (s)."""
        if self.kernels_s is not None:
            return self.kernels_s
        return self.steps.duration_s - self.steps.engine_s

    @property
    def fitted_parts(self) -> slice:
        """Those of `PARTS` that are fitted to the steps."""
        return _MODEL_PARTS if self.kernels_s is None else _KERNEL_PARTS


@dataclass(frozen=True, slots=True)
class _Group:
    """Steps of one model and kernel path, of all logs."""

    sheet: Sheet
    path: Path
    rows: NDArray[np.int64]
    work: StepWork
    host_scale: Floats
    host: NDArray[np.int64]
    """Of each row, the place of its host's factor: 0 if it is known."""
    fitted_parts: slice


class StepFit(NamedTuple):
    """What fits the steps of some samples."""

    coefficients: dict[str, float]
    """`FITTED_HERE`."""
    host_factors: list[float]
    """Of each sample's host; 1 if it was known."""
    clock: tuple[float, float] | None
    """What heat adds to kernels with prefills, and to others; None: heat is not known."""


def fit_steps(
    samples: Sequence[Sample],
    graphs: Graphs,
    known: Mapping[str, float] | None = None,
    near: Mapping[str, float] | None = None,
) -> StepFit:
    """The coefficients that predict what schedule() and update() leave of a step.

    `known`: those of them that were measured by themselves, and stay as they are; `near`: what
    samples much like these gave.

    Raises:
        TraceError: a step is shorter than its schedule() and update().
    """
    measured = np.concatenate([one.fitted_s for one in samples])
    if not measured.min() > 0:
        raise TraceError("a step takes no longer than its schedule() and update() together")
    groups = _groups(samples, graphs)
    fixed = {**dict.fromkeys(COEFFICIENTS, 0.0), **(known or {})}
    names = [name for name in FITTED_HERE if name not in (known or {})]
    specs = [COEFFICIENTS[name] for name in names]
    low = np.array([max(spec.low, _SMALLEST * spec.start) for spec in specs])
    start = np.array([spec.start for spec in specs])
    if near is not None:
        start = np.maximum([near[name] for name in names], low)
    high = np.array([spec.high for spec in specs])

    num_hosts = sum(not sample.host_known for sample in samples)
    heat = _heat(samples)
    num_clocks = 2 if heat.any() else 0
    start, low, high = (
        np.concatenate([bounds, np.full(num_hosts, of_host), np.full(num_clocks, of_clock)])
        for bounds, of_host, of_clock in zip(
            (start, low, high), (1.0, *_HOST_BOUNDS), (0.1, 1e-5, 1.0), strict=True
        )
    )

    def residuals(values: Floats) -> Floats:
        own, hosts = values[: len(names)], np.append(1.0, values[len(names) :][:num_hosts])
        coefficients = {**fixed, **dict(zip(names, own.tolist(), strict=True))}
        predicted = np.empty(len(measured))
        for group in groups:
            of_model = rates(coefficients, group.sheet)
            host_scale = group.host_scale * hosts[group.host]
            parts = step_parts(of_model, group.work, group.path, host_scale)
            predicted[group.rows] = sum(parts[group.fitted_parts])
        if num_clocks:
            predicted *= 1.0 + heat @ values[-num_clocks:]
        return np.asarray(np.log(predicted / measured), dtype=np.float64)

    found = fit_bounded(residuals, start, low, high, _weights(samples), _OUTLIER)
    own, hosts = found[: len(names)], iter(found[len(names) :].tolist())
    prefills, decodes = found[-2:].tolist() if num_clocks else (0.0, 0.0)
    at_zero = (own <= low[: len(names)] * 1.001) & (np.array([spec.low for spec in specs]) == 0)
    fitted = dict(zip(names, np.where(at_zero, 0.0, own).tolist(), strict=True))
    return StepFit(
        {name: fitted.get(name, fixed[name]) for name in FITTED_HERE},
        [1.0 if sample.host_known else next(hosts) for sample in samples],
        (prefills, decodes) if num_clocks else None,
    )


def predict(
    coefficients: Mapping[str, float],
    sheet: Sheet,
    steps: Observations,
    graphs: Graphs,
    host_scale: float | Floats,
    size_factors: SizeFactors = NO_FACTORS,
    slower: float | Floats = 1.0,
) -> Floats:
    """Durations of whole steps (s), shape [steps], on a host of one speed, or of one a step.

    `slower`: how much longer kernels take under the GPU's clock, of each step.
    """
    of_model = rates(coefficients, sheet)
    scales, more = np.broadcast_to(host_scale, len(steps)), np.broadcast_to(slower, len(steps))
    predicted = np.empty(len(steps))
    for path, rows, work in split_by_path(steps, graphs, size_factors):
        parts = step_parts(of_model, work, path, scales[rows])
        predicted[rows] = sum(parts) + (more[rows] - 1.0) * sum(parts[_KERNEL_PARTS])
    return predicted


def slowed(clock: tuple[float, float] | None, heat: Floats | None, steps: Observations) -> Floats:
    """How much longer kernels take after what was before them, shape [steps]."""
    if clock is None or heat is None:
        return np.ones(len(steps))
    return 1.0 + np.where(steps.num_prefills > 0, *clock) * heat


def _heat(samples: Sequence[Sample]) -> Floats:
    """Heat before steps with prefills, and before others; shape [steps, 2]."""
    columns = []
    for one in samples:
        heat = np.zeros(len(one.steps)) if one.heat is None else one.heat
        mixed = one.steps.num_prefills > 0
        columns.append(np.stack((heat * mixed, heat * ~mixed), axis=1))
    return np.concatenate(columns)


def _groups(samples: Sequence[Sample], graphs: Graphs) -> list[_Group]:
    """The steps of all samples that one formula prices, joined."""
    pieces: dict[tuple[Any, ...], list[tuple[NDArray[np.int64], StepWork, Floats, int]]] = {}
    first = num_unknown = 0
    for sample in samples:
        num_unknown += not sample.host_known
        host = 0 if sample.host_known else num_unknown
        for path, rows, work in split_by_path(sample.steps, graphs, sample.size_factors):
            key = (sample.sheet, path, work.num_prefills is None, sample.fitted_parts.start)
            piece = (first + rows, work, sample.host_scale[rows], host)
            pieces.setdefault(key, []).append(piece)
        first += len(sample.steps)
    groups = []
    for (sheet, path, _, first_part), found in pieces.items():
        works = [work for _, work, *_ in found]
        columns = (_join(column) for column in zip(*works, strict=True))
        groups.append(
            _Group(
                sheet=sheet,
                path=path,
                rows=np.concatenate([rows for rows, *_ in found]),
                work=StepWork(*columns),
                host_scale=np.concatenate([scale for _, _, scale, _ in found]),
                host=np.concatenate([np.full(len(rows), host) for rows, _, _, host in found]),
                fitted_parts=slice(first_part, _MODEL_PARTS.stop),
            )
        )
    return groups


def _join(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Dealt):
        return Dealt(*(_join(column) for column in zip(*columns, strict=True)))
    return None if columns[0] is None else np.concatenate(columns).astype(np.float64)


def _weights(samples: Sequence[Sample]) -> Floats:
    """No kind of step outweighs the others by its mere number."""
    models = list(dict.fromkeys(sample.sheet for sample in samples))
    kinds = []
    for steps, sheet, *_ in samples:
        size = np.ceil(np.log2(steps.num_tokens)).astype(np.int64)
        kinds.append(models.index(sheet) + len(models) * (2 * size + (steps.num_prefills > 0)))
    _, kind, count = np.unique(np.concatenate(kinds), return_inverse=True, return_counts=True)
    return np.asarray(np.minimum(1.0, _REGIME_STEPS / count)[kind], dtype=np.float64)
