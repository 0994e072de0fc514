"""The arrays of a batch, from where its requests stand: numpy alone, vectorised over requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simserve.kv.batch import (
    compute_query_start_loc,
    reorder_batch_to_split_decodes_and_prefills,
)

__all__ = ["Batch", "build_batch"]

Ints = NDArray[np.int64]


class Batch(NamedTuple):
    """A batch of R requests with T new tokens, in the order in which the model sees them."""

    slots: Ints
    """Place of each request on the device, shape [R]."""
    starts: Ints
    """Position of its first new token, shape [R]."""
    num_tokens: Ints
    """New tokens, shape [R]."""
    seq_lens: Ints
    """Tokens after the step, shape [R]."""
    query_start_loc: Ints
    """First new token of each request in the batch, and T; shape [R + 1]."""
    logit_rows: Ints
    """Tokens whose logits are wanted, shape [L]; per request its last ones."""
    logit_slots: Ints
    """Place of their request, shape [L]."""
    logit_ends: Ints
    """Position of the token that each of them predicts, shape [L]."""

    @property
    def uniform_query_len(self) -> int:
        """New tokens of every request, all of whose logits are wanted; else 0."""
        num_requests, total = len(self.slots), len(self.logit_rows)
        if total != self.query_start_loc[-1] or total % num_requests:
            return 0
        first = total // num_requests
        return first if first == 1 or bool((self.num_tokens == first).all()) else 0

    def token_slots(self) -> Ints:
        """Place of each token's request, shape [T]."""
        if self.query_start_loc[-1] == len(self.slots):
            return self.slots
        return np.repeat(self.slots, self.num_tokens)

    def positions(self) -> Ints:
        """Position of each token in its request, shape [T]."""
        if self.query_start_loc[-1] == len(self.slots):
            return self.starts
        shift = self.starts - self.query_start_loc[:-1]
        return np.repeat(shift, self.num_tokens) + np.arange(self.query_start_loc[-1])


def build_batch(
    slots: ArrayLike,
    starts: ArrayLike,
    num_tokens: ArrayLike,
    num_logits: ArrayLike,
    *,
    decodes_first: int = 0,
) -> Batch:
    """Lay out a batch of R requests.

    Args:
        slots: place of each request on the device, shape [R].
        starts: tokens computed before, shape [R].
        num_tokens: tokens to compute, each at least 1, shape [R].
        num_logits: how many of a request's last tokens predict one, shape [R].
        decodes_first: bring requests of at most so many tokens to the front; 0: leave the order.

    >>> batch = build_batch([3, 1], [0, 7], [2, 1], [0, 1], decodes_first=1)
    >>> batch.slots.tolist(), batch.positions().tolist(), batch.logit_rows.tolist()
    ([1, 3], [7, 0, 1], [0])
    """
    columns = np.array([slots, starts, num_tokens, num_logits], dtype=np.int64)
    if decodes_first:
        moved = reorder_batch_to_split_decodes_and_prefills(columns[2].tolist(), decodes_first)
        if moved.modified:
            columns = columns[:, moved.order]
    slot, start, count, logits = columns
    query_start_loc = compute_query_start_loc(count)
    ends = start + count
    return Batch(
        slots=slot,
        starts=start,
        num_tokens=count,
        seq_lens=ends,
        query_start_loc=query_start_loc,
        logit_rows=_last(query_start_loc[1:], logits),
        logit_slots=np.repeat(slot, logits),
        logit_ends=_last(ends, logits) + 1,
    )


def _last(ends: Ints, counts: Ints) -> Ints:
    """The last `counts[i]` whole numbers below each `ends[i]`, one after the other."""
    first = np.repeat(ends - np.cumsum(counts), counts)
    return first + np.arange(len(first))
