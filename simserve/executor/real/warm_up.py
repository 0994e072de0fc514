"""Batches that are run before a run begins, so that nothing is compiled in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simserve.executor.real.batch import Batch, build_batch

__all__ = ["largest_batch", "warm_up_batches"]

_LONG_PROMPT = 512
"""Tokens that fill more than one tile of any kernel."""


def largest_batch(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> Batch:
    """The batch that takes the most memory: the budget, shared by as many requests as may run.

    >>> largest_batch(4, 10, 100).num_tokens.tolist(), largest_batch(4, 10, 2).num_tokens.tolist()
    ([3, 3, 2, 2], [2, 2, 2, 2])
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    shares = np.full(num_rows, max_num_batched_tokens // num_rows)
    shares[: max_num_batched_tokens % num_rows] += 1
    return _prompts(shares.clip(max=max_model_len).tolist())


def warm_up_batches(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Iterator[Batch]:
    """The largest batch; and a prompt alone and beside decodes, for each power of two of requests.

    A kernel's variant depends on that power, on whether the number of requests is a multiple of
    16, and on how the longest query compares with its tiles.
    """
    yield largest_batch(max_num_seqs, max_num_batched_tokens, max_model_len)
    top = min(max_num_seqs, max_num_batched_tokens)
    sizes = {1, top}
    power = 2
    while power <= top:
        sizes |= {power - 1, power} if power > 16 else {power}
        power *= 2
    for num_rows in sorted(sizes):
        longest = min(_LONG_PROMPT, max_num_batched_tokens - num_rows + 1, max_model_len)
        yield _prompts([1] * (num_rows - 1) + [longest])


def _prompts(num_tokens: list[int]) -> Batch:
    """Prompts of these lengths, as whole requests."""
    count = len(num_tokens)
    return build_batch(range(count), [0] * count, num_tokens, [1] * count)
