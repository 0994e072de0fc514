"""Per-request latencies and the samples that percentiles are taken of.

Definitions are those of `vllm bench serve` and vLLM's own bookkeeping; see docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.quantiles import Sample
from simserve.metrics.recorder import RequestRows, RunData
from simserve.metrics.request_log import Outcome

__all__ = ["METRICS", "Latencies", "View", "sample"]

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

METRICS = (
    "ttft",
    "tpot",
    "itl",
    "e2el",
    "queue_time",
    "prefill_time",
    "decode_time",
    "inference_time",
)


@dataclass(slots=True, kw_only=True)
class Latencies:
    """Seconds per request, shape [requests]; NaN where the request has no such value."""

    queue_time: Floats
    """Taken in by the engine to first admission."""
    ttft: Floats
    """Arrival to first token."""
    tpot: Floats
    """(last - first token) / (tokens - 1); undefined for one token."""
    e2el: Floats
    """Arrival to last token."""
    prefill_time: Floats
    """First admission to first token."""
    decode_time: Floats
    """First to last token."""
    inference_time: Floats
    """First admission to last token."""
    max_itl: Floats
    """Longest gap."""

    @classmethod
    def of(cls, rows: RunData | RequestRows) -> Latencies:
        """The latencies of all requests, whatever became of them."""
        requests, times = rows.requests, rows.times
        first, last = times.first_token_s, times.last_token_s
        gaps = np.where(times.num_tokens > 1, times.num_tokens - 1.0, np.nan)
        return cls(
            queue_time=requests.scheduled_s - requests.queued_s,
            ttft=first - requests.arrival_s,
            tpot=(last - first) / gaps,
            e2el=last - requests.arrival_s,
            prefill_time=first - requests.scheduled_s,
            decode_time=last - first,
            inference_time=last - requests.scheduled_s,
            max_itl=times.max_itl_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Which events count: those of `requests` (a mask) that happen in [start_s, end_s).

    An event is judged by its own time: a TTFT by the first token, a gap by its end, TPOT and E2EL
    by the last token, the queue time by the admission.
    """

    requests: Mask
    start_s: float = -np.inf
    end_s: float = np.inf

    def of_class(self, data: RunData, code: int) -> View:
        """The same for the requests of one class only."""
        mask = self.requests & (data.requests.class_code == code)
        return View(requests=mask, start_s=self.start_s, end_s=self.end_s)

    def holds(self, times_s: Floats) -> Mask:
        """Mask of the requests whose event, at these times, counts. NaN never does."""
        return self.requests & (times_s >= self.start_s) & (times_s < self.end_s)


def whole_run(data: RunData) -> View:
    """Completed requests, as vLLM counts: failed and unfinished ones are left out."""
    return View(requests=data.requests.are(Outcome.COMPLETED))


def window(data: RunData, start_s: float, end_s: float) -> View:
    """Events in a window, of requests that completed or still run: none of failed ones.

    Leaving out those that still run would favour short requests when a run is cut off.
    """
    failed = data.requests.are(Outcome.ABORTED) | data.requests.are(Outcome.REJECTED)
    return View(requests=~failed, start_s=start_s, end_s=end_s)


def sample(data: RunData, latencies: Latencies, metric: str, view: View) -> Sample:
    """The values of one of `METRICS` that count in a view (s)."""
    if metric == "itl":
        return data.times.itl(view.requests, view.start_s, view.end_s)
    first, last = data.times.first_token_s, data.times.last_token_s
    when = {"ttft": first, "prefill_time": first, "queue_time": data.requests.scheduled_s}
    values: Floats = getattr(latencies, metric)
    kept = view.holds(when.get(metric, last))
    if metric not in when:
        # What ends with the last token is known only of requests that have completed.
        kept &= data.requests.are(Outcome.COMPLETED)
    return Sample.of(values[kept & ~np.isnan(values)])
