"""What a step makes an engine do, beyond the counts of `features`: graph padding, new requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from simserve.cost.dealing import Dealer, Dealt
from simserve.cost.features import Features
from simserve.types import Kind, StepPlan, StepRun

__all__ = ["NO_FACTORS", "SizeFactors", "StepWork", "padded", "step_work"]

Number = Any

_NONE: Mapping[int, float] = MappingProxyType({})


class SizeFactors(NamedTuple):
    """By size of a graph: how long its matrix products take, over what their work says."""

    prefills: Mapping[int, float]
    """Of graphs of steps with prefills."""
    decodes: Mapping[int, float]
    """Of graphs of decodes alone: the output head has as many rows."""


NO_FACTORS = SizeFactors(_NONE, _NONE)
"""No graph is known to be faster or slower than its work says."""


class StepWork(NamedTuple):
    """Work of one step (numbers), or of several of one kernel path (arrays of one length)."""

    num_padded_tokens: Number
    """Tokens computed, up to the next captured graph size."""
    num_reqs: Number
    num_logits_rows: Number
    num_new: Number
    """Requests that come with a new block table: new and resumed ones."""
    num_table_tokens: Number
    """Tokens of those tables: computed before and scheduled."""
    decode_kv_tokens: Number
    decode_kv_bound: Number
    """Decodes times the longest of their contexts; 1 if there are none."""
    num_prefills: Number | None
    """Requests with more than one token; None: decodes alone, and the next two are 0."""
    prefill_pairs: Number
    prefill_kv_tokens: Number
    longest_kv_tokens: Number
    """Of a step with prefills: KV tokens of the request that reads most of them; else 0."""
    shared_kv_tokens: Number = 0
    """Of what requests read, the tokens that others read as well, beyond the first of them."""
    size_factor: Number = 1.0
    """How long the matrix products of this graph take, over what their work says."""
    dealt: Dealt | None = None
    """Its attention, if it is known how that is dealt out."""


def step_work(
    run: StepRun,
    features: Features,
    graph_sizes: Sequence[int],
    window: int | None,
    size_factors: SizeFactors = NO_FACTORS,
    dealer: Dealer | None = None,
) -> StepWork:
    """The work of a run whose counts are `features`."""
    tokens = padded(features.num_tokens, graph_sizes)
    factors = size_factors.prefills if features.num_prefills else size_factors.decodes
    num_new, num_table_tokens = _new_tables(run.plan) if run.plan.kinds else (0, 0)
    return StepWork(
        tokens,
        features.num_reqs,
        features.num_logits_rows,
        num_new,
        num_table_tokens,
        features.decode_kv_tokens,
        _decode_kv_bound(run, features, window),
        features.num_prefills or None,
        features.prefill_pairs,
        features.prefill_kv_tokens,
        _longest_kv(run, window) if features.num_prefills else 0,
        features.shared_kv_tokens,
        factors.get(tokens, 1.0) if graph_sizes else 1.0,
        dealer.deal(run, tokens) if dealer else None,
    )


def padded(num_tokens: int, graph_sizes: Sequence[int]) -> int:
    """The smallest captured size that holds so many tokens, or the tokens if none does."""
    at = bisect_left(graph_sizes, num_tokens)
    return graph_sizes[at] if at < len(graph_sizes) else num_tokens


def _new_tables(plan: StepPlan) -> tuple[int, int]:
    """New and resumed requests of a plan, and the tokens of their block tables."""
    tables = [
        start + n
        for request_id, start, n in zip(plan.request_ids, plan.starts, plan.num_tokens, strict=True)
        if plan.kinds.get(request_id) in (Kind.NEW, Kind.RESUMED)
    ]
    return len(tables), sum(tables)


def _longest_kv(run: StepRun, window: int | None) -> Number:
    plan, count = run
    steps: Any = 0 if count == 1 else np.arange(count, dtype=np.int64)
    longest: Any = 0
    for start, n in zip(plan.starts, plan.num_tokens, strict=True):
        read = start + n + n * steps
        if window is not None:
            read = _at_most(read, n + window - 1)
        longest = max(longest, read) if count == 1 else np.maximum(longest, read)
    return longest


def _at_most(value: Any, limit: int) -> Any:
    return min(value, limit) if isinstance(value, int) else np.minimum(value, limit)


def _decode_kv_bound(run: StepRun, features: Features, window: int | None) -> Number:
    if not features.num_decodes:
        return 1
    plan = run.plan
    starts = plan.starts
    if features.num_prefills:
        starts = [start for start, n in zip(starts, plan.num_tokens, strict=True) if n == 1]
    longest: Any = max(starts) + 1
    if run.count > 1:
        longest = longest + np.arange(run.count, dtype=np.int64)
    if window is not None:
        longest = np.minimum(longest, window) if run.count > 1 else min(longest, window)
    return features.num_decodes * longest
