"""Per-step columns, written a run of steps at a time and expanded to one row a step at the end."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.protocols import StepRecord

__all__ = ["StepColumns", "StepLog"]

KNOWN_STOPS = ("budget", "max_num_seqs", "blocks", "preemption", "empty")
NUM_FIELDS = 10
"""Whole numbers kept of a record."""


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


class StepLog:
    """Takes in step records. One that covers many steps costs as much as one that covers one."""

    CHUNK = 512
    """Records whose parts are kept as they came before they are turned into arrays, all at once."""

    def __init__(self, decode_threshold: int = 1) -> None:
        self.num_steps = 0
        """Steps taken in so far."""
        self._decode_threshold = decode_threshold
        self._runs = array("q")
        """`NUM_FIELDS` whole numbers a record."""
        self._starts_s = array("d")
        self._gaps_s = array("d")
        """One a record, as the starts; the columns below have one value a step."""
        self._ends_s = array("d")
        self._free = array("q")
        self._evicted = array("q")
        self._recent: list[tuple[int, Mapping[str, Any]]] = []
        self._parts: list[dict[str, NDArray[np.float64]]] = []
        self._gauges: dict[str, array[int]] = {}
        self._stops = {name: code for code, name in enumerate(KNOWN_STOPS)}

    def add(self, record: StepRecord) -> None:
        """Append `record.run.count` steps.

        Raises:
            SimserveError: a result or free-block column does not have one value a step.
        """
        count = record.run.count
        self.num_steps += count
        self._runs.extend(self._numbers(record))
        self._starts_s.append(record.start_s)
        self._gaps_s.append(record.result.gap_s)
        self._ends_s.extend(record.result.ends_s)
        self._free.extend(record.num_free_blocks)
        self._evicted.extend(record.num_evicted_blocks)
        if not self.num_steps == len(self._ends_s) == len(self._free) == len(self._evicted):
            raise SimserveError(
                f"a step result does not have one value for each of its {count} steps: "
                f"{len(record.result.ends_s)} end times and {len(record.num_free_blocks)} "
                "free-block counts"
            )
        self._recent.append((count, record.result.parts))
        if len(self._recent) == self.CHUNK:
            self._pack()
        for name, value in record.gauges.items():
            self._gauges.setdefault(name, array("q")).append(value)

    def _pack(self) -> None:
        """Turn the parts of recent records into arrays."""
        recent, self._recent = self._recent, []
        names = dict.fromkeys(name for _, parts in recent for name in parts)
        self._parts.append({name: _column(recent, name) for name in names})

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
        if self._recent:
            self._pack()
        runs = np.array(self._runs).reshape(-1, NUM_FIELDS).T
        counts, first = runs[0], np.cumsum(runs[0]) - runs[0]
        ends = np.array(self._ends_s)
        gaps = np.array(self._gaps_s).repeat(counts)
        starts = np.concatenate((ends[:1], ends[:-1] + gaps[:-1]))
        starts[first] = self._starts_s
        each = [np.repeat(column, counts) for column in runs]
        return StepColumns(
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
