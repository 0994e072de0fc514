"""The passes over all logits before a draw: a sample, the largest logits, and the exact sums.

A cut by top-k or top-p is found in two steps. `sketch` and `survey` look where it may lie, and
`sampling_guess` says between which two logits; `gather` adds up exactly what lies above them and
collects what lies between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from simserve_kernels.sampling_guess import guessed_bracket
from simserve_kernels.sampling_scratch import RowSettings, Scratch
from simserve_kernels.sampling_values import (
    GREEDY_LIMIT,
    LARGEST_EXPONENT,
    MOST_LOGIT,
    ONE_TOKEN,
    canonical_logits,
    exponent_scale,
    least_logit,
    row_largest,
    row_top_k,
    row_top_p,
    weight_of,
)

__all__ = ["gather_kernel", "sketch_kernel", "survey_kernel"]

PIECES = tl.constexpr(16)
"""A sample is so many runs of tokens, evenly spaced in the vocabulary."""
PIECE = tl.constexpr(128)
"""Tokens of a run."""
_FIRST_PIVOT = tl.constexpr(3.5)
_SPACING = tl.constexpr(0.4)
"""Of pivots, in standard deviations of the sample, from its mean."""
_WINDOW = tl.constexpr(64.0)
"""Logits that are so far below the largest are masks, or as good as that."""


@triton.jit
def sketch_kernel(
    scratch: Scratch, logits: tl.tensor, logits_row: tl.tensor, vocab: tl.tensor, opt: tl.constexpr
) -> None:
    """Store the pivots of a row, descending to −∞, then what weights are relative to.

    They are evenly spaced about the mean of a sample. Also sets the row's `found` to 0.
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
    tl.store(to + pivot, tl.where(pivot < opt.pivots - 1, logit, float("-inf")))
    tl.store(to + opt.pivots, reference)
    tl.store(scratch.found + row, 0)


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

    That is a count in rows with a top-k, else a sum of weights relative to the sketch. The last
    pivot is −∞.
    """
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // opt.chunks, (program % opt.chunks).to(tl.int32)
    token = chunk * opt.chunk + tl.arange(0, opt.chunk)
    x = canonical_logits(logits + row * logits_row + token, token < vocab)
    top = tl.max(x, axis=0)
    tl.store(scratch.tops + program, top)
    if opt.ids:
        tl.store(scratch.top_ids + program, tl.min(tl.where(x == top, token, vocab), axis=0))
    if opt.pivots > 0:
        k, p = row_top_k(settings.top_k, row, vocab), row_top_p(settings.top_p, row)
        if (k > 0) | (p < 1.0):
            pivots = scratch.sketches + row * (opt.pivots + 1)
            scale = exponent_scale(tl.load(settings.temperature + row))
            power = (x - tl.load(pivots + opt.pivots)) * scale
            weight = tl.exp2(tl.minimum(power, LARGEST_EXPONENT))
            weight = tl.where(k > 0, (x > float("-inf")).to(tl.float32), weight)
            count: tl.constexpr = opt.pivots
            for pivot in tl.static_range(count):
                # A product and a sum are one instruction, a choice and a sum are two.
                above = (x >= tl.load(pivots + pivot)).to(tl.float32) * weight
                tl.store(scratch.surveys + program * opt.pivots + pivot, tl.sum(above, axis=0))


@triton.jit
def _collect(
    scratch: Scratch,
    row: tl.tensor,
    x: tl.tensor,
    token: tl.tensor,
    within: tl.tensor,
    opt: tl.constexpr,
) -> None:
    """Append the logits that are `within` to those of a row, in any order, as far as they fit.

    All are `[tile / 4, 4]`: four neighbours, which one thread holds, take their places together.
    """
    ones = within.to(tl.int32)
    behind = tl.cumsum(ones, axis=1)
    count = tl.sum(ones, axis=1)
    to = scratch.found + row + count * 0
    first = tl.atomic_add(to, count, mask=count > 0, sem="relaxed")
    place = first[:, None] + behind - 1
    free = within & (place < opt.capacity)
    tl.store(scratch.between + row * opt.capacity + place, x, mask=free)
    tl.store(scratch.between_ids + row * opt.capacity + place, token, mask=free)


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

    A program owns `run` tiles of one row, each of at most 1024 logits: their weights fit into the
    low 52 bits of a sum, and how many they are is added up in the bits above. It also stores the
    weight of all that min-p keeps. Rows that nothing cuts have an empty bracket at that logit.
    """
    program = tl.program_id(0).to(tl.int64)
    # The rows that the survey has read last may still be in the L2 cache.
    row = tl.num_programs(0) // opt.runs - 1 - program // opt.runs
    run = (program % opt.runs).to(tl.int32)
    t = tl.load(settings.temperature + row)
    if opt.mixed:  # noqa: SIM102 - known when compiled, the other is not
        if t < GREEDY_LIMIT:
            return
    largest, scale = row_largest(scratch.tops, row, opt), exponent_scale(t)
    least = least_logit(settings.min_p, row, largest, t)
    low, high = least, least
    if opt.pivots > 0:
        k, p = row_top_k(settings.top_k, row, vocab), row_top_p(settings.top_p, row)
        if (k > 0) | (p < 1.0):
            low, high = guessed_bracket(scratch, row, vocab, k, p, least, largest, scale, opt)
        if run == 0:
            tl.store(scratch.brackets + 2 * row, low)
            tl.store(scratch.brackets + 2 * row + 1, high)
    bottom = tl.maximum(low, -MOST_LOGIT)  # what is −∞ is never collected
    four = tl.arange(0, opt.tile // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    total = tl.full([opt.tile // 4, 4], 0, tl.int64)
    for tile in range(run * opt.run, tl.minimum(run * opt.run + opt.run, opt.tiles)):
        token = tile * opt.tile + four
        x = canonical_logits(logits + row * logits_row + token, token < vocab)
        weight = weight_of(x, largest, scale)
        sure = tl.where(x >= high, weight + ONE_TOKEN, 0)
        tl.store(scratch.above + row * opt.tiles + tile, tl.sum(sure))
        if settings.top_p is not None:
            total += tl.where(x >= least, weight, 0) if settings.min_p is not None else weight
        if opt.pivots > 0:
            _collect(scratch, row, x, token, (x >= bottom) & (x < high), opt)
    if settings.top_p is not None:
        tl.store(scratch.totals + row * opt.runs + run, tl.sum(total))
