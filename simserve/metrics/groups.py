"""Requests of users that are several requests of the engine: n > 1, beams, best of several."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.quantiles import Sample
from simserve.metrics.recorder import RunData
from simserve.metrics.request_log import Outcome

__all__ = ["Groups"]

Floats = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class Groups:
    """Seconds per group, shape [groups]; NaN without a token."""

    ttft: Floats
    """Arrival of the first request to the first token of any."""
    e2el: Floats
    """Arrival of the first request to the last token of all."""
    completed: NDArray[np.bool_]
    """Whether all requests of the group have completed."""
    num_requests: NDArray[np.int64]

    @classmethod
    def of(cls, data: RunData) -> Groups | None:
        """The groups of a run; None if it has none."""
        requests, times = data.requests, data.times
        members = np.flatnonzero(requests.group_code >= 0)
        if not len(members):
            return None
        members = members[np.argsort(requests.group_code[members], kind="stable")]
        codes = requests.group_code[members]
        heads = np.flatnonzero(np.diff(codes, prepend=-1))
        arrival = np.minimum.reduceat(requests.arrival_s[members], heads)
        # fmin and fmax pass over the NaN of requests without a token.
        first = np.fmin.reduceat(times.first_token_s[members], heads)
        last = np.fmax.reduceat(times.last_token_s[members], heads)
        completed = requests.are(Outcome.COMPLETED)[members]
        return cls(
            ttft=first - arrival,
            e2el=last - arrival,
            completed=np.logical_and.reduceat(completed, heads),
            num_requests=np.diff(heads, append=len(members)),
        )

    def sample(self, metric: str) -> Sample:
        """`ttft` or `e2el` of the groups that completed (s)."""
        values: Floats = getattr(self, metric)[self.completed]
        return Sample.of(values[~np.isnan(values)])
