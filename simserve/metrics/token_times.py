"""When tokens came out, kept as runs of steps: nobody stores a float per token.

A run is (first step, number of steps, tokens per step): the request yielded so many tokens in each
of those steps. With one clock value per step that gives every token time exactly. Several tokens
of one step are one emission event: one inter-token gap, however many tokens it carried.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import compress, filterfalse

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.metrics.quantiles import Sample

__all__ = ["TokenLog", "TokenTimes"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class TokenLog:
    """Writes token runs while a simulation goes on, at a cost of the changes between steps."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._firsts = array("q")
        self._counts = array("q")
        self._tokens = array("q")
        self._open: dict[str, tuple[int, int, int]] = {}
        """Request to (row, first step, tokens per step) of the run in progress."""
        self._emitters: list[str] = []
        """Keys of `_open` in the order of the last step that emitted."""
        self._single = True
        """Whether all runs in progress have one token per step."""
        self._paused: dict[str, int] = {}
        """Tokens in closed runs of requests that have not ended."""
        self._taken: list[tuple[Ints, ...]] = []
        """Of rows handed out: how many runs each has, and three columns of all runs."""

    def emit(
        self, ids: list[str], num_emitted: Sequence[int], step: int, rows: dict[str, int]
    ) -> None:
        """Requests `ids` yield `num_emitted` tokens each in step `step` (and in those that follow).

        `rows` tells the row of every live request.

        Raises:
            SimserveError: a request that is not live yields a token.
        """
        ones = num_emitted.count(True)  # 1, too; mostly a plan's `samples`, counted by identity
        emitters = ids if ones == len(ids) else list(compress(ids, num_emitted))
        if ones == len(emitters) and self._single:
            if emitters == self._emitters:
                return
            fresh = self._changes(emitters, step)
            tokens = [1] * len(fresh)
        else:
            now = dict(zip(emitters, compress(num_emitted, num_emitted), strict=True))
            fresh = self._changes_of_many(now, step)
            tokens = [now[request_id] for request_id in fresh]
        for request_id, count in zip(fresh, tokens, strict=True):
            if request_id not in rows:
                raise SimserveError(
                    f"request '{request_id}' yielded {count} token(s) in step {step}, "
                    "but it has ended or never arrived; the scheduler must report 0 for it"
                )
            self._open[request_id] = (rows[request_id], step, count)
        self._emitters = emitters

    def _changes(self, emitters: list[str], step: int) -> list[str]:
        """Close the runs of those that pause; return those that begin one. One token a step."""
        known = len(self._emitters)
        if emitters[:known] == self._emitters:
            return emitters[known:]
        now = set(emitters)
        for request_id in filterfalse(now.__contains__, self._emitters):
            self._pause(request_id, step)
        return list(filterfalse(self._open.__contains__, emitters))

    def _changes_of_many(self, now: dict[str, int], step: int) -> list[str]:
        """The same for steps in which requests yield different numbers of tokens."""
        for request_id in self._emitters:
            if now.get(request_id) != self._open[request_id][2]:
                self._pause(request_id, step)
        self._single = all(count == 1 for count in now.values())
        return [request_id for request_id in now if request_id not in self._open]

    def _close(self, request_id: str, step: int) -> int:
        """End a run before step `step`; the tokens it yielded."""
        row, first, tokens = self._open.pop(request_id)
        self._rows.append(row)
        self._firsts.append(first)
        self._counts.append(step - first)
        self._tokens.append(tokens)
        return (step - first) * tokens

    def _pause(self, request_id: str, step: int) -> None:
        self._paused[request_id] = self._paused.get(request_id, 0) + self._close(request_id, step)

    def finish(self, request_ids: Sequence[str], step: int) -> None:
        """These requests have ended and yield nothing from step `step` on."""
        ended = [request_id for request_id in request_ids if request_id in self._open]
        for request_id in ended:
            self._close(request_id, step)
        for request_id in request_ids:
            self._paused.pop(request_id, None)
        if ended:
            self._emitters = self._emitters.copy()  # it may be a plan's
            for request_id in ended:
                self._emitters.remove(request_id)

    def num_tokens(self, request_id: str, step: int) -> int:
        """Tokens that a request which has not ended yielded before step `step`."""
        _, first, tokens = self._open.get(request_id, (0, step, 0))
        return self._paused.get(request_id, 0) + (step - first) * tokens

    def take(self, ends_s: Floats, first: int, stop: int) -> TokenTimes:
        """Hand out the runs of rows `first` ... `stop - 1`, whose requests have all ended."""
        rows, *columns = self._columns()
        inside = rows < stop
        taken = _by_row(ends_s, rows[inside] - first, [c[inside] for c in columns], stop - first)
        self._taken.append(taken.columns)
        rest = [array("q", column[~inside].tobytes()) for column in (rows, *columns)]
        self._rows, self._firsts, self._counts, self._tokens = rest
        return taken

    def rest(self, ends_s: Floats, first: int, num_rows: int) -> TokenTimes:
        """The runs of rows from `first` on, those in progress closed after the last step."""
        self.finish(self._emitters, len(ends_s))
        rows, *columns = self._columns()
        return _by_row(ends_s, rows - first, columns, num_rows - first)

    def times(self, ends_s: Floats, rest: TokenTimes) -> TokenTimes:
        """All runs: those handed out, and the `rest`."""
        if not self._taken:
            return rest
        pieces = zip(*self._taken, rest.columns, strict=True)
        lengths, *columns = (np.concatenate(piece) for piece in pieces)
        offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        return TokenTimes(ends_s, offsets, *columns)

    def _columns(self) -> list[Ints]:
        return [
            np.array(column, dtype=np.int64)
            for column in (self._rows, self._firsts, self._counts, self._tokens)
        ]


def _by_row(ends_s: Floats, rows: Ints, columns: Sequence[Ints], num_rows: int) -> TokenTimes:
    """Runs sorted by row, in each row by time."""
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=offsets[1:])
    return TokenTimes(ends_s, offsets, *(column[order] for column in columns))


class TokenTimes:
    """All token times of a run of the engine. Rows are requests; token runs are sorted by row.

    Shapes: ends_s [steps]; offsets [rows + 1]: the runs of row i are offsets[i] … offsets[i+1];
    firsts, counts, tokens [runs].
    """

    def __init__(
        self, ends_s: Floats, offsets: Ints, firsts: Ints, counts: Ints, tokens: Ints
    ) -> None:
        self.ends_s = ends_s
        self.offsets = offsets
        self.firsts = firsts
        self.counts = counts
        self.tokens = tokens

    @property
    def columns(self) -> tuple[Ints, ...]:
        """How many runs each row has, and first step, steps and tokens of all of them."""
        return np.diff(self.offsets), self.firsts, self.counts, self.tokens

    @property
    def num_rows(self) -> int:
        """Number of requests."""
        return len(self.offsets) - 1

    @cached_property
    def rows(self) -> Ints:
        """Row of each token run."""
        return np.repeat(np.arange(self.num_rows), np.diff(self.offsets))

    @cached_property
    def lasts(self) -> Ints:
        """Last step of each token run."""
        return self.firsts + self.counts - 1

    @cached_property
    def num_tokens(self) -> Ints:
        """Tokens out per request."""
        return self._sums(self.counts * self.tokens)

    @cached_property
    def num_events(self) -> Ints:
        """Steps per request in which tokens came out."""
        return self._sums(self.counts)

    @cached_property
    def first_token_s(self) -> Floats:
        """Time of the first token per request, NaN without one."""
        return self._at(self.firsts, self.offsets[:-1])

    @cached_property
    def last_token_s(self) -> Floats:
        """Time of the last token per request, NaN without one."""
        return self._at(self.lasts, self.offsets[1:] - 1)

    def _sums(self, values: Ints) -> Ints:
        cumulated = np.concatenate(([0], np.cumsum(values)))
        return np.diff(cumulated[self.offsets])

    def _at(self, steps: Ints, runs: Ints) -> Floats:
        times = np.full(self.num_rows, np.nan)
        some = np.diff(self.offsets) > 0
        times[some] = self.ends_s[steps[runs[some]]]
        return times

    @cached_property
    def step_gaps_s(self) -> Floats:
        """Time since the end of the step before, shape [steps]; the first is never used."""
        return np.diff(self.ends_s, prepend=self.ends_s[:1])

    @cached_property
    def _stalls(self) -> tuple[Ints, Floats]:
        """Runs that continue an earlier run of the same request, and the gap before each (s)."""
        later = np.flatnonzero(self.rows[1:] == self.rows[:-1]) + 1
        return later, self.ends_s[self.firsts[later]] - self.ends_s[self.lasts[later - 1]]

    def itl(
        self, of: Mask | None = None, start_s: float = -np.inf, end_s: float = np.inf
    ) -> Sample:
        """Every gap between consecutive emission events of one request (s), pooled.

        A gap belongs to the time at which it ends: it counts if that is in [start_s, end_s).
        `of` is a mask over requests; None takes all.
        """
        inside = (self.ends_s >= start_s) & (self.ends_s < end_s)
        chosen = np.ones(len(self.rows), dtype=np.bool_) if of is None else of[self.rows]
        weights = self._steps_covered(self.firsts[chosen] + 1, self.lasts[chosen] + 1) * inside
        later, gaps = self._stalls
        kept = chosen[later] & inside[self.firsts[later]]
        used = weights > 0
        return Sample(
            np.concatenate((self.step_gaps_s[used], gaps[kept])),
            np.concatenate((weights[used], np.ones(int(kept.sum()), dtype=np.int64))),
        )

    def _steps_covered(self, starts: Ints, stops: Ints, weights: Ints | None = None) -> Ints:
        """How many of the ranges [start, stop) cover each step, shape [steps]."""
        num_steps = len(self.ends_s)
        edges = np.zeros(num_steps + 1, dtype=np.int64)
        np.add.at(edges, starts, 1 if weights is None else weights)
        np.subtract.at(edges, stops, 1 if weights is None else weights)
        return np.cumsum(edges[:num_steps])

    def tokens_per_step(self, of: Mask | None = None) -> Ints:
        """Tokens that came out of each step, shape [steps]."""
        chosen = slice(None) if of is None else of[self.rows]
        firsts, lasts = self.firsts[chosen], self.lasts[chosen]
        return self._steps_covered(firsts, lasts + 1, self.tokens[chosen])

    @cached_property
    def max_itl_s(self) -> Floats:
        """Longest gap per request, NaN with fewer than two emission events."""
        longest = np.full(self.num_rows, -np.inf)
        inner = np.flatnonzero(self.counts > 1)
        if len(inner):
            # reduceat takes [start, stop) at even places; the sentinel keeps stop in range.
            ranges = np.stack((self.firsts[inner] + 1, self.lasts[inner] + 1), axis=1).ravel()
            gaps = np.append(self.step_gaps_s, -np.inf)
            np.maximum.at(longest, self.rows[inner], np.maximum.reduceat(gaps, ranges)[::2])
        later, stalls = self._stalls
        np.maximum.at(longest, self.rows[later], stalls)
        longest[np.isneginf(longest)] = np.nan
        return longest

    def itl_lists(self) -> tuple[Ints, Floats]:
        """Gaps of every request written out: offsets [rows + 1] into the gaps (s)."""
        within = np.arange(int(self.counts.sum())) - np.repeat(
            np.cumsum(self.counts) - self.counts, self.counts
        )
        steps = np.repeat(self.firsts, self.counts) + within
        starts = np.cumsum(self.num_events) - self.num_events
        gaps = np.delete(np.diff(self.ends_s[steps], prepend=0.0), starts[self.num_events > 0])
        offsets = np.zeros(self.num_rows + 1, dtype=np.int64)
        np.cumsum(np.maximum(self.num_events - 1, 0), out=offsets[1:])
        return offsets, gaps
