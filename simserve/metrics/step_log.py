"""Per-step columns, written a run of steps at a time and expanded to one row a step later."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.protocols import StepRecord

__all__ = ["StepColumns", "StepLog"]

Column = NDArray[Any]
KNOWN_STOPS = ("budget", "max_num_seqs", "blocks", "preemption", "empty")
NUM_FIELDS = 10
"""Whole numbers kept of a record."""


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


class _Kept:
    """What a summary needs of many steps: columns that grow in place, most counts in 32 bits.

    Ends are not among them: the log has those of all steps.
    """

    def __init__(self, like: StepColumns) -> None:
        self._columns = {
            name: array(self._code(getattr(like, name), name))
            for name in COLUMNS
            if name != "end_s"
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
        }
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
    """Records that are kept as they came before they are turned into numbers, all at once."""

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
        self._expanded: list[StepColumns] = []
        """Further steps; those of the records below follow."""
        self._num_expanded = 0
        self._empty()

    def _empty(self) -> None:
        self._runs = array("q")
        """`NUM_FIELDS` whole numbers a record."""
        self._starts_s = array("d")
        self._gaps_s = array("d")
        """One a record, as the starts; the next two have one value a step."""
        self._free = array("q")
        self._evicted = array("q")
        self._parts: list[dict[str, NDArray[np.float64]]] = []
        self._gauges: dict[str, array[int]] = {}

    def add(self, record: StepRecord) -> None:
        """Append `record.run.count` steps.

        Raises:
            SimserveError: a result or free-block column does not have one value a step.
        """
        count, result, free = record.run.count, record.result, record.num_free_blocks
        if not count == len(result.ends_s) == len(free) == len(record.num_evicted_blocks):
            raise SimserveError(
                f"a step result does not have one value for each of its {count} steps: "
                f"{len(result.ends_s)} end times and {len(free)} free-block counts"
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
        self._expanded = [steps.rows(count, steps.num_steps)]
        return taken

    def rest(self) -> StepColumns:
        """The steps that are not handed out."""
        self._pack()
        if self._runs or not self._expanded:
            self._expanded = [StepColumns.joined([*self._expanded, self._expand()])]
        return self._expanded[0]

    def columns(self) -> StepColumns:
        """All steps so far. If some were handed out, the others count as such now, too; then there
        are no parts."""
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
        """Turn recent records into numbers."""
        recent, self._recent = self._recent, []
        results = [record.result for record in recent]
        self._runs.extend(chain.from_iterable(map(self._numbers, recent)))
        self._starts_s.extend([record.start_s for record in recent])
        self._gaps_s.extend([result.gap_s for result in results])
        self._ends_s.extend(chain.from_iterable([result.ends_s for result in results]))
        self._free.extend(chain.from_iterable([record.num_free_blocks for record in recent]))
        self._evicted.extend(chain.from_iterable([r.num_evicted_blocks for r in recent]))
        parts = [(record.run.count, record.result.parts) for record in recent]
        names = dict.fromkeys(name for _, named in parts for name in named)
        self._parts.append({name: _column(parts, name) for name in names})
        for record in recent:
            for name, value in record.gauges.items():
                self._gauges.setdefault(name, array("q")).append(value)

    def _numbers(self, record: StepRecord) -> tuple[int, ...]:
        """The whole numbers of a record, in the order in which `_expand` reads them."""
        plan, count = record.run
        num_tokens, threshold = plan.num_tokens, self._decode_threshold
        if threshold == 1:
            num_decode_tokens = num_tokens.count(1)
        else:
            num_decode_tokens = sum(n for n in num_tokens if n <= threshold)
        return (
            count,
            record.num_running,
            record.num_waiting,
            len(num_tokens),
            sum(num_tokens),
            num_decode_tokens,
            len(plan.preempted_ids),
            plan.lookups.queries,
            plan.lookups.hits,
            self._stops.setdefault(plan.admission_stop, len(self._stops)),
        )

    def _expand(self) -> StepColumns:
        """Turn the records into one value a step."""
        runs = np.array(self._runs).reshape(-1, NUM_FIELDS).T
        counts, first = runs[0], np.cumsum(runs[0]) - runs[0]
        ends = np.array(self._ends_s[self._num_expanded :])
        gaps = np.array(self._gaps_s).repeat(counts)
        starts = np.concatenate((ends[:1], ends[:-1] + gaps[:-1]))
        starts[first] = self._starts_s
        each = [np.repeat(column, counts) for column in runs]
        columns = StepColumns(
            first_id=self._num_expanded,
            start_s=starts,
            end_s=ends,
            parts=self._all_parts(),
            num_running=each[1],
            num_waiting=each[2],
            num_scheduled=each[3],
            num_tokens=each[4],
            num_decode_tokens=each[5],
            num_preempted=_only_at(first, runs[6], len(ends)),
            num_free_blocks=np.array(self._free),
            prefix_cache_queries=each[7],
            prefix_cache_hits=each[8],
            evicted_cached_blocks=np.array(self._evicted),
            admission_stop=each[9].astype(np.int8),
            admission_stops=tuple(self._stops),
            gauges={name: np.array(values) for name, values in self._gauges.items()},
        )
        self._num_expanded = self.num_steps
        self._empty()
        return columns

    def _all_parts(self) -> dict[str, NDArray[np.float64]]:
        names = dict.fromkeys(name for parts in self._parts for name in parts)
        lengths = [len(next(iter(parts.values()))) if parts else 0 for parts in self._parts]
        return {
            name: np.concatenate(
                [
                    parts.get(name, np.full(length, np.nan))
                    for parts, length in zip(self._parts, lengths, strict=True)
                ]
            )
            for name in names
        }


def _column(recent: list[tuple[int, Mapping[str, Any]]], name: str) -> NDArray[np.float64]:
    """Seconds of a part in each step of some records, NaN where a record has no such part.

    Raises:
        SimserveError: a part has neither one value a step nor one number for all.
    """
    values: list[float] = []
    for count, parts in recent:
        seconds = parts.get(name, np.nan)
        if isinstance(seconds, float | int):
            values += [seconds] * count
        elif len(seconds) == count:
            values += np.asarray(seconds).tolist()
        else:
            raise SimserveError(
                f"part {name} of a step result has {len(seconds)} values for {count} steps"
            )
    return np.array(values)


def _only_at(
    places: NDArray[np.int64], values: NDArray[np.int64], num_steps: int
) -> NDArray[np.int64]:
    """An array that is 0 but for `values` at `places`."""
    column = np.zeros(num_steps, dtype=np.int64)
    column[places] = values
    return column
