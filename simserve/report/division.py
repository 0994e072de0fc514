"""Where the time of a request went: its life on the clock, cut at the ends of steps into pieces.

A piece ends with the step that it belongs to, so the pieces of a request follow one another without
a gap from its arrival to its last token.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.arrow import column, items
from simserve.metrics.result import RunResult
from simserve.metrics.tables import token_times
from simserve.report.activity import prefill_tokens

__all__ = ["Divider", "Division", "Floats", "Ints", "Part"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Part(IntEnum):
    """What a request did, or waited for."""

    ARRIVING = 0
    """The engine was in a step, and took the request in at its end."""
    QUEUED = 1
    """In the queue, before its first admission."""
    PREFILL = 2
    """A step that computed a chunk of its prompt."""
    HELD = 3
    """Admitted, but without tokens in a step: others had the budget."""
    PREEMPTED = 4
    """Without its blocks, in the queue again."""
    RECOMPUTED = 5
    """A step that computed a chunk after a preemption: what that threw away, and what was left."""
    DECODE = 6
    """A step that yielded a token, as long as such a step takes without prompts in it."""
    STALLED = 7
    """What such a step took longer, because it also computed others' prompts."""


class Division(NamedTuple):
    """Pieces of one request's time in order; all of shape [pieces]."""

    parts: Ints
    start_s: Floats
    end_s: Floats
    step: Ints
    """Row of the steps table; -1 before the first admission."""
    num_tokens: Ints
    """Tokens of its own that the step computed; 0 where it had none, -1 where not recorded."""

    @property
    def duration_s(self) -> Floats:
        """End minus start."""
        return self.end_s - self.start_s

    def seconds(self, part: Part) -> float:
        """All its time of one kind."""
        return float(self.duration_s[self.parts == part].sum())

    def at(self, places: NDArray[Any]) -> Division:
        """Some of the pieces."""
        return Division(
            self.parts[places],
            self.start_s[places],
            self.end_s[places],
            self.step[places],
            self.num_tokens[places],
        )

    def merged(self) -> Division:
        """Neighbours of one kind as one piece, but every chunk by itself."""
        is_chunk = (self.parts == Part.PREFILL) | (self.parts == Part.RECOMPUTED)
        heads = np.flatnonzero((np.diff(self.parts, prepend=-1) != 0) | is_chunk)
        if not len(heads):
            return self
        return Division(
            self.parts[heads],
            self.start_s[heads],
            self.end_s[np.append(heads[1:], len(self.parts)) - 1],
            self.step[heads],
            np.add.reduceat(self.num_tokens, heads),
        )


class Divider:
    """Divides the requests of one run. Rows are those of the requests table."""

    def __init__(self, result: RunResult) -> None:
        requests, steps = result.requests_table, result.steps_table
        self.times = token_times(requests, steps)
        self.end_s: Floats = self.times.ends_s
        self.step_prompt_tokens: Ints = prefill_tokens(result)
        """Tokens of prompts in each step."""
        self._step_preempted: Ints = column(steps, "num_preempted")
        self._arrival_s, self._queued_s, self._scheduled_s, self._ended_s = (
            column(requests, name)
            for name in ("arrival_time_s", "queued_s", "scheduled_s", "ended_s")
        )
        self._num_preemptions: Ints = column(requests, "num_preemptions")
        self.knows_chunks = "prefill_chunk_step" in requests.column_names
        """Whether the run directory tells in which steps prompts were computed."""
        if self.knows_chunks:
            self.chunk_offsets, self.chunk_steps = items(requests, "prefill_chunk_step")
            _, self.chunk_tokens = items(requests, "prefill_chunk_num_tokens")

    @cached_property
    def plain_step_s(self) -> float:
        """Median duration of the steps of this run that only decode; infinite without any."""
        alone = self.step_prompt_tokens == 0
        return float(np.median(self.times.step_gaps_s[alone])) if alone.any() else np.inf

    def divide(self, row: int) -> Division:
        """The pieces of one request, from its arrival to its last token (or its end so far)."""
        known = np.array([self._arrival_s[row], self._queued_s[row], self._scheduled_s[row]])
        if np.isnan(known[2]):  # never admitted
            last = self.end_s[-1] if len(self.end_s) else known[1]
            known[2] = last if np.isnan(self._ended_s[row]) else self._ended_s[row]
        known = np.maximum.accumulate(known)
        inside = self._in_engine(row)
        whole = Division(
            np.concatenate(([Part.ARRIVING, Part.QUEUED], inside.parts)),
            np.concatenate((known[:2], inside.start_s)),
            np.concatenate((known[1:], inside.end_s)),
            np.concatenate(([-1, -1], inside.step)),
            np.concatenate(([0, 0], inside.num_tokens)),
        )
        return whole.at(whole.duration_s > 0)

    def _in_engine(self, row: int) -> Division:
        """From the first admission on: one piece a step, two where a decode was stalled."""
        steps, parts, num_tokens = self._own_steps(row)
        if not len(steps):
            return Division(steps, np.zeros(0), np.zeros(0), steps, steps)
        ends = self.end_s[steps]
        starts = np.concatenate(([min(self._scheduled_s[row], ends[0])], ends[:-1]))
        plain_ends = starts + np.minimum(ends - starts, self._plain_s(parts, starts, ends, steps))
        split = (parts == Part.DECODE) & (self.step_prompt_tokens[steps] > 0)
        split &= plain_ends < ends
        place = np.repeat(np.arange(len(steps)), np.where(split, 2, 1))
        is_rest = np.diff(place, prepend=-1) == 0
        is_cut = np.append(is_rest[1:], False)
        return Division(
            np.where(is_rest, Part.STALLED, parts[place]),
            np.where(is_rest, plain_ends[place], starts[place]),
            np.where(is_cut, plain_ends[place], ends[place]),
            steps[place],
            np.where(is_rest, 0, num_tokens[place]),
        )

    def _own_steps(self, row: int) -> tuple[Ints, Ints, Ints]:
        """The steps from the first to the last in which a request had tokens, and its kind and
        number of tokens in each."""
        decodes, num_decoded = self._decodes(row)
        chunks, num_computed = self._chunks(row, decodes)
        own = np.concatenate((decodes, chunks))
        if not len(own):
            return own, own, own
        steps = np.arange(own.min(), own.max() + 1)
        parts = np.full(len(steps), Part.HELD, dtype=np.int64)
        num_tokens = np.zeros(len(steps), dtype=np.int64)
        for part, where, count in (
            (Part.DECODE, decodes - steps[0], num_decoded),
            (Part.PREFILL, chunks - steps[0], num_computed),
        ):
            parts[where], num_tokens[where] = part, count
        if self._num_preemptions[row]:
            self._mark_preempted(parts, steps)
        return steps, parts, num_tokens

    def _decodes(self, row: int) -> tuple[Ints, Ints]:
        """Steps that yielded tokens of a request, and how many."""
        times, runs = self.times, slice(*self.times.offsets[row : row + 2])
        firsts, num_tokens = times.firsts[runs], times.tokens[runs]
        counts = times.lasts[runs] + 1 - firsts
        before = np.cumsum(counts) - counts
        steps = np.arange(counts.sum()) + np.repeat(firsts - before, counts)
        return steps, np.repeat(num_tokens, counts)

    def _chunks(self, row: int, decodes: Ints) -> tuple[Ints, Ints]:
        """Steps that computed a request's prompt, and how many tokens of it."""
        if self.knows_chunks:
            chunks = slice(*self.chunk_offsets[row : row + 2])
            return self.chunk_steps[chunks], self.chunk_tokens[chunks]
        if not len(decodes):
            return decodes, decodes
        admitted = np.searchsorted(self.end_s, self._scheduled_s[row], side="right")
        steps = np.arange(admitted, decodes.min() + 1)
        return steps, np.full(len(steps), -1)

    def _mark_preempted(self, parts: Ints, steps: Ints) -> None:
        """Who was preempted is so until it has tokens again, and computes again what follows.

        The step that misses it first is the one whose scheduling preempted it.
        """
        places = np.arange(len(parts))
        is_held = parts == Part.HELD
        own, fatal = (
            np.maximum.accumulate(np.where(those, places, -1))
            for those in (~is_held, is_held & (self._step_preempted[steps] > 0))
        )
        is_preempted = fatal > own
        parts[is_preempted] = Part.PREEMPTED
        again = np.logical_or.accumulate(is_preempted) & (parts == Part.PREFILL)
        parts[again] = Part.RECOMPUTED

    def _plain_s(self, parts: Ints, starts: Floats, ends: Floats, steps: Ints) -> float:
        """How long a decode step of this request takes that computes no prompts; median."""
        alone = (parts == Part.DECODE) & (self.step_prompt_tokens[steps] == 0)
        if alone.any():
            return float(np.median((ends - starts)[alone]))
        return self.plain_step_s
