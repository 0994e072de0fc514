"""Per-step columns, written a run of steps at a time and expanded to one row a step at the end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.protocols import StepRecord

__all__ = ["StepColumns", "StepLog"]

KNOWN_STOPS = ("budget", "max_num_seqs", "blocks", "preemption", "empty")


@dataclass(slots=True, kw_only=True)
class StepColumns:
    """One value a step; every array has shape [steps]. The row number is the step's id."""

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


class _Chunk(NamedTuple):
    """Some records as arrays: runs [records, fields], starts [records], the rest [steps]."""

    runs: NDArray[np.int64]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    free: NDArray[np.int64]
    evicted: NDArray[np.int64]
    parts: dict[str, NDArray[np.float64]]

    @classmethod
    def empty(cls) -> _Chunk:
        """No records."""
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(np.zeros((0, 10), dtype=np.int64), nothing, nothing, none, none, {})


class StepLog:
    """Takes in step records. One that covers many steps costs as much as one that covers one."""

    CHUNK = 512
    """Records that are kept as they came before they are turned into arrays, all at once."""

    def __init__(self, decode_threshold: int = 1) -> None:
        self.num_steps = 0
        """Steps taken in so far."""
        self._decode_threshold = decode_threshold
        self._records: list[StepRecord] = []
        self._chunks: list[_Chunk] = []
        self._gauges: dict[str, array[int]] = {}
        self._stops = {name: code for code, name in enumerate(KNOWN_STOPS)}

    def add(self, record: StepRecord) -> None:
        """Append `record.run.count` steps."""
        self._records.append(record)
        self.num_steps += record.run.count
        for name, value in record.gauges.items():
            self._gauges.setdefault(name, array("q")).append(value)
        if len(self._records) == self.CHUNK:
            self._pack()

    def _pack(self) -> None:
        """Turn the records kept into arrays.

        Raises:
            SimserveError: a result or free-block column does not have one value a step.
        """
        records, self._records = self._records, []
        runs = np.array([self._numbers(record) for record in records], dtype=np.int64)
        starts = np.array([record.start_s for record in records], dtype=np.float64)
        ends = np.concatenate([record.result.ends_s for record in records], dtype=np.float64)
        free = np.concatenate([record.num_free_blocks for record in records], dtype=np.int64)
        evicted = np.concatenate([record.num_evicted_blocks for record in records], dtype=np.int64)
        names = dict.fromkeys(name for record in records for name in record.result.parts)
        parts = {
            name: np.concatenate([_part(record, name) for record in records], dtype=np.float64)
            for name in names
        }
        num_steps = int(runs[:, 0].sum())
        if any(len(column) != num_steps for column in (ends, free, evicted, *parts.values())):
            raise SimserveError(
                f"a step result does not have one value for each of its steps: {num_steps} steps, "
                f"but {len(ends)} end times and {len(free)} free-block counts"
            )
        self._chunks.append(_Chunk(runs, starts, ends, free, evicted, parts))

    def _numbers(self, record: StepRecord) -> tuple[int, ...]:
        """The whole numbers of a record, in the order in which `columns` reads them."""
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

    def columns(self) -> StepColumns:
        """All steps so far, one value each.

        Raises:
            SimserveError: a result or free-block column does not have one value a step.
        """
        if self._records:
            self._pack()
        chunks = self._chunks or [_Chunk.empty()]
        runs = np.concatenate([chunk.runs for chunk in chunks]).T
        counts, first = runs[0], np.cumsum(runs[0]) - runs[0]
        ends = np.concatenate([chunk.ends for chunk in chunks])
        starts = np.concatenate((ends[:1], ends[:-1]))
        starts[first] = np.concatenate([chunk.starts for chunk in chunks])
        each = [np.repeat(column, counts) for column in runs]
        return StepColumns(
            start_s=starts,
            end_s=ends,
            parts=self._parts(),
            num_running=each[1],
            num_waiting=each[2],
            num_scheduled=each[3],
            num_tokens=each[4],
            num_decode_tokens=each[5],
            num_preempted=_only_at(first, runs[6], len(ends)),
            num_free_blocks=np.concatenate([chunk.free for chunk in chunks]),
            prefix_cache_queries=each[7],
            prefix_cache_hits=each[8],
            evicted_cached_blocks=np.concatenate([chunk.evicted for chunk in chunks]),
            admission_stop=each[9].astype(np.int8),
            admission_stops=tuple(self._stops),
            gauges={name: np.array(values) for name, values in self._gauges.items()},
        )

    def _parts(self) -> dict[str, NDArray[np.float64]]:
        names = dict.fromkeys(name for chunk in self._chunks for name in chunk.parts)
        return {
            name: np.concatenate(
                [chunk.parts.get(name, np.full(len(chunk.ends), np.nan)) for chunk in self._chunks]
            )
            for name in names
        }


def _part(record: StepRecord, name: str) -> NDArray[np.float64]:
    """Seconds of a part in each step of a record, NaN if it has no such part."""
    seconds = record.result.parts.get(name)
    return np.full(record.run.count, np.nan) if seconds is None else seconds


def _only_at(
    places: NDArray[np.int64], values: NDArray[np.int64], num_steps: int
) -> NDArray[np.int64]:
    """An array that is 0 but for `values` at `places`."""
    column = np.zeros(num_steps, dtype=np.int64)
    column[places] = values
    return column
