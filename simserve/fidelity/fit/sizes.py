"""Finds graphs whose matrix products take longer, or less long, than their work says.

Libraries choose a kernel by the size of a product, and how good that choice is stands in no data
sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.cost.profile_file import LARGEST_SIZE_FACTOR, Graphs, least_size_factor
from simserve.cost.step_model import PARTS, Path, Rates, rates, step_parts
from simserve.cost.step_work import NO_FACTORS, SizeFactors
from simserve.fidelity.fit.step import Sample, slowed
from simserve.fidelity.logs.observations import PathSteps, split_by_path

__all__ = ["bounded", "fit_size_factors", "weighted_median"]

Floats = NDArray[np.float64]

_PRIOR = 0.1
"""Scatter of factors about 1 before anything is measured: few steps of a size move it little."""
_FEWEST, _MOST = 3, 10
"""Steps of a size that tell its factor at all, and beyond which more of them tell nothing new: they
follow one another, on a host of one speed."""
_FEWEST_FOR_SCATTER = 5
_LEAST_SCATTER = 0.01
_DIGITS, _NEAR = 3, 0.01
_ROUNDING = 1e-9
_LINEAR, _HEAD = PARTS.index("linear_s"), PARTS.index("lm_head_s")
_LAUNCH, _INPUTS = PARTS.index("launch_s"), PARTS.index("inputs_s")


class _Told(NamedTuple):
    """What steps tell of their size; shape [steps]."""

    size: NDArray[np.int64]
    excess: Floats
    """Time beyond what is predicted, in units of the products' predicted time."""
    mixed: NDArray[np.bool_]
    """Whether a step has prefills: those scatter more."""

    def take(self, rows: NDArray[np.bool_]) -> _Told:
        """Some of the steps."""
        return _Told(self.size[rows], self.excess[rows], self.mixed[rows])


def fit_size_factors(
    samples: Sequence[Sample],
    coefficients: Mapping[str, float],
    graphs: Graphs,
    clock: tuple[float, float] | None = None,
) -> SizeFactors:
    """Factors on the matrix products of one model, by size of a graph; those near 1 are left out.

    Each factor is drawn to 1, the more the fewer steps there are and the more they scatter. Where
    kernels were not timed by themselves, only sizes are looked at whose products are bound by
    computing, not by reading weights, and only steps whose GPU does not wait for launches; and a
    size has one factor, with prefills or without.
    """
    told = [
        _told(rates(coefficients, sample.sheet), sample, group, clock)
        for sample in samples
        for group in split_by_path(sample.steps, graphs)
        if group.path is not Path.EAGER
    ]
    if not told:
        return NO_FACTORS
    size, excess, mixed = (np.concatenate(columns) for columns in zip(*told, strict=True))
    together = _Told(size, excess, mixed)
    if any(sample.kernels_s is None for sample in samples):
        both = _factors(together, coefficients)
        return SizeFactors(both, both)
    return SizeFactors(
        _factors(together.take(mixed), coefficients), _factors(together.take(~mixed), coefficients)
    )


def _factors(told: _Told, coefficients: Mapping[str, float]) -> dict[int, float]:
    size, excess, mixed = told
    sizes, at, counts = np.unique(size, return_inverse=True, return_counts=True)
    weights = _weights(excess, mixed, at, counts)
    factors = {}
    for place, one in enumerate(sizes.tolist()):
        rows = at == place
        if counts[place] >= _FEWEST:
            precision = weights[rows].mean() * min(counts[place], _MOST)
            middle = weighted_median(excess[rows], weights[rows])
            factors[one] = 1.0 + middle * precision / (precision + _PRIOR**-2)
    return _bounded(factors, coefficients)


def bounded(factors: SizeFactors, coefficients: Mapping[str, float]) -> SizeFactors:
    """Factors within what physics allows, without those too near to 1 to matter."""
    prefills = _bounded(factors.prefills, coefficients)
    if factors.decodes is factors.prefills:
        return SizeFactors(prefills, prefills)
    return SizeFactors(prefills, _bounded(factors.decodes, coefficients))


def _bounded(factors: Mapping[int, float], coefficients: Mapping[str, float]) -> dict[int, float]:
    least = least_size_factor(coefficients)
    unit = 10.0**-_DIGITS
    low = np.ceil(least / unit) * unit
    bounded = {
        size: round(float(np.clip(factor, low, LARGEST_SIZE_FACTOR)), _DIGITS)
        for size, factor in factors.items()
    }
    return {size: factor for size, factor in bounded.items() if abs(factor - 1.0) >= _NEAR}


def _told(
    of_model: Rates, sample: Sample, group: PathSteps, clock: tuple[float, float] | None
) -> _Told:
    path, rows, work = group
    parts = step_parts(of_model, work, path, sample.host_scale[rows])
    fitted_s = sample.fitted_s / slowed(clock, sample.heat, sample.steps)
    excess = (fitted_s[rows] - sum(parts[sample.fitted_parts])) / parts[_LINEAR]
    gpu_s = sum(parts[_INPUTS + 1 : _LAUNCH]) - parts[_HEAD]
    launch_s = of_model.launch_piecewise_s if path is Path.PIECEWISE else 0.0
    computes = of_model.token_products_s * work.num_padded_tokens > of_model.weights_s
    waits = sample.host_scale[rows] * launch_s > gpu_s
    kept = computes & ~waits if sample.kernels_s is None else np.ones(len(rows), dtype=np.bool_)
    sizes = work.num_padded_tokens.astype(np.int64)
    mixed = np.full(len(rows), work.num_prefills is not None)
    return _Told(sizes[kept], excess[kept], mixed[kept])


def _weights(
    excess: Floats, mixed: NDArray[np.bool_], at: NDArray[np.intp], counts: NDArray[np.intp]
) -> Floats:
    """One over the variance of steps of one size, with and without prefills."""
    middles = np.array([np.median(excess[at == place]) for place in range(len(counts))])
    deviation = np.abs(excess - middles[at])
    weights = np.full(len(excess), _PRIOR**-2)
    for kind in (False, True):
        rows = mixed == kind
        several = rows & (counts[at] >= _FEWEST_FOR_SCATTER)
        if several.any():
            scatter = max(1.48 * float(np.median(deviation[several])), _LEAST_SCATTER)
            weights[rows] = scatter**-2
    return weights


def weighted_median(values: Floats, weights: Floats) -> float:
    """Of two that are in the middle the lower one, however sums of weights are rounded."""
    order = np.argsort(values)
    total = weights[order].cumsum()
    half = (1.0 - _ROUNDING) * total[-1] / 2
    return float(values[order][np.searchsorted(total, half)])
