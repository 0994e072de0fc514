"""Batches that are run before a run begins, so that nothing is compiled in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from simserve.executor.real.attention import AttentionPath
from simserve.executor.real.batch import Batch, build_batch

__all__ = ["Limits", "largest_batch", "warm_up_batches"]

_LONG_QUERY = 128
"""Tokens that fill more than one tile of any kernel."""


class Limits(NamedTuple):
    """What no batch exceeds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def largest_batch(limits: Limits) -> Batch:
    """The batch that takes the most memory: the budget, shared by as many requests as may run.

    >>> largest_batch(Limits(4, 10, 100)).num_tokens.tolist()
    [3, 3, 2, 2]
    >>> largest_batch(Limits(4, 10, 2)).num_tokens.tolist()
    [2, 2, 2, 2]
    """
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    shares = np.full(num_rows, limits.max_num_batched_tokens // num_rows)
    shares[: limits.max_num_batched_tokens % num_rows] += 1
    num_tokens = shares.clip(max=limits.max_model_len)
    return _batch(num_tokens.tolist(), 0, samples=1)


def warm_up_batches(limits: Limits, path: AttentionPath) -> Iterator[Batch]:
    """The largest batch, and one for every variant of the kernels that a later batch may ask for.

    Variants differ by the powers of two that the number of requests and the longest query are
    rounded up to, and by whether the context is long and, of decodes, whether there are many. So
    each number of requests is the smallest that is rounded up to its power, which leaves the most
    tokens to the longest query, and of decodes also the power itself; contexts are the shortest
    and the longest.

    They are launched one by one, as batches are that have no graph. Where scratch grows with the
    context, long decodes are left to the graphs that are captured beforehand.
    """
    yield largest_batch(limits)
    num_seqs, budget, longest = limits
    top = min(num_seqs, budget)
    for num_rows in sorted({*_powers(top), *_smallest(top)}):
        for length in (1,) if path.sizes_by_length else (1, longest):
            yield _batch([1] * num_rows, length - 1, samples=0)
    alone = min(path.decode_threshold + 1, longest) if path.reorders else 1
    for num_rows in _smallest(min(num_seqs, budget // alone)):
        most = min(budget - alone * (num_rows - 1), longest, _LONG_QUERY)
        for query_len in (*_powers(most), most):
            num_tokens = [alone] * (num_rows - 1) + [query_len]
            for start in (0, longest - query_len):
                yield _batch(num_tokens, start, samples=1)


def _powers(top: int) -> list[int]:
    """Powers of two up to `top`.

    >>> _powers(12)
    [1, 2, 4, 8]
    """
    return [1 << exponent for exponent in range(top.bit_length())]


def _smallest(top: int) -> list[int]:
    """The smallest number that is rounded up to each power of two.

    >>> _smallest(12)
    [1, 2, 3, 5, 9]
    """
    return [1, *(power + 1 for power in _powers(top - 1))] if top else []


def _batch(num_tokens: list[int], start: int, samples: int) -> Batch:
    """Requests of these lengths, the last one with `start` tokens before and so many logits."""
    count = len(num_tokens)
    starts, logits = [0] * (count - 1) + [start], [1] * (count - 1) + [samples]
    return build_batch(range(count), starts, num_tokens, logits)
