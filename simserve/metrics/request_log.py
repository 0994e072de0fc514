"""One row a request, in the order in which the engine took them in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum

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
    """One value a request; every array has shape [requests]. Times NaN and -1 mean: never."""

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
    recomputed_tokens: NDArray[np.int64]
    num_preemptions: NDArray[np.int64]
    priority: NDArray[np.int64]
    turn: NDArray[np.int64]
    outcome: NDArray[np.int64]
    sessions: list[str | None]
    finish_reasons: list[str | None]
    errors: dict[int, str]
    """Why a request was rejected, by row."""

    def are(self, outcome: Outcome) -> NDArray[np.bool_]:
        """Mask of the requests with this outcome."""
        return np.equal(self.outcome, int(outcome))


class RequestLog:
    """Rows in typed arrays. `rows` maps the requests that have not ended to their rows."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self._ids: list[str] = []
        self._sessions: list[str | None] = []
        self._reasons: list[str | None] = []
        self._errors: dict[int, str] = {}
        self._classes: dict[str, int] = {}
        self._class_code = array("q")
        self._arrival_s = array("d")
        self._queued_s = array("d")
        self.scheduled_s = array("d")
        self._ended_s = array("d")
        self._input_length = array("q")
        self._requested_output_length = array("q")
        self._cached_tokens = array("q")
        self.recomputed_tokens = array("q")
        self.num_preemptions = array("q")
        self._priority = array("q")
        self._turn = array("q")
        self._outcome = array("q")

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request: TraceRequest, queued_s: float) -> None:
        """Begin the row of a request.

        Raises:
            SimserveError: a request of this id has not ended yet.
        """
        if request.request_id in self.rows:
            raise SimserveError(
                f"request id '{request.request_id}' arrived again before the first one ended; "
                "ids must be unique"
            )
        self.rows[request.request_id] = len(self._ids)
        self._ids.append(request.request_id)
        self._sessions.append(request.session)
        self._reasons.append(None)
        self._class_code.append(self._classes.setdefault(request.class_, len(self._classes)))
        self._arrival_s.append(request.arrival_s)
        self._queued_s.append(queued_s)
        self.scheduled_s.append(np.nan)
        self._ended_s.append(np.nan)
        self._input_length.append(request.prompt_len)
        self._requested_output_length.append(request.output_len)
        self._cached_tokens.append(-1)
        self.recomputed_tokens.append(0)
        self.num_preemptions.append(0)
        self._priority.append(request.priority)
        self._turn.append(request.turn)
        self._outcome.append(Outcome.QUEUED)

    def set_standing(self, request_id: str, outcome: Outcome, num_cached_tokens: int) -> None:
        """Where a request that has not ended stands when the simulation stops."""
        row = self.rows[request_id]
        self._outcome[row] = outcome
        self._cached_tokens[row] = num_cached_tokens

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
        self._outcome[row] = outcome
        self._reasons[row] = reason
        self._ended_s[row] = now_s
        self._cached_tokens[row] = num_cached_tokens

    def reject(self, request: TraceRequest, reason: str, now_s: float) -> None:
        """A request was turned away, with or without having been taken in before."""
        if request.request_id not in self.rows:
            self.add(request, np.nan)
        self._errors[self.rows[request.request_id]] = reason
        self.end(request.request_id, Outcome.REJECTED, "rejected", now_s)

    def columns(self) -> RequestColumns:
        """All rows so far."""
        return RequestColumns(
            request_ids=self._ids,
            class_names=tuple(self._classes),
            class_code=_ints(self._class_code),
            arrival_s=np.array(self._arrival_s),
            queued_s=np.array(self._queued_s),
            scheduled_s=np.array(self.scheduled_s),
            ended_s=np.array(self._ended_s),
            input_length=_ints(self._input_length),
            requested_output_length=_ints(self._requested_output_length),
            cached_tokens=_ints(self._cached_tokens),
            recomputed_tokens=_ints(self.recomputed_tokens),
            num_preemptions=_ints(self.num_preemptions),
            priority=_ints(self._priority),
            turn=_ints(self._turn),
            outcome=_ints(self._outcome),
            sessions=self._sessions,
            finish_reasons=self._reasons,
            errors=self._errors,
        )


def _ints(column: array[int]) -> NDArray[np.int64]:
    return np.array(column, dtype=np.int64)
