"""The arrays of a batch, from where its requests stand: numpy alone, vectorised over requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simserve.kv.batch import (
    compute_query_start_loc,
    reorder_batch_to_split_decodes_and_prefills,
)

__all__ = ["EMPTY_BATCH", "Batch", "build_batch"]

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
    def num_wanted_each(self) -> int:
        """Most new tokens of a request, if the logits of all of them are wanted; else 0."""
        total = len(self.logit_rows)
        if total != self.query_start_loc[-1]:
            return 0
        return 1 if total == len(self.slots) else int(self.num_tokens.max())

    def one_by_one(self) -> Batch:
        """Each token as a request of its own, if the logits of all are wanted.

        What it attends to is the same: the tokens before it are in the cache as well.
        """
        positions = self.positions()
        return self._replace(
            slots=self.token_slots(),
            starts=positions,
            num_tokens=np.ones_like(positions),
            seq_lens=positions + 1,
            query_start_loc=np.arange(len(positions) + 1),
        )

    def token_slots(self) -> Ints:
        """Place of each token's request, shape [T]."""
        if self.query_start_loc[-1] == len(self.slots):
            return self.slots
        return self.slots.repeat(self.num_tokens)

    def positions(self) -> Ints:
        """Position of each token in its request, shape [T]."""
        if self.query_start_loc[-1] == len(self.slots):
            return self.starts
        shift = self.starts - self.query_start_loc[:-1]
        return shift.repeat(self.num_tokens) + np.arange(self.query_start_loc[-1])


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
    # Of each request the last ones: so far from its end, and those of the requests before it.
    of_request = np.arange(len(slot)).repeat(logits)
    from_end = np.arange(len(of_request)) - logits.cumsum()[of_request]
    return Batch(
        slots=slot,
        starts=start,
        num_tokens=count,
        seq_lens=ends,
        query_start_loc=query_start_loc,
        logit_rows=query_start_loc[1:][of_request] + from_end,
        logit_slots=slot[of_request],
        logit_ends=ends[of_request] + from_end + 1,
    )


EMPTY_BATCH = build_batch([], [], [], [])
