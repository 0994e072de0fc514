"""Everything that reaches the engine from outside, in order of time: requests, aborts, resets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from simserve.errors import SimserveError
from simserve.protocols import Workload
from simserve.types import TraceRequest

__all__ = ["Abort", "Inbox", "Message", "Reset"]


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request."""

    time_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop the prefix cache, if it is unused."""

    time_s: float


Message = TraceRequest | Abort | Reset


class Inbox:
    """Merges a workload with timed aborts and resets.

    At equal times requests come first, then aborts, then resets; each kind in its own order.
    """

    def __init__(
        self, workload: Workload, aborts: Sequence[Abort] = (), resets: Sequence[Reset] = ()
    ) -> None:
        self._workload = workload
        self._due: float | None = None
        self._is_stale = True
        self._aborts = deque(sorted(aborts, key=lambda abort: abort.time_s))
        self._resets = deque(sorted(resets, key=lambda reset: reset.time_s))

    def next_time(self) -> float | None:
        """When the earliest message is due (s), or None if none is known now.

        Raises:
            SimserveError: the workload names a time that is no time (NaN or an infinity).
        """
        if self._is_stale:
            self._due = self._earliest()
            self._is_stale = False
        return self._due

    def finished(self, request_id: str, now_s: float, completed: bool) -> None:
        """A request ended: the workload may send another one for it."""
        self._workload.finished(request_id, now_s, completed)
        self._is_stale = True

    def _earliest(self) -> float | None:
        due = self._workload.next_arrival()
        if due is not None and not isfinite(due):
            raise SimserveError(f"the workload announces its next request at {due} s")
        for queue in (self._aborts, self._resets):
            if queue and (due is None or queue[0].time_s < due):
                due = queue[0].time_s
        return due

    def pop(self) -> Message:
        """Take the message that `next_time` announced."""
        due = self.next_time()
        self._is_stale = True
        if self._workload.next_arrival() == due:
            return self._workload.take()
        if self._aborts and self._aborts[0].time_s == due:
            return self._aborts.popleft()
        return self._resets.popleft()
