"""The prefix-cache hit rate that the engine logs: over the requests looked up most recently."""

from __future__ import annotations

from collections import deque

from simserve.types import Lookups

__all__ = ["PrefixCachingMetrics"]


class PrefixCachingMetrics:
    """Lookups of the last steps that hold at most `max_recent_requests` requests.

    Whole steps drop out, the newest is always kept, steps without lookups are ignored.

    >>> metrics = PrefixCachingMetrics(max_recent_requests=3)
    >>> metrics.observe(Lookups(2, 100, 80))
    >>> metrics.observe(Lookups(2, 100, 20))
    >>> metrics.recent, metrics.hit_rate
    (Lookups(requests=2, queries=100, hits=20), 0.2)
    """

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self.recent = Lookups()
        """Sum over the steps in the window."""
        self._steps: deque[Lookups] = deque()

    def observe(self, lookups: Lookups, reset: bool = False) -> None:
        """Take in a step's lookups; `reset`: the cache was reset before them."""
        if reset:
            self._steps.clear()
            self.recent = Lookups()
        if lookups.requests == 0:
            return
        self._steps.append(lookups)
        self.recent = Lookups(*map(sum, zip(self.recent, lookups, strict=True)))
        while len(self._steps) > 1 and self.recent.requests > self.max_recent_requests:
            old = self._steps.popleft()
            self.recent = Lookups(*(now - gone for now, gone in zip(self.recent, old, strict=True)))

    @property
    def hit_rate(self) -> float:
        """Tokens found per token asked for; 0.0 before any lookup, as the engine logs it."""
        return self.recent.hits / self.recent.queries if self.recent.queries else 0.0
