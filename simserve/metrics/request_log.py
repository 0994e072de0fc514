"""One row a request, in the order in which the engine took them in."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.types import TraceRequest

__all__ = ["Outcome", "RequestColumns", "RequestLog"]


class Outcome(IntEnum):
    """Where a request stood when the simulation ended; the name in lower case is exported."""

    QUEUED = 0
    RUNNING = 1
    COMPLETED = 2
    REJECTED = 3
    ABORTED = 4


@dataclass(slots=True, kw_only=True)
class RequestColumns:
    """One value a request; every array has shape [requests]. Times NaN and -1 mean: never.

    The lists are empty where rows have been handed out and only their numbers are left.
    """

    request_ids: list[str]
    class_names: tuple[str, ...]
    class_code: NDArray[np.int64]
    """Index into `class_names`."""
    arrival_s: NDArray[np.float64]
    queued_s: NDArray[np.float64]
    """When the engine took the request in."""
    scheduled_s: NDArray[np.float64]
    """The schedule() call that first admitted it."""
    ended_s: NDArray[np.float64]
    """When it completed, was aborted or rejected."""
    input_length: NDArray[np.int64]
    requested_output_length: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    common_prefix_tokens: NDArray[np.int64]
    recomputed_tokens: NDArray[np.int64]
    num_preemptions: NDArray[np.int64]
    priority: NDArray[np.int64]
    turn: NDArray[np.int64]
    outcome: NDArray[np.int64]
    group_code: NDArray[np.int64]
    """Equal for the requests of one group, in the order of first requests; -1: it is in none."""
    sessions: list[str | None]
    groups: list[str | None]
    finish_reasons: list[str | None]
    errors: dict[int, str]
    """Why a request was rejected, by row."""

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    def are(self, outcome: Outcome) -> NDArray[np.bool_]:
        """Mask of the requests with this outcome."""
        return np.equal(self.outcome, int(outcome))

    @classmethod
    def joined(cls, pieces: Sequence[RequestColumns]) -> RequestColumns:
        """The numbers of pieces that follow one another, without the lists."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in ARRAYS
        }
        names = pieces[-1].class_names
        return cls(
            request_ids=[],
            class_names=names,
            sessions=[],
            groups=[],
            finish_reasons=[],
            errors={},
            **arrays,
        )


ARRAYS = tuple(
    field.name
    for field in fields(RequestColumns)
    if field.name
    not in ("request_ids", "class_names", "sessions", "groups", "finish_reasons", "errors")
)
"""Names of the columns that are arrays."""


class Second(IntEnum):
    """Places of the times in a row."""

    ARRIVAL = 0
    QUEUED = 1
    SCHEDULED = 2
    ENDED = 3


class Number(IntEnum):
    """Places of the whole numbers in a row."""

    CLASS = 0
    INPUT = 1
    OUTPUT = 2
    CACHED = 3
    PRIORITY = 4
    TURN = 5
    OUTCOME = 6
    COMMON_PREFIX = 7
    GROUP = 8


# Plain numbers: an enum's member costs more to use as one.
_NUM_SECONDS, _NUM_NUMBERS = len(Second), len(Number)
_SCHEDULED, _ENDED = int(Second.SCHEDULED), int(Second.ENDED)
_CACHED, _OUTCOME = int(Number.CACHED), int(Number.OUTCOME)
_QUEUED = int(Outcome.QUEUED)


class RequestLog:
    """Rows in typed arrays. `rows` maps the requests that have not ended to their rows.

    `group`: rows are handed out so many at a time, in order, when all of them have ended.
    """

    def __init__(self, group: int) -> None:
        self.rows: dict[str, int] = {}
        self.num_taken = 0
        """Rows handed out, the first ones."""
        self._group = group
        self._num_ended: Counter[int] = Counter()
        """Requests that have ended, by group."""
        self._taken: list[RequestColumns] = []
        """The numbers of rows handed out."""
        self.recomputed_tokens: Counter[int] = Counter()
        self.num_preemptions: Counter[int] = Counter()
        """By row, as `recomputed_tokens`."""
        self._ids: list[str] = []
        self._sessions: list[str | None] = []
        self._groups: list[str | None] = []
        self._group_codes: dict[str, int] = {}
        self.has_groups = False
        """Whether some request so far is one of a group."""
        self._reasons: list[str | None] = []
        self._errors: dict[int, str] = {}
        self._classes: dict[str, int] = {}
        self._seconds = array("d")
        self._numbers = array("q")

    def __len__(self) -> int:
        return self.num_taken + len(self._ids)

    def add(
        self, request: TraceRequest, prompt_len: int, queued_s: float, common_prefix: int = -1
    ) -> None:
        """Begin the row of a request; `common_prefix`: prompt tokens that one before had too.

        Raises:
            SimserveError: a request of this id has not ended yet.
        """
        if request.request_id in self.rows:
            raise SimserveError(
                f"request id '{request.request_id}' arrived again before the first one ended; "
                "ids must be unique"
            )
        self.rows[request.request_id] = len(self)
        self._ids.append(request.request_id)
        self._sessions.append(request.session)
        self._reasons.append(None)
        self._seconds.extend((request.arrival_s, queued_s, nan, nan))
        class_code = self._classes.setdefault(request.class_, len(self._classes))
        lengths = (prompt_len, request.output_len)
        place = (request.priority, request.turn)
        group, codes = request.group, self._group_codes
        self._groups.append(group)
        group_code = -1
        if group is not None:
            self.has_groups = True
            group_code = codes.setdefault(group, len(codes))
        self._numbers.extend((class_code, *lengths, -1, *place, _QUEUED, common_prefix, group_code))

    def scheduled(self, request_id: str, time_s: float) -> None:
        """A request was admitted for the first time; nothing if it has ended since."""
        row = self.rows.get(request_id)
        if row is not None:
            self._seconds[(row - self.num_taken) * _NUM_SECONDS + _SCHEDULED] = time_s

    def preempted(self, request_id: str, least: int) -> None:
        """It has been so often at least: in an asynchronous run the step may be told of later."""
        row = self.rows.get(request_id)
        if row is not None and self.num_preemptions[row] < least:
            self.num_preemptions[row] = least

    def set_standing(self, request_id: str, outcome: Outcome, num_cached_tokens: int) -> None:
        """Where a request that has not ended stands when the simulation stops."""
        self._set_outcome(self.rows[request_id], outcome, num_cached_tokens)

    def _set_outcome(self, row: int, outcome: Outcome, num_cached_tokens: int) -> None:
        first = (row - self.num_taken) * _NUM_NUMBERS
        self._numbers[first + _OUTCOME] = outcome
        self._numbers[first + _CACHED] = num_cached_tokens

    def end(
        self,
        request_id: str,
        outcome: Outcome,
        reason: str | None,
        now_s: float,
        num_cached_tokens: int = -1,
    ) -> None:
        """A request has ended; its id may be used again.

        Raises:
            SimserveError: it ended before, or never arrived.
        """
        row = self.rows.pop(request_id, None)
        if row is None:
            raise SimserveError(
                f"request '{request_id}' ended ({outcome.name.lower()}), "
                "but it had ended before or never arrived"
            )
        self._set_outcome(row, outcome, num_cached_tokens)
        place = row - self.num_taken
        self._reasons[place] = reason
        self._seconds[place * _NUM_SECONDS + _ENDED] = now_s
        self._num_ended[row // self._group] += 1

    def reject(self, request: TraceRequest, reason: str, now_s: float) -> None:
        """A request was turned away, with or without having been taken in before."""
        if request.request_id not in self.rows:
            self.add(request, request.prompt_len, nan)
        self._errors[self.rows[request.request_id] - self.num_taken] = reason
        self.end(request.request_id, Outcome.REJECTED, "rejected", now_s)

    @property
    def may_take(self) -> bool:
        """Whether the next group is full and all of its requests have ended."""
        return self._num_ended[self.num_taken // self._group] == self._group

    def take(self) -> RequestColumns:
        """Hand out the next group of rows; only their numbers are kept."""
        count = self._group
        taken = self._columns(count)
        self.num_taken += count
        self._taken.append(RequestColumns.joined([taken]))
        for column in (self._ids, self._sessions, self._groups, self._reasons):
            del column[:count]
        del self._seconds[: count * _NUM_SECONDS], self._numbers[: count * _NUM_NUMBERS]
        for counts in (self.recomputed_tokens, self.num_preemptions):
            for row in [row for row in counts if row < self.num_taken]:
                del counts[row]
        self._errors = {
            place - count: error for place, error in self._errors.items() if place >= count
        }
        return taken

    def rest(self) -> RequestColumns:
        """The rows that are not handed out."""
        return self._columns(len(self._ids))

    def columns(self) -> RequestColumns:
        """All rows so far; of those handed out, the numbers."""
        rest = self.rest()
        return RequestColumns.joined([*self._taken, rest]) if self._taken else rest

    def _columns(self, count: int) -> RequestColumns:
        """The first `count` of the rows that are here."""
        seconds = np.array(self._seconds[: count * _NUM_SECONDS])
        seconds = seconds.reshape(-1, _NUM_SECONDS).T.copy()
        numbers = np.array(self._numbers[: count * _NUM_NUMBERS], dtype=np.int64)
        numbers = numbers.reshape(-1, _NUM_NUMBERS).T.copy()
        return RequestColumns(
            request_ids=self._ids[:count],
            class_names=tuple(self._classes),
            class_code=numbers[Number.CLASS],
            arrival_s=seconds[Second.ARRIVAL],
            queued_s=seconds[Second.QUEUED],
            scheduled_s=seconds[Second.SCHEDULED],
            ended_s=seconds[Second.ENDED],
            input_length=numbers[Number.INPUT],
            requested_output_length=numbers[Number.OUTPUT],
            cached_tokens=numbers[Number.CACHED],
            common_prefix_tokens=numbers[Number.COMMON_PREFIX],
            recomputed_tokens=self._column(self.recomputed_tokens, count),
            num_preemptions=self._column(self.num_preemptions, count),
            priority=numbers[Number.PRIORITY],
            turn=numbers[Number.TURN],
            outcome=numbers[Number.OUTCOME],
            group_code=numbers[Number.GROUP],
            sessions=self._sessions[:count],
            groups=self._groups[:count],
            finish_reasons=self._reasons[:count],
            errors={place: error for place, error in self._errors.items() if place < count},
        )

    def _column(self, counts: Counter[int], count: int) -> NDArray[np.int64]:
        """What was counted by row, for the first `count` rows here; most rows have none."""
        column = np.zeros(count, dtype=np.int64)
        for row, value in counts.items():
            if 0 <= row - self.num_taken < count:
                column[row - self.num_taken] = value
        return column
