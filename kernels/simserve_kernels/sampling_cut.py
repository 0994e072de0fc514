"""The cut of a row, looked for in all of its logits: where what was collected does not hold it.

A cut is the largest key T that still has enough at or above it: k tokens, then p of their weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from simserve_kernels.sampling_values import canonical_logits, key_of, logit_of, weight_of

__all__ = ["LARGEST_KEY", "cut_of_row", "is_kept", "least_weight"]

LARGEST_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def least_weight(weight: tl.tensor, p: tl.tensor) -> tl.tensor:
    """Return the least whole weight that is p of `weight`, at least 1."""
    share = tl.ceil(weight.to(tl.float64) * p.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(share, weight), 1)


@triton.jit
def is_kept(key: tl.tensor, token: tl.tensor, cut: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Return which tokens are above the cut, or at it and among the ties that stay."""
    cut = cut.to(tl.int32)
    return (key > cut) | ((key == cut) & (token <= last))


@triton.jit
def _row_sum(
    logits: tl.tensor,
    vocab: tl.tensor,
    from_key: tl.tensor,
    counts: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """Return how many logits of a row are at or above a key, or if not `counts` their weight."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, vocab, SCAN):
        token = start + tl.arange(0, SCAN)
        x = canonical_logits(logits + token, token < vocab)
        value = tl.where(counts, (x > float("-inf")).to(tl.int64), weight_of(x, largest, scale))
        total += tl.sum(tl.where(key_of(x) >= from_key.to(tl.int32), value, 0), axis=0)
    return total


@triton.jit
def _search_row(
    logits: tl.tensor,
    vocab: tl.tensor,
    goal: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    counts: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    SCAN: tl.constexpr,
) -> tl.tensor:
    """`_search` in the whole row. Limits move to keys that occur, so that few of them end it soon.

    `goal` is at least 1, and the least key that may be returned is that of a logit above −∞.
    """
    while high - low > 1:
        middle = ((low + high) >> 1).to(tl.int32)
        total = tl.full([], 0, tl.int64)
        above, below = tl.full([], LARGEST_KEY, tl.int32), tl.full([], -LARGEST_KEY, tl.int32)
        for start in range(0, vocab, SCAN):
            token = start + tl.arange(0, SCAN)
            x = canonical_logits(logits + token, token < vocab)
            value = tl.where(counts, (x > float("-inf")).to(tl.int64), weight_of(x, largest, scale))
            key = key_of(x)
            reached = key >= middle
            total += tl.sum(tl.where(reached, value, 0), axis=0)
            above = tl.minimum(above, tl.min(tl.where(reached, key, LARGEST_KEY), axis=0))
            below = tl.maximum(below, tl.max(tl.where(reached, -LARGEST_KEY, key), axis=0))
        if total >= goal:
            low = above.to(tl.int64)
        else:
            high = tl.maximum(below.to(tl.int64), low) + 1
    return low


@triton.jit
def _row_last_tie(
    logits: tl.tensor, vocab: tl.tensor, cut: tl.tensor, keep: tl.tensor, SCAN: tl.constexpr
) -> tl.tensor:
    """Return the id of the `keep`-th token whose key is `cut`; 2³¹ − 1 if that is the last one."""
    seen, last = tl.full([], 0, tl.int64), tl.full([], LARGEST_KEY, tl.int32)
    for start in range(0, vocab, SCAN):
        token = start + tl.arange(0, SCAN)
        x = canonical_logits(logits + token, token < vocab)
        tie = ((key_of(x) == cut.to(tl.int32)) & (token < vocab)).to(tl.int32)
        place = seen + tl.cumsum(tie, 0)
        last = tl.minimum(
            last, tl.min(tl.where((tie > 0) & (place == keep), token, LARGEST_KEY), axis=0)
        )
        seen += tl.sum(tie, axis=0)
    return tl.where(keep < seen, last, LARGEST_KEY)


@triton.jit
def cut_of_row(
    above: tl.tensor,
    logits: tl.tensor,
    vocab: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    least: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return (cut, id of the last tie that is kept) of a row, and store what each tile keeps.

    Reads the row about 20 times, fewer if it has few different logits.
    """
    bottom = key_of(least).to(tl.int64)
    end = key_of(largest).to(tl.int64) + 1
    cut, last = bottom, tl.full([], LARGEST_KEY, tl.int32)
    if k > 0:  # noqa: SIM102 - a kernel evaluates both sides of `and`
        if _row_sum(logits, vocab, bottom, k > 0, largest, scale, opt.scan) >= k:
            cut = _search_row(logits, vocab, k, bottom, end, k > 0, largest, scale, opt.scan)
    if p < 1.0:
        by_weight = p >= 1.0
        base = _row_sum(logits, vocab, cut, by_weight, largest, scale, opt.scan)
        goal = least_weight(base, p)
        if base > 0:
            cut = _search_row(logits, vocab, goal, cut, end, by_weight, largest, scale, opt.scan)
            rest = goal - _row_sum(logits, vocab, cut + 1, by_weight, largest, scale, opt.scan)
            each = weight_of(logit_of(cut.to(tl.int32)), largest, scale)
            last = _row_last_tie(logits, vocab, cut, (rest + each - 1) // each, opt.scan)
    for tile in range(opt.tiles):
        token = tile * opt.tile + tl.arange(0, opt.tile)
        x = canonical_logits(logits + token, token < vocab)
        kept = is_kept(key_of(x), token, cut, last)
        weight = tl.where(kept, weight_of(x, largest, scale), 0)
        tl.store(above + tile, tl.sum(weight, axis=0))
    return cut, last
