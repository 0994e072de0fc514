"""Whose prompts kept a request waiting: the time of steps, shared out by the tokens in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.report.division import Divider

__all__ = ["Culprit", "Ledger"]


class Culprit(NamedTuple):
    """Another request, and the time that its prompt took from somebody."""

    row: int
    seconds: float
    num_tokens: int
    """Of its prompt, in the steps in question."""


class Ledger:
    """All chunks of prompts of a run, by step."""

    def __init__(self, divider: Divider) -> None:
        rows = np.repeat(np.arange(divider.times.num_rows), np.diff(divider.chunk_offsets))
        order = np.argsort(divider.chunk_steps, kind="stable")
        self._rows = rows[order]
        self._tokens = divider.chunk_tokens[order]
        self._steps = divider.chunk_steps[order]

    def culprits(
        self, steps: NDArray[np.int64], seconds: NDArray[np.float64], but: int
    ) -> list[Culprit]:
        """Requests other than `but` that computed prompts in `steps`, the most costly first.

        `seconds` of each step are shared out by the tokens of the prompts in it.
        """
        cost: dict[int, list[float]] = {}
        firsts = np.searchsorted(self._steps, steps, side="left")
        stops = np.searchsorted(self._steps, steps, side="right")
        for first, stop, lost in zip(firsts, stops, seconds, strict=True):
            chunks = [
                (int(row), int(tokens))
                for row, tokens in zip(
                    self._rows[first:stop], self._tokens[first:stop], strict=True
                )
                if row != but
            ]
            total = sum(tokens for _, tokens in chunks)
            for row, tokens in chunks:
                entry = cost.setdefault(row, [0.0, 0])
                entry[0] += float(lost) * tokens / total
                entry[1] += tokens
        found = [Culprit(row, lost, int(tokens)) for row, (lost, tokens) in cost.items()]
        return sorted(found, key=lambda one: (-one.seconds, one.row))
