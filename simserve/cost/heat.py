"""How hard a GPU has worked of late: under matrix products its clock falls, and rises again.

All operations are +, -, * and /, which round alike for numbers and arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Heat"]

Number = Any

_TIME_S = 0.05
_NUM_DECODE_STEPS = 7.5
"""Of work and of rest, after which 44 % of what was before is left."""


class Heat:
    """Tokens per second of the latest steps with prefills, as far as they are not forgotten.

    Steps are told apart by their numbers: those between two steps with prefills are decodes, under
    which a GPU recovers. So a run of decodes may be looked at in one go, and cut short afterwards.
    A step with a number that does not come after the last one's begins anew.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._last: int | None = None
        """The last step with prefills."""

    def before(self, step: Number) -> Number:
        """Tokens per second at the start of a step, or of each of several in a row."""
        if self._last is None or np.min(step) <= self._last:
            return 0.0 * step
        return self._rate * _left((step - self._last - 1) / _NUM_DECODE_STEPS)

    def passed(self, step: int, num_tokens: int, seconds: float) -> None:
        """A step with prefills has ended."""
        left, rate = _left(seconds / _TIME_S), num_tokens / seconds
        self._rate = rate + left * (self.before(step) - rate)
        self._last = step


def _left(passed: Number) -> Number:
    """What is left of a difference, by the time since in units of its own."""
    half = 1.0 + 0.5 * passed
    return 1.0 / (half * half)
