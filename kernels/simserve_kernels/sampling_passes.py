"""The passes over all logits before a draw: a sample, the largest logits, and the exact sums.

A cut by top-k or top-p is found in two steps. `sketch` and `survey` look where it may lie, and
`sampling_guess` says between which two logits; `gather` adds up exactly what lies above them and
collects what lies between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from simserve_kernels.sampling_scratch import RowSettings, Scratch
from simserve_kernels.sampling_values import (
    GREEDY_LIMIT,
    LARGEST_EXPONENT,
    MOST_LOGIT,
    canonical_logits,
    exponent_scale,
    least_logit,
    row_largest,
    row_top_k,
    row_top_p,
    weight_of,
)

__all__ = ["LARGEST_ID", "gather_kernel", "sketch_kernel", "survey_kernel"]

PIECES = tl.constexpr(16)
"""A sample is so many runs of tokens, evenly spaced in the vocabulary."""
PIECE = tl.constexpr(128)
"""Tokens of a run."""
_FIRST_PIVOT = tl.constexpr(3.5)
_SPACING = tl.constexpr(0.4)
"""Of pivots, in standard deviations of the sample, from its mean."""
LARGEST_ID = tl.constexpr(2**31 - 1)
_WINDOW = tl.constexpr(64.0)
"""Logits that are so far below the largest are masks, or as good as that."""


@triton.jit
def sketch_kernel(
    scratch: Scratch, logits: tl.tensor, logits_row: tl.tensor, vocab: tl.tensor, opt: tl.constexpr
) -> None:
    """Store the pivots of a row, descending to below all logits, then what weights are relative to.

    They are evenly spaced about the mean of a sample.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PIECES * PIECE)
    token = lane // PIECE * (vocab // PIECES) + lane % PIECE
    x = canonical_logits(logits + row * logits_row + token, token < vocab)
    reference = tl.max(x, axis=0)
    reference = tl.where(reference > float("-inf"), reference, 0.0)
    x -= reference
    near = x >= -_WINDOW
    count = tl.maximum(tl.sum(near.to(tl.float32), axis=0), 1.0)
    mean = tl.sum(tl.where(near, x, 0.0), axis=0) / count
    # From the mean distance, which a few large logits hardly change.
    spread = tl.sum(tl.where(near, tl.abs(x - mean), 0.0), axis=0) / count
    deviation = tl.maximum(1.25 * spread, 1e-3)
    pivot = tl.arange(0, opt.pivots)
    logit = reference + mean + deviation * (_FIRST_PIVOT - _SPACING * pivot)
    to = scratch.sketches + row * (opt.pivots + 1)
    tl.store(to + pivot, tl.where(pivot < opt.pivots - 1, logit, -MOST_LOGIT))
    tl.store(to + opt.pivots, reference)


@triton.jit
def survey_kernel(
    scratch: Scratch,
    logits: tl.tensor,
    logits_row: tl.tensor,
    vocab: tl.tensor,
    settings: RowSettings,
    opt: tl.constexpr,
) -> None:
    """Store the largest logit of a chunk, its id if it is wanted, and what is above each pivot.

    That is a count in rows with a top-k, else a sum of weights relative to the sketch. Rows that
    nothing cuts have no pivots.
    """
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // opt.chunks, (program % opt.chunks).to(tl.int32)
    logits += row * logits_row
    if opt.pivots > 0:
        k, p = row_top_k(settings.top_k, row, vocab), row_top_p(settings.top_p, row)
        if (k > 0) | (p < 1.0):
            # With a scale of 0 all weights are 1, and their sums are counts.
            scale = tl.where(k > 0, 0.0, exponent_scale(tl.load(settings.temperature + row)))
            _survey_with_pivots(scratch, logits, vocab, program, row, chunk, scale, opt)
            return
    token = chunk * opt.chunk + tl.arange(0, opt.chunk)
    x = canonical_logits(logits + token, token < vocab)
    _store_top(scratch, program, x, token, opt)


@triton.jit
def _survey_with_pivots(
    scratch: Scratch,
    logits: tl.tensor,
    vocab: tl.tensor,
    program: tl.tensor,
    row: tl.tensor,
    chunk: tl.tensor,
    scale: tl.tensor,
    opt: tl.constexpr,
) -> None:
    """Add up what is above each pivot, a token at a time in each thread."""
    pivot = tl.arange(0, opt.pivots)
    sketch = scratch.sketches + row * (opt.pivots + 1)
    pivots, reference = tl.load(sketch + pivot)[:, None], tl.load(sketch + opt.pivots)
    above = tl.full([opt.pivots, opt.lanes], 0.0, tl.float32)
    top = tl.full([opt.lanes], float("-inf"), tl.float32)
    start = chunk * opt.chunk
    top_id = start + tl.arange(0, opt.lanes)
    for first in tl.range(start, start + opt.chunk, opt.lanes, loop_unroll_factor=8):
        token = first + tl.arange(0, opt.lanes)
        x = canonical_logits(logits + token, token < vocab)
        if opt.ids:
            top_id = tl.where(x > top, token, top_id)
        top = tl.maximum(top, x)
        power = (tl.maximum(x, -MOST_LOGIT) - reference) * scale
        weight = tl.exp2(tl.minimum(power, LARGEST_EXPONENT))
        # A product and a sum are one instruction, a choice and a sum are two.
        above += (x[None, :] >= pivots).to(tl.float32) * weight[None, :]
    tl.store(scratch.surveys + program * opt.pivots + pivot, tl.sum(above, axis=1))
    _store_top(scratch, program, top, top_id, opt)


@triton.jit
def _store_top(
    scratch: Scratch, program: tl.tensor, x: tl.tensor, token: tl.tensor, opt: tl.constexpr
) -> None:
    top = tl.max(x, axis=0)
    tl.store(scratch.tops + program, top)
    if opt.ids:
        first = tl.min(tl.where(x == top, token, LARGEST_ID), axis=0)
        tl.store(scratch.top_ids + program, first)


@triton.jit
def _collect(
    scratch: Scratch,
    row: tl.tensor,
    logits: tl.tensor,
    start: tl.tensor,
    within: tl.tensor,
    opt: tl.constexpr,
) -> None:
    """Append the logits that are `within` to those of a row, in any order, as far as they fit.

    `within` is `[32, ·, 4]`. A thread notes its own, at most 32, in the bits of a number.
    """
    fours: tl.constexpr = opt.tile // 128
    bit = 1 << (tl.arange(0, fours)[:, None] * 4 + tl.arange(0, 4)[None, :])
    bits = tl.sum(tl.sum(tl.where(within, bit[None, :, :], 0), axis=2), axis=1)
    mine = tl.sum(tl.sum(within.to(tl.int32), axis=2), axis=1)
    count = tl.sum(mine, axis=0)
    if count > 0:
        to = tl.atomic_add(scratch.found + row, count, sem="relaxed")
        to += tl.cumsum(mine, axis=0) - mine
        while tl.max(mine, axis=0) > 0:
            lowest = bits & -bits
            place = (
                lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23
            ) - 127
            token = start + (place >> 2) * 128 + tl.arange(0, 32) * 4 + (place & 3)
            free = (mine > 0) & (to < opt.capacity)
            x = canonical_logits(logits + token, free)
            tl.store(scratch.between + row * opt.capacity + to, x, mask=free)
            tl.store(scratch.between_ids + row * opt.capacity + to, token, mask=free)
            bits, mine, to = bits ^ lowest, mine - 1, to + 1


@triton.jit
def gather_kernel(
    scratch: Scratch,
    logits: tl.tensor,
    logits_row: tl.tensor,
    vocab: tl.tensor,
    settings: RowSettings,
    opt: tl.constexpr,
) -> None:
    """Add up the weights above the bracket by tile; with pivots, collect what lies within it.

    With top-k it also counts what lies above the bracket, with top-p it adds up all that min-p
    keeps. Rows that nothing cuts have an empty bracket at that logit. A program of one warp does a
    tile.
    """
    program = tl.program_id(0).to(tl.int64)
    # The rows that the survey has read last may still be in the L2 cache.
    row = tl.num_programs(0) // opt.tiles - 1 - program // opt.tiles
    tile = (program % opt.tiles).to(tl.int32)
    t = tl.load(settings.temperature + row)
    if opt.mixed:  # noqa: SIM102 - known when compiled, the other is not
        if t < GREEDY_LIMIT:
            return
    logits += row * logits_row
    four = tl.arange(0, 32)[:, None] + tl.arange(0, opt.tile // 128)[None, :] * 32
    token = tile * opt.tile + four[:, :, None] * 4 + tl.arange(0, 4)
    x = canonical_logits(logits + token, token < vocab)
    if opt.pivots > 0:
        bracket = scratch.brackets + 3 * row
        low, high, largest = tl.load(bracket), tl.load(bracket + 1), tl.load(bracket + 2)
        least = least_logit(settings.min_p, row, largest, t)
    else:
        largest = row_largest(scratch.tops, row, opt)
        least = least_logit(settings.min_p, row, largest, t)
        low, high = least, least
    weight = weight_of(x, largest, exponent_scale(t))
    above = x >= high
    to = row * opt.tiles + tile
    tl.store(scratch.above + to, tl.sum(tl.where(above, weight, 0)))
    if settings.top_k is not None:
        tl.store(scratch.counts + to, tl.sum(above.to(tl.int32)))
    if settings.top_p is not None:
        kept = tl.where(x >= least, weight, 0) if settings.min_p is not None else weight
        tl.store(scratch.totals + to, tl.sum(kept))
    if opt.pivots > 0:  # noqa: SIM102 - known when compiled, the other is not
        if low < high:
            _collect(scratch, row, logits, tile * opt.tile, (x >= low) & (x < high), opt)
