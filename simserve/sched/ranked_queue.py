"""A waiting queue in an order of one's own."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush

from simserve.sched.queues import PriorityQueue
from simserve.types import Request

__all__ = ["Rank", "RankedQueue"]

Rank = tuple[int, int]
"""Lower goes first."""


class RankedQueue(PriorityQueue):
    """Waiting requests by rank; equal ranks in the order they were put in.

    Args:
        rank: rank of a request; must not change while the request waits.
    """

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        super().__init__()
        self._rank = rank

    def add(self, request: Request) -> None:
        """By its rank."""
        heappush(self._heap, (*self._rank(request), next(self._count), request))

    put_back = add
