"""In which steps a request computed its prompt, and how much of it: one entry a chunk."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.types import Kind, StepRun

__all__ = ["PrefillChunks", "PrefillLog"]


class PrefillChunks(NamedTuple):
    """Chunks of request i are offsets[i] … offsets[i + 1] of steps and tokens, in order of time."""

    offsets: NDArray[np.int64]
    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]


class PrefillLog:
    """Notes chunks while a simulation goes on. Steps in which nobody prefills cost nothing."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._steps = array("q")
        self._tokens = array("q")
        self.open: set[str] = set()
        """Requests admitted, or admitted again, that have not yielded a token since."""

    def stepped(
        self, run: StepRun, num_emitted: Sequence[int], step: int, rows: dict[str, int]
    ) -> None:
        """Take in a run of steps, the first of which is `step`. `rows` has every live request."""
        plan, count = run
        for request_id, kind in plan.kinds.items():
            if kind is not Kind.GHOST and request_id in rows:
                self.open.add(request_id)
        self.open.difference_update(plan.preempted_ids)
        left = len(self.open)
        place = len(plan.request_ids)
        while left and place:  # from the end, where those stand that came last
            place -= 1
            request_id = plan.request_ids[place]
            if request_id not in self.open:
                continue
            left -= 1
            # The chunk that yields a token is the last: the run goes on with decodes.
            for number in range(1 if num_emitted[place] else count):
                self._rows.append(rows[request_id])
                self._steps.append(step + number)
                self._tokens.append(plan.num_tokens[place])
            if num_emitted[place]:
                self.open.discard(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        self.open.difference_update(request_ids)

    def take(self, first: int, stop: int) -> PrefillChunks:
        """Hand out the chunks of rows `first` ... `stop - 1`; they are not kept."""
        columns = [np.array(column) for column in (self._rows, self._steps, self._tokens)]
        inside = columns[0] < stop
        rest = [array("q", column[~inside].tobytes()) for column in columns]
        self._rows, self._steps, self._tokens = rest
        rows, steps, tokens = (column[inside] for column in columns)
        return _by_row(rows - first, steps, tokens, stop - first)

    def rest(self, first: int, num_rows: int) -> PrefillChunks:
        """The chunks of rows from `first` on."""
        rows, steps, tokens = (
            np.array(values, dtype=np.int64) for values in (self._rows, self._steps, self._tokens)
        )
        return _by_row(rows - first, steps, tokens, num_rows - first)


def _by_row(
    rows: NDArray[np.int64], steps: NDArray[np.int64], tokens: NDArray[np.int64], num_rows: int
) -> PrefillChunks:
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=offsets[1:])
    return PrefillChunks(offsets, steps[order], tokens[order])
