"""Several runs of one configuration with different seeds, as one summary with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.options import Scalar

__all__ = ["summarise_repetitions"]

NUM_RESAMPLES = 10_000
NAMES = ("seed",)
"""Numbers that name a run: a mean of them says nothing."""


def summarise_repetitions(
    summaries: Sequence[Mapping[str, Scalar]], seed: int = 0
) -> dict[str, Scalar]:
    """Means over repetitions, with `<key>_ci95_low` and `<key>_ci95_high` for what varies.

    The interval is the percentile bootstrap of the mean (Efron, 1979): repetitions are drawn with
    replacement, all keys together. What is equal in all repetitions stays as it is; text that
    differs, and numbers missing in one of them, become None.

    Raises:
        ValueError: there are no summaries.
    """
    if not summaries:
        raise ValueError("no repetitions to summarise")
    merged: dict[str, Scalar] = {}
    varying: dict[str, list[float]] = {}
    keys = dict.fromkeys(key for summary in summaries for key in summary)
    for key in keys:
        values = [summary.get(key) for summary in summaries]
        merged[key] = values[0] if all(value == values[0] for value in values) else None
        numbers = [float(v) for v in values if isinstance(v, int | float)]
        if merged[key] is None and len(numbers) == len(values) and key not in NAMES:
            varying[key] = numbers
    intervals = _bootstrap(np.array(list(varying.values())), seed)
    for (key, numbers), (low, high) in zip(varying.items(), intervals, strict=True):
        merged[key] = float(np.mean(numbers))
        merged[f"{key}_ci95_low"] = low
        merged[f"{key}_ci95_high"] = high
    merged["num_repetitions"] = len(summaries)
    return merged


def _bootstrap(values: NDArray[np.float64], seed: int) -> list[tuple[float, float]]:
    """The 2.5th and 97.5th percentile of resampled means of each row of [keys, repetitions]."""
    if not len(values):
        return []
    rng = np.random.default_rng(seed)
    count = values.shape[1]
    draws = rng.multinomial(count, np.full(count, 1.0 / count), size=NUM_RESAMPLES)
    low_high = np.percentile(values @ draws.T / count, [2.5, 97.5], axis=1)
    # A mean lies among its values, whatever its last bit says.
    low_high = low_high.clip(values.min(axis=1), values.max(axis=1))
    return [(float(low), float(high)) for low, high in low_high.T]
