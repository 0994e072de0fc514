"""Requests of users that become several requests of the engine: n > 1, beams, best of several.

The engine knows nothing of it. A group hands out requests, is told of each that has ended, and may
answer with more; to the workload inside, the group as a whole is the request that ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from simserve.protocols import Workload
from simserve.types import TraceRequest

__all__ = ["Group", "Grouped", "Method"]


class Group(Protocol):
    """What one request of a user becomes."""

    def first(self) -> Sequence[TraceRequest]:
        """The requests that are sent when it arrives; at least one."""
        ...

    def further(self, request_id: str, now_s: float) -> Sequence[TraceRequest]:
        """Those that are sent now that one has completed. Not asked any more after a failure."""
        ...


class Method(Protocol):
    """How requests are decoded."""

    def open(self, request: TraceRequest) -> Group:
        """The group that a request of a user becomes.

        Raises:
            TraceError: the request cannot be decoded so.
        """
        ...


@dataclass(slots=True)
class _Open:
    """A group that has not ended."""

    request_id: str
    group: Group
    num_in_flight: int = 0
    completed: bool = True


class Grouped:
    """A workload whose requests are groups (protocol `Workload`).

    A group has ended when none of its requests is in flight and none follows. If one of them was
    rejected or aborted, the others run to their end, nothing follows, and the group counts as not
    completed. At equal times requests of open groups go before new groups.

    Args:
        workload: gives the requests of the users, and is told when they end.
        method: makes the groups.
    """

    def __init__(self, workload: Workload, method: Method) -> None:
        self._workload = workload
        self._method = method
        self._ready: list[tuple[float, int, TraceRequest]] = []
        """Heap: (arrival, place in the order in which they were made, request)."""
        self._num_made = 0
        self._open: dict[str, _Open] = {}
        """By the ids of the requests in flight."""

    @property
    def num_requests(self) -> int | None:
        """Not known: a group may answer with any number."""
        return None

    def next_arrival(self) -> float | None:
        """Time of the next request (s); None if none is known now."""
        arrival_s = self._workload.next_arrival()
        if self._ready and (arrival_s is None or self._ready[0][0] <= arrival_s):
            return self._ready[0][0]
        return arrival_s

    def take(self) -> TraceRequest:
        """The next request. Raises IndexError if none is known."""
        arrival_s = self._workload.next_arrival()
        if not self._ready or (arrival_s is not None and arrival_s < self._ready[0][0]):
            request = self._workload.take()
            group = self._method.open(request)
            self._send(_Open(request.request_id, group), group.first())
        return heapq.heappop(self._ready)[2]

    def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
        """A request ended at `now_s`: its group may go on, or has ended."""
        one = self._open.pop(request_id)
        one.num_in_flight -= 1
        one.completed = one.completed and completed
        if one.completed:
            self._send(one, one.group.further(request_id, now_s))
        if not one.num_in_flight:
            self._workload.finished(one.request_id, now_s, one.completed)

    def _send(self, one: _Open, requests: Sequence[TraceRequest]) -> None:
        for request in requests:
            heapq.heappush(self._ready, (request.arrival_s, self._num_made, request))
            self._num_made += 1
            self._open[request.request_id] = one
        one.num_in_flight += len(requests)
