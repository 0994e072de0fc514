"""What a step's cost depends on: exact integer counts taken from a plan.

A request with one token counts as a decode, one with more as a prefill: kernels see query lengths,
not phases. Every count is a function of the plan's columns alone, so a run of steps is counted as
its steps one by one would be. Newly added blocks are not among them: a run has them for its first
step only.
"""

from __future__ import annotations

from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.types import StepPlan, StepRun

__all__ = ["UNITS", "Count", "Features", "extract", "query_key_pairs"]

Count = int | NDArray[np.int64]
"""An exact count: one number for a single step, an array of shape [count] for a run."""


class Features(NamedTuple):
    """Counts of a step, or of each step of a run. Those that advance over a run are `Count`."""

    num_tokens: int
    """Tokens computed: the sum of the scheduled tokens."""
    num_reqs: int
    num_decodes: int
    """Requests with one token."""
    decode_kv_tokens: Count
    """Keys that decodes attend to: start + 1 each, at most the sliding window."""
    num_prefills: int
    """Requests with more than one token."""
    prefill_tokens: int
    prefill_pairs: Count
    """Query-key pairs that prefills attend: n*start + n(n+1)/2 each without a window."""
    prefill_kv_tokens: Count
    """KV tokens that prefills read: start + n each, at most n - 1 more than the window."""
    num_logits_rows: int
    """Rows that go through the output head: one a request (the engine samples partial prefills
    too and drops the token) and one a draft token."""
    num_samples: int
    """Requests whose token is kept."""
    shared_kv_tokens: int
    """KV tokens that several requests have together: each counts once for all but one of them."""


UNITS = {
    "num_tokens": "tokens",
    "num_reqs": "requests",
    "num_decodes": "requests",
    "decode_kv_tokens": "tokens",
    "num_prefills": "requests",
    "prefill_tokens": "tokens",
    "prefill_pairs": "query-key pairs",
    "prefill_kv_tokens": "tokens",
    "num_logits_rows": "rows",
    "num_samples": "requests",
    "shared_kv_tokens": "tokens",
}
"""Unit of every feature, by name."""


def extract(run: StepRun, sliding_window: int | None = None) -> Features:
    """Count the features of a run: integers for one step, arrays for those that advance over more.

    Args:
        run: the steps; in step k every start has advanced by k times the request's tokens.
        sliding_window: most keys a query attends to, itself included; None: all before it.
    """
    plan, count = run
    num_tokens, starts = plan.num_tokens, plan.starts
    num_reqs = len(num_tokens)
    num_decodes = num_tokens.count(1)
    num_samples = plan.samples.count(True)
    drafts = sum(map(len, plan.draft_tokens.values())) if plan.draft_tokens else 0
    steps: Count = 0 if count == 1 else np.arange(count)
    decode_starts = sum(starts)
    num_prefills = prefill_tokens = 0
    pairs: Count = 0
    kv_read: Count = 0
    if num_decodes != num_reqs:
        # Others than decodes mostly stand behind all decodes, which are then passed over at once.
        first = num_decodes if num_tokens[:num_decodes].count(1) == num_decodes else 0
        for n, start in zip(num_tokens[first:], starts[first:], strict=True):
            if n == 1:
                continue
            decode_starts -= start
            if n:
                num_prefills += 1
                prefill_tokens += n
                pairs = pairs + query_key_pairs(start + n * steps, n, sliding_window)
                kv_read = kv_read + _kv_read(start + n * steps, n, sliding_window)
    if sliding_window is None:
        decode_kv: Count = num_decodes * steps + (decode_starts + num_decodes)
    else:
        decode_kv = _windowed_decode_kv(plan, steps, sliding_window)
    return Features(
        num_decodes + prefill_tokens,
        num_reqs,
        num_decodes,
        decode_kv,
        num_prefills,
        prefill_tokens,
        pairs,
        kv_read,
        num_reqs + drafts,
        num_samples,
        plan.num_shared_kv_tokens,
    )


def query_key_pairs(start: Any, num_tokens: Any, sliding_window: int | None = None) -> Any:
    """Causal query-key pairs of `num_tokens` queries after `start` tokens. Exact.

    It is a difference of one function at the two ends of the chunk, so chunks of a prompt add up
    to the whole prompt however it is cut. Both are ints, or int64 arrays.

    >>> query_key_pairs(0, 8) == query_key_pairs(0, 3) + query_key_pairs(3, 5) == 36
    True
    """
    if sliding_window is None:
        return num_tokens * start + num_tokens * (num_tokens + 1) // 2
    end = start + num_tokens
    return _pairs_up_to(end, sliding_window) - _pairs_up_to(start, sliding_window)


def _pairs_up_to(length: Any, window: int) -> Any:
    """Pairs of a whole sequence: the first `window` queries see all before them, the others
    `window` keys."""
    full = _at_most(length, window)
    return full * (full + 1) // 2 + (length - full) * window


def _at_most(value: Any, limit: int) -> Any:
    """The smaller of the two, for an int or an array of them."""
    return min(value, limit) if isinstance(value, int) else np.minimum(value, limit)


def _windowed_decode_kv(plan: StepPlan, steps: Count, window: int) -> Count:
    """Keys that decodes attend to under a sliding window."""
    total: Count = 0 * steps
    for start in compress(plan.starts, map((1).__eq__, plan.num_tokens)):
        total = total + _at_most(start + 1 + steps, window)
    return total


def _kv_read(start: Any, num_tokens: int, window: int | None) -> Any:
    """KV tokens that a prefill reads."""
    end = start + num_tokens
    return end if window is None else _at_most(end, num_tokens + window - 1)
