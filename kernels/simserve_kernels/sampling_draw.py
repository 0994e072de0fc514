"""The last step of sampling: the exact cut of a row, and the token that its random number picks.

The cut is looked for among the logits that `sampling_passes` collected, or, where those turn out
not to hold it, in the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from simserve_kernels.sampling_cut import LARGEST_KEY, cut_of_row, is_kept, least_weight
from simserve_kernels.sampling_scratch import RowSettings, Scratch
from simserve_kernels.sampling_values import (
    GREEDY_LIMIT,
    MOST_LOGIT,
    canonical_logits,
    exponent_scale,
    key_of,
    least_logit,
    logit_of,
    row_largest,
    row_top_k,
    row_top_p,
    weight_of,
)

__all__ = ["draw_kernel", "pick_kernel"]


@triton.jit
def pick_kernel(tokens: tl.tensor, scratch: Scratch, opt: tl.constexpr) -> None:
    """Store the id of a row's largest logit, the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(tokens + row, _first_largest(scratch, row, opt))


@triton.jit
def _first_largest(scratch: Scratch, row: tl.tensor, opt: tl.constexpr) -> tl.tensor:
    chunk = tl.arange(0, opt.chunks_pad)
    real = chunk < opt.chunks
    chunk += row * opt.chunks
    top = tl.load(scratch.tops + chunk, mask=real, other=float("-inf"))
    first = tl.load(scratch.top_ids + chunk, mask=real, other=LARGEST_KEY)
    return tl.min(tl.where(top == tl.max(top, axis=0), first, LARGEST_KEY), axis=0)


@triton.jit
def _search(
    keys: tl.tensor, values: tl.tensor, goal: tl.tensor, low: tl.tensor, high: tl.tensor
) -> tl.tensor:
    """Return the largest T with Σ values[keys ≥ T] ≥ goal; that holds for `low`, not for `high`."""
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), values, 0), axis=0) >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _cut_among_collected(
    scratch: Scratch,
    row: tl.tensor,
    vocab: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    least: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return (whether the cut is there, cut, id of the last tie that is kept).

    If it is there, the weights of what is kept are added to those of their tiles.
    """
    tile = tl.arange(0, opt.tiles_pad)
    real = tile < opt.tiles
    tile += row * opt.tiles
    sure = tl.sum(tl.load(scratch.above + tile, mask=real, other=0), axis=0)
    n = tl.load(scratch.found + row)
    place = tl.arange(0, opt.capacity)
    there = place < n
    place += row * opt.capacity
    x = tl.load(scratch.between + place, mask=there, other=float("-inf"))
    key, weight = key_of(x), tl.where(there, weight_of(x, largest, scale), 0)
    low = tl.min(tl.where(there, key, LARGEST_KEY), axis=0).to(tl.int64)
    high = tl.max(tl.where(there, key, -LARGEST_KEY), axis=0).to(tl.int64) + 1
    fits = n <= opt.capacity
    cut, last = key_of(least).to(tl.int64), tl.full([], LARGEST_KEY, tl.int32)
    total = sure
    if k > 0:
        count = tl.sum(tl.load(scratch.counts + tile, mask=real, other=0), axis=0)
        whole = tl.load(scratch.brackets + 3 * row) <= tl.maximum(least, -MOST_LOGIT)
        fits = fits & (count < k) & ((k <= count + n) | whole)
        if fits & (k <= count + n):
            cut = _search(key, there.to(tl.int32), k - count, low, high)
        total += tl.sum(tl.where(key >= cut.to(tl.int32), weight, 0), axis=0)
    elif p < 1.0:
        total = tl.sum(tl.load(scratch.totals + tile, mask=real, other=0), axis=0)
    if p < 1.0:
        goal = least_weight(total, p)
        fits = fits & (goal > sure) & (goal <= sure + tl.sum(weight, axis=0))
        if fits:
            cut = _search(key, weight, goal - sure, low, high)
            rest = goal - sure - tl.sum(tl.where(key > cut.to(tl.int32), weight, 0), axis=0)
            each = weight_of(logit_of(cut.to(tl.int32)), largest, scale)
            keep = (rest + each - 1) // each
            tie = (there & (key == cut.to(tl.int32))).to(tl.int32)
            if keep < tl.sum(tie, axis=0):
                token = tl.load(scratch.between_ids + place, mask=there, other=0)
                first = -vocab.to(tl.int64)
                last = -_search(-token, tie, keep, first, first - first + 1).to(tl.int32)
    if fits:
        token = tl.load(scratch.between_ids + place, mask=there, other=0)
        kept = there & is_kept(key, token, cut, last)
        to = scratch.above + row * opt.tiles + token // opt.tile
        tl.atomic_add(to, weight, mask=kept, sem="relaxed")
    return fits, cut, last


@triton.jit
def _token_at(
    weights: tl.tensor,
    random: tl.tensor,
    logits: tl.tensor,
    vocab: tl.tensor,
    cut: tl.tensor,
    last: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return the first token whose running sum of weights exceeds random / 2⁶⁴ of the whole.

    Of a row that has nothing above −∞ the sums are 0, which nothing exceeds: it gives token 0.
    """
    tile = tl.arange(0, opt.tiles_pad)
    place = tl.umulhi(random, tl.sum(weights, axis=0).to(tl.uint64)).to(tl.int64)
    chosen = tl.sum((tl.cumsum(weights, 0) <= place).to(tl.int32), axis=0)
    place -= tl.sum(tl.where(tile < chosen, weights, 0), axis=0)
    token = chosen * opt.tile + tl.arange(0, opt.tile)
    x = canonical_logits(logits + token, token < vocab)
    weight = tl.where(is_kept(key_of(x), token, cut, last), weight_of(x, largest, scale), 0)
    token = chosen * opt.tile + tl.sum((tl.cumsum(weight, 0) <= place).to(tl.int32), axis=0)
    return tl.where(token < vocab, token, 0)


@triton.jit
def draw_kernel(
    tokens: tl.tensor,
    cuts: tl.tensor,
    last_ties: tl.tensor,
    scratch: Scratch,
    logits: tl.tensor,
    logits_row: tl.tensor,
    vocab: tl.tensor,
    settings: RowSettings,
    opt: tl.constexpr,
) -> None:
    """Store the token of a row, and of a random one its cut and last tie."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(settings.temperature + row)
    if opt.mixed:  # noqa: SIM102 - known when compiled, the other is not
        if t < GREEDY_LIMIT:
            tl.store(tokens + row, _first_largest(scratch, row, opt))
            return
    logits += row * logits_row
    above = scratch.above + row * opt.tiles
    largest, scale = row_largest(scratch.tops, row, opt), exponent_scale(t)
    least = least_logit(settings.min_p, row, largest, t)
    cut, last = key_of(least).to(tl.int64), tl.full([], LARGEST_KEY, tl.int32)
    if opt.capacity > 0:
        k, p = row_top_k(settings.top_k, row, vocab), row_top_p(settings.top_p, row)
        if (k > 0) | (p < 1.0):
            fits, cut, last = _cut_among_collected(
                scratch, row, vocab, k, p, least, largest, scale, opt
            )
            if not fits:
                cut, last = cut_of_row(above, logits, vocab, k, p, least, largest, scale, opt)
            tl.debug_barrier()
    tile = tl.arange(0, opt.tiles_pad)
    # Past the L1 cache, which does not see what was added.
    weights = tl.load(above + tile, mask=tile < opt.tiles, other=0, cache_modifier=".cg")
    tl.store(cuts + row, logit_of(cut.to(tl.int32)))
    tl.store(last_ties + row, last)
    a, b, _, _ = tl.randint4x(tl.load(settings.seeds + row), tl.load(settings.steps + row))
    random = (a.to(tl.uint64) << 32) | b.to(tl.uint64)
    token = _token_at(weights, random, logits, vocab, cut, last, largest, scale, opt)
    tl.store(tokens + row, token)
