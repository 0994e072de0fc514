"""Per-step columns, written a run of steps at a time and expanded to one row a step later."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.protocols import StepRecord
from simserve.types import StepPlan

__all__ = ["StepColumns", "StepLog"]

Column = NDArray[Any]
KNOWN_STOPS = ("budget", "max_num_seqs", "blocks", "preemption", "empty")


@dataclass(slots=True, kw_only=True)
class StepColumns:
    """One value a step; every array has shape [steps]."""

    first_id: int = 0
    """Id of the first of the steps, which follow one another."""
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    parts: dict[str, NDArray[np.float64]]
    """Seconds by what took them; NaN where a step has no such part."""
    num_running: NDArray[np.int64]
    num_waiting: NDArray[np.int64]
    num_scheduled: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_decode_tokens: NDArray[np.int64]
    """Tokens of requests whose query length is at most the decode threshold."""
    num_preempted: NDArray[np.int64]
    num_free_blocks: NDArray[np.int64]
    prefix_cache_queries: NDArray[np.int64]
    prefix_cache_hits: NDArray[np.int64]
    evicted_cached_blocks: NDArray[np.int64]
    num_shared_kv_tokens: NDArray[np.int64]
    """Tokens in blocks of several requests: each block counts once for all but one of them."""
    admission_stop: NDArray[np.int8]
    """Index into `admission_stops`."""
    admission_stops: tuple[str, ...]
    gauges: dict[str, NDArray[np.int64]]
    """Numbers that the KV manager reports of itself."""

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.end_s)

    @property
    def duration_s(self) -> NDArray[np.float64]:
        """End minus start."""
        return self.end_s - self.start_s

    def rows(self, start: int, stop: int) -> StepColumns:
        """Steps `start` ... `stop - 1` of these."""
        return self._changed(lambda column: column[start:stop], self.first_id + start)

    def _changed(self, change: Callable[[Column], Column], first_id: int) -> StepColumns:
        return StepColumns(
            first_id=first_id,
            parts={name: change(column) for name, column in self.parts.items()},
            gauges={name: change(column) for name, column in self.gauges.items()},
            admission_stops=self.admission_stops,
            **{name: change(getattr(self, name)) for name in COLUMNS},
        )

    @classmethod
    def joined(cls, pieces: Sequence[StepColumns]) -> StepColumns:
        """Pieces that follow one another; NaN where a piece has no such part."""
        if len(pieces) == 1:
            return pieces[0]
        parts = dict.fromkeys(name for piece in pieces for name in piece.parts)
        return cls(
            first_id=pieces[0].first_id,
            parts={
                name: np.concatenate(
                    [piece.parts.get(name, np.full(piece.num_steps, np.nan)) for piece in pieces]
                )
                for name in parts
            },
            gauges={
                name: np.concatenate([piece.gauges[name] for piece in pieces])
                for name in pieces[-1].gauges
            },
            admission_stops=pieces[-1].admission_stops,
            **{
                name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in COLUMNS
            },
        )


COLUMNS = tuple(
    field.name
    for field in fields(StepColumns)
    if field.name not in ("first_id", "parts", "gauges", "admission_stops")
)
"""Names of the plain columns."""


WIDE = ("prefix_cache_queries", "prefix_cache_hits")
"""Counts that may need more than 32 bits in one step."""
IN_TABLES_ONLY = ("num_shared_kv_tokens",)
"""Counts that no summary needs."""


class _Kept:
    """What a summary needs of many steps: columns that grow in place, most counts in 32 bits.

    Ends are not among them, as the log has those of all steps, nor is what only tables have.
    """

    def __init__(self, like: StepColumns) -> None:
        self._columns = {
            name: array(self._code(getattr(like, name), name))
            for name in COLUMNS
            if name not in ("end_s", *IN_TABLES_ONLY)
        }
        self._gauges = {name: array("q") for name in like.gauges}

    @staticmethod
    def _code(column: Column, name: str) -> str:
        kind = column.dtype.char
        return kind if kind in "db" else "q" if name in WIDE else "i"

    def add(self, steps: StepColumns) -> None:
        """Append steps."""
        for name, kept in self._columns.items():
            kept.frombytes(getattr(steps, name).astype(kept.typecode).tobytes())
        for name, kept in self._gauges.items():
            kept.frombytes(steps.gauges[name].tobytes())

    def columns(self, ends_s: array[float], admission_stops: tuple[str, ...]) -> StepColumns:
        """Views of all of them; nothing can be appended while these exist."""
        columns: dict[str, Any] = {
            name: np.frombuffer(kept, kept.typecode) for name, kept in self._columns.items()
        } | dict.fromkeys(IN_TABLES_ONLY, np.zeros(0, dtype=np.int64))
        gauges = {name: np.frombuffer(kept, np.int64) for name, kept in self._gauges.items()}
        return StepColumns(
            end_s=np.frombuffer(ends_s),
            parts={},
            gauges=gauges,
            admission_stops=admission_stops,
            **columns,
        )


class StepLog:
    """Takes in step records. One that covers many steps costs as much as one that covers one."""

    CHUNK = 512
    """Records that are kept as they came before they are turned into columns, all at once."""

    def __init__(self, decode_threshold: int = 1) -> None:
        self.num_steps = 0
        """Steps taken in so far."""
        self.num_taken = 0
        """Those of them that `take` has handed out, the first ones."""
        self._decode_threshold = decode_threshold
        self._ends_s = array("d")
        """Of all steps but those of the recent records."""
        self._stops = {name: code for code, name in enumerate(KNOWN_STOPS)}
        self._recent: list[StepRecord] = []
        self._kept: _Kept | None = None
        """Steps that were handed out."""
        self._pieces: list[StepColumns] = []
        """Further steps; those of the recent records follow."""

    def add(self, record: StepRecord) -> None:
        """Append `record.run.count` steps.

        Raises:
            SimserveError: a result or free-block column does not have one value a step.
        """
        _, count = record.run
        num_ends, num_free = len(record.result.ends_s), len(record.num_free_blocks)
        if not count == num_ends == num_free == len(record.num_evicted_blocks):
            raise SimserveError(
                f"a step result does not have one value for each of its {count} steps: "
                f"{num_ends} end times and {num_free} free-block counts"
            )
        self.num_steps += count
        self._recent.append(record)
        if len(self._recent) == self.CHUNK:
            self._pack()

    def ends_s(self) -> NDArray[np.float64]:
        """When each step ended, from the first one on."""
        self._pack()
        return np.array(self._ends_s)

    def take(self, count: int) -> StepColumns:
        """Hand out the next `count` steps, and keep of them what a summary needs."""
        steps = self.rest()
        taken = steps.rows(0, count)
        self.num_taken += count
        self._keep(taken)
        self._pieces = [steps.rows(count, steps.num_steps)]
        return taken

    def rest(self) -> StepColumns:
        """The steps that are not handed out."""
        self._pack()
        self._pieces = [StepColumns.joined(self._pieces)] if self._pieces else [_no_steps()]
        return self._pieces[0]

    def columns(self) -> StepColumns:
        """All steps so far. If some were handed out, the others count as such now, too; then there
        are no parts, and nothing in the columns that only tables have."""
        rest = self.rest()
        if self._kept is None:
            return rest
        if rest.num_steps:
            self.take(rest.num_steps)
        return self._kept.columns(self._ends_s, tuple(self._stops))

    def _keep(self, steps: StepColumns) -> None:
        if self._kept is None:
            self._kept = _Kept(steps)
        self._kept.add(steps)

    def _pack(self) -> None:
        """Turn recent records into one value a step."""
        if not self._recent:
            return
        recent, self._recent = self._recent, []
        plans, counts = zip(*[record.run for record in recent], strict=True)
        results = [record.result for record in recent]
        parts = [result.parts for result in results]
        ends = _joined([result.ends_s for result in results], np.float64)
        of = np.repeat(np.arange(len(counts)), counts)  # the record that each step is of
        gaps = _numbers([result.gap_s for result in results], np.float64)[of]
        first = np.cumsum(counts) - counts
        starts = np.concatenate((ends[:1], ends[:-1] + gaps[:-1]))
        starts[first] = [record.start_s for record in recent]
        preempted = np.zeros(len(ends), dtype=np.int64)
        preempted[first] = [len(plan.preempted_ids) for plan in plans]
        of_records = {
            "num_running": [record.num_running for record in recent],
            "num_waiting": [record.num_waiting for record in recent],
            **self._of(plans),
        }
        self._pieces.append(
            StepColumns(
                first_id=len(self._ends_s),
                start_s=starts,
                end_s=ends,
                parts={
                    name: _column(parts, counts, of, name)
                    for name in dict.fromkeys(chain.from_iterable(parts))
                },
                num_preempted=preempted,
                num_free_blocks=_joined([record.num_free_blocks for record in recent], np.int64),
                evicted_cached_blocks=_joined(
                    [record.num_evicted_blocks for record in recent], np.int64
                ),
                gauges={
                    name: _numbers([record.gauges[name] for record in recent], np.int64)
                    for name in recent[0].gauges
                },
                admission_stop=self._stop_codes([plan.admission_stop for plan in plans])[of],
                admission_stops=tuple(self._stops),
                **{name: _numbers(values, np.int64)[of] for name, values in of_records.items()},
            )
        )
        self._ends_s.frombytes(ends.tobytes())

    def _stop_codes(self, stops: Sequence[str]) -> Column:
        """The codes of admission stops; unknown ones get the next."""
        for stop in dict.fromkeys(stops):
            self._stops.setdefault(stop, len(self._stops))
        return np.array([self._stops[stop] for stop in stops], dtype=np.int8)

    def _of(self, plans: Sequence[StepPlan]) -> dict[str, list[int]]:
        """What the plan of a record says of each of its steps."""
        threshold = self._decode_threshold
        num_tokens = [plan.num_tokens for plan in plans]
        lookups = [plan.lookups for plan in plans]
        return {
            "num_scheduled": list(map(len, num_tokens)),
            "num_tokens": list(map(sum, num_tokens)),
            "num_decode_tokens": [tokens.count(1) for tokens in num_tokens]
            if threshold == 1
            else [sum(n for n in tokens if n <= threshold) for tokens in num_tokens],
            "num_shared_kv_tokens": [plan.num_shared_kv_tokens for plan in plans],
            "prefix_cache_queries": [each.queries for each in lookups],
            "prefix_cache_hits": [each.hits for each in lookups],
        }


def _no_steps() -> StepColumns:
    floats = dict.fromkeys(("start_s", "end_s"), np.zeros(0))
    columns: dict[str, Any] = dict.fromkeys(COLUMNS, np.zeros(0, dtype=np.int64))
    return StepColumns(parts={}, gauges={}, admission_stops=KNOWN_STOPS, **(columns | floats))


def _column(
    parts: Sequence[Mapping[str, Any]], counts: Sequence[int], of: Column, name: str
) -> NDArray[np.float64]:
    """Seconds of a part in each step of some records, NaN where a record has no such part.

    Raises:
        SimserveError: a part has neither one value a step nor one number for all.
    """
    seconds = [of_record.get(name, nan) for of_record in parts]
    if set(map(type, seconds)) == {float}:
        return _numbers(seconds, np.float64)[of]
    places = [at for at, value in enumerate(seconds) if not isinstance(value, (float, int))]
    pieces = [seconds[at] for at in places]
    for at, piece in zip(places, pieces, strict=True):
        if len(piece) != counts[at]:
            raise SimserveError(
                f"part {name} of a step result has {len(piece)} values for {counts[at]} steps"
            )
        seconds[at] = nan
    column = _numbers(seconds, np.float64)[of]
    if pieces:
        varies = np.zeros(len(counts), dtype=np.bool_)
        varies[places] = True
        column[varies[of]] = np.concatenate(pieces)
    return column


def _numbers(values: Sequence[Any], dtype: type) -> Column:
    """An array of the values, made faster than `np.array` makes one of a list."""
    return np.fromiter(values, dtype, len(values))


def _joined(pieces: Iterable[Iterable[Any]], dtype: type) -> Column:
    """The values of all pieces."""
    return np.fromiter(chain.from_iterable(pieces), dtype)
