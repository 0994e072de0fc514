"""Workloads as the engine sees them: what comes next, and what the end of a request sets off."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simserve.errors import TraceError
from simserve.protocols import Workload
from simserve.types import TraceRequest, output_segment

if TYPE_CHECKING:
    from simserve.workload.sessions import Session

__all__ = ["ConcurrencyCap", "OpenLoop", "OwnOutputs", "OwnSampling", "Sessions"]

PlaceOf = Callable[[str], str]
"""From a request's id to `file:row: `, where it stands."""
_LATEST_S = 1e12
"""As for every time in a configuration: much later, a clock cannot tell how long a step is."""


def _nowhere(request_id: str) -> str:
    """Of requests that were made up."""
    return ""


def _check_arrival(request: TraceRequest, previous: TraceRequest | None, place_of: PlaceOf) -> None:
    arrival_s = request.arrival_s
    if not 0.0 <= arrival_s <= _LATEST_S:
        raise TraceError(
            f"{place_of(request.request_id)}request '{request.request_id}': arrival_s: must be "
            f"from 0 to {_LATEST_S:g} seconds, got {arrival_s:g}; is the rate, or the trace's unit "
            "of time, the one that is meant?"
        )
    if previous is not None and arrival_s < previous.arrival_s:
        raise TraceError(
            f"request '{request.request_id}': arrival_s: {arrival_s} is earlier than "
            f"{previous.arrival_s} of '{previous.request_id}' before it; sort by arrival"
        )


class OpenLoop:
    """Requests at their `arrival_s`, whatever becomes of the others (`parent` is ignored).

    Reads one request ahead and holds no more.

    Raises (from the constructor and from `take`):
        TraceError: an arrival is not from 0 to 1e12 s, or earlier than the one before.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        num_requests: int | None = None,
        place_of: PlaceOf = _nowhere,
    ) -> None:
        self._requests = iter(requests)
        self._num_requests = num_requests
        self._place_of = place_of
        self._next = self._read(None)

    def _read(self, previous: TraceRequest | None) -> TraceRequest | None:
        request = next(self._requests, None)
        if request is not None:
            _check_arrival(request, previous, self._place_of)
        return request

    @property
    def num_requests(self) -> int | None:
        """How many requests there are in all, if the caller knew."""
        return self._num_requests

    def next_arrival(self) -> float | None:
        """Time of the next request (s); None after the last."""
        return None if self._next is None else self._next.arrival_s

    def take(self) -> TraceRequest:
        """The next request. Raises IndexError if there is none."""
        request = self._next
        if request is None:
            raise IndexError("no request is left")
        self._next = self._read(request)
        return request

    def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
        """Nothing: nobody waits for anybody."""


class Sessions:
    """Closed loop: a turn starts `think_time_s` after its parent has ended.

    Sessions come in the order of their first turns, which start at their own `arrival_s`; the
    `arrival_s` of a later turn is replaced by the time at which it really starts. Equal times go
    in the order of the stream. One session ahead and those in progress are held, no more.

    A turn whose parent ended without completing (aborted, rejected: `completed=False`) is never
    sent, nor are those after it; `num_not_sent` counts them.

    Raises (from the constructor and from `take`):
        TraceError: a first arrival is not from 0 to 1e12 s, or earlier than that of the session
            before; a later turn's parent is not earlier in its session; a bad think time.
    """

    def __init__(
        self,
        sessions: Iterable[Session],
        num_requests: int | None = None,
        place_of: PlaceOf = _nowhere,
    ) -> None:
        self._sessions = iter(sessions)
        self._num_requests = num_requests
        self._place_of = place_of
        self._ready: list[tuple[float, int, TraceRequest]] = []
        """Heap of requests whose start is known: (start, place in the stream, request)."""
        self._waiting: dict[str, list[tuple[int, TraceRequest]]] = {}
        """Turns by the parent that they wait for."""
        self._num_read = 0
        self._num_not_sent = 0
        self._ahead: TraceRequest | None = None
        """First turn of the session read last. Until it is taken no further one is read."""
        self._read()

    @property
    def num_requests(self) -> int | None:
        """How many requests there are in all, those never sent included, if the caller knew."""
        return self._num_requests

    @property
    def num_not_sent(self) -> int:
        """Turns that will never start because a turn before them did not complete."""
        return self._num_not_sent

    def _read(self) -> None:
        previous, self._ahead = self._ahead, None
        session = next(self._sessions, None)
        if session is None:
            return
        root = session[0]
        _check_arrival(root, previous, self._place_of)
        earlier = {root.request_id}
        for place, turn in enumerate(session[1:], self._num_read + 1):
            if turn.parent is None or turn.parent not in earlier:
                raise TraceError(
                    f"request '{turn.request_id}': parent: '{turn.parent}' is not earlier in the "
                    f"session of '{root.request_id}'"
                )
            if not 0.0 <= turn.think_time_s <= _LATEST_S:
                raise TraceError(
                    f"{self._place_of(turn.request_id)}request '{turn.request_id}': think_time_s: "
                    f"must be from 0 to {_LATEST_S:g} seconds, got {turn.think_time_s:g}"
                )
            earlier.add(turn.request_id)
            self._waiting.setdefault(turn.parent, []).append((place, turn))
        heapq.heappush(self._ready, (root.arrival_s, self._num_read, root))
        self._num_read += len(session)
        self._ahead = root

    def next_arrival(self) -> float | None:
        """Earliest start known now (s); None while all turns left wait for others, or are out."""
        return self._ready[0][0] if self._ready else None

    def take(self) -> TraceRequest:
        """The request that starts next. Raises IndexError if none is known."""
        if not self._ready:
            raise IndexError("no request is ready")
        request = heapq.heappop(self._ready)[2]
        if request is self._ahead:
            self._read()
        return request

    def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
        """A turn ended at `now_s`: those that waited for it get a start, or are given up."""
        waiting = self._waiting.pop(request_id, ())
        if not completed:
            self._give_up([turn for _, turn in waiting])
            return
        for place, turn in waiting:
            start_s = now_s + turn.think_time_s
            heapq.heappush(self._ready, (start_s, place, replace(turn, arrival_s=start_s)))

    def _give_up(self, turns: list[TraceRequest]) -> None:
        for turn in turns:  # grows while it is walked
            self._num_not_sent += 1
            turns += [later for _, later in self._waiting.pop(turn.request_id, ())]


class ConcurrencyCap:
    """At most `max_concurrency` requests of a workload in flight, as `vllm bench serve` does it.

    A request that finds no free slot waits its turn outside the engine, first come first served,
    and arrives when a slot frees: its `arrival_s` becomes the time at which it is sent, so that
    latencies do not contain the wait for the slot.

    Raises:
        ValueError: `max_concurrency` is below 1.
    """

    def __init__(self, workload: Workload, max_concurrency: int) -> None:
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        self._workload = workload
        self._num_unused = max_concurrency
        """Slots never used so far."""
        self._freed_s: deque[float] = deque()
        """When each other free slot became free; the one free for longest is used first."""

    @property
    def num_requests(self) -> int | None:
        """That of the workload inside."""
        return self._workload.num_requests

    def next_arrival(self) -> float | None:
        """When the next request can be sent (s); None if none is known or no slot is free."""
        arrival_s = self._workload.next_arrival()
        if arrival_s is None or not (self._num_unused or self._freed_s):
            return None
        return arrival_s if self._num_unused else max(arrival_s, self._freed_s[0])

    def take(self) -> TraceRequest:
        """The next request, arriving when it is sent. Raises IndexError if no slot is free."""
        if not (self._num_unused or self._freed_s):
            raise IndexError("no slot is free")
        request = self._workload.take()
        if self._num_unused:
            self._num_unused -= 1
            return request
        freed_s = self._freed_s.popleft()
        return request if freed_s <= request.arrival_s else replace(request, arrival_s=freed_s)

    def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
        """A request in flight ended at `now_s` and leaves its slot."""
        self._freed_s.append(now_s)
        self._workload.finished(request_id, now_s, completed)


class _Around:
    """Hands on the requests of a workload inside, for those that change them on the way."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.next_arrival = workload.next_arrival
        self.finished = workload.finished

    @property
    def num_requests(self) -> int | None:
        """That of the workload inside."""
        return self._workload.num_requests


class OwnOutputs(_Around):
    """A workload whose requests put out tokens of their own, whatever the trace says of them.

    What a model chooses is not what was recorded: it must not be taken for it in a prefix cache.
    """

    def take(self) -> TraceRequest:
        """The next request. Raises IndexError as the workload inside does."""
        request = self._workload.take()
        if request.output is None:
            return request
        # A first sibling speaks for the request that it is part of, and later turns quote that.
        speaks_for = request.group if request.group and not request.sibling else None
        output = ((output_segment(speaks_for), request.output_len),) if speaks_for else None
        return replace(request, output=output)


class OwnSampling(_Around):
    """A workload whose requests say by their class how their tokens are chosen.

    What a request says itself stands over it.
    """

    def __init__(self, workload: Workload, by_class: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(workload)
        self._by_class = by_class

    def take(self) -> TraceRequest:
        """The next request. Raises IndexError as the workload inside does."""
        request = self._workload.take()
        of_class = self._by_class.get(request.class_)
        if of_class is None:
            return request
        return replace(request, sampling={**of_class, **(request.sampling or {})})
