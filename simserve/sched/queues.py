"""Waiting queues: who is next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from simserve.types import Request

__all__ = ["FcfsQueue", "PriorityQueue", "WaitingQueue", "make_queue"]


class WaitingQueue(Protocol):
    """An ordered set of waiting requests."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In the order they would come out."""
        ...

    def add(self, request: Request) -> None:
        """A new request."""
        ...

    def put_back(self, request: Request) -> None:
        """A preempted request."""
        ...

    def put_back_skipped(self, requests: Sequence[Request]) -> None:
        """Requests that were passed over in this step, in the order they were."""
        ...

    def peek(self) -> Request:
        """The head."""
        ...

    def pop(self) -> Request:
        """Take the head off."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        ...


class FcfsQueue:
    """First come, first served; a preempted request goes to the front.

    Args:
        reverse_skipped: put skipped requests back in reverse order, the one skipped last first, as
            vLLM v0.11.0 does.
    """

    def __init__(self, reverse_skipped: bool = True) -> None:
        self._requests: deque[Request] = deque()
        self._reverse_skipped = reverse_skipped

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """To the back."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """To the front."""
        self._requests.appendleft(request)

    def put_back_skipped(self, requests: Sequence[Request]) -> None:
        """To the front."""
        self._requests.extendleft(requests if self._reverse_skipped else reversed(requests))

    def peek(self) -> Request:
        """The head."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the head off."""
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._requests.remove(request)


class PriorityQueue:
    """Smallest (priority, arrival time) first; equal keys in the order they were put in.

    (vLLM v0.11.0 compares the request objects on equal keys, which ends the engine.)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        self._count = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._heap))

    def add(self, request: Request) -> None:
        """By its key."""
        key = (request.priority, request.arrival_s, next(self._count), request)
        heapq.heappush(self._heap, key)

    put_back = add

    def put_back_skipped(self, requests: Sequence[Request]) -> None:
        """By their keys."""
        for request in requests:
            self.add(request)

    def peek(self) -> Request:
        """The head."""
        return self._heap[0][3]

    def pop(self) -> Request:
        """Take the head off."""
        return heapq.heappop(self._heap)[3]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._heap = [entry for entry in self._heap if entry[3] is not request]
        heapq.heapify(self._heap)


def make_queue(policy: str, reverse_skipped: bool) -> WaitingQueue:
    """The queue of a `policy`: `fcfs` or `priority`."""
    return PriorityQueue() if policy == "priority" else FcfsQueue(reverse_skipped)
