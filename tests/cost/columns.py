"""What a price says of each step, whichever form it has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["column"]


def column(values: float | Sequence[float] | NDArray[np.float64], count: int = 1) -> list[float]:
    """One number a step; a part of a price may be one number that holds for every step."""
    if isinstance(values, int | float):
        return [float(values)] * count
    assert len(values) == count
    return [float(value) for value in values]
