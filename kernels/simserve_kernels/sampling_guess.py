"""Between which two logits a row's cut lies, guessed from what lies above a few pivots.

The guess decides how long a draw takes, not what it finds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from simserve_kernels.sampling_scratch import RowSettings, Scratch
from simserve_kernels.sampling_values import (
    LARGEST_EXPONENT,
    MOST_LOGIT,
    exponent_scale,
    least_logit,
    row_largest,
    row_top_k,
    row_top_p,
)

__all__ = ["guess_kernel"]

_FLOOR = tl.constexpr(1e-7)
_TINY = tl.constexpr(1e-30)


@triton.jit
def _log_odds(part: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return ln(part / (total − part)), kept finite: it is nearly linear in the logit."""
    least = _FLOOR * total + _TINY
    return tl.log(tl.maximum(part, least)) - tl.log(tl.maximum(total - part, least))


@triton.jit
def _at(values: tl.tensor, place: tl.tensor, PIVOTS: tl.constexpr) -> tl.tensor:
    """Return values[place], or the first or last one if there is no such place."""
    place = tl.minimum(tl.maximum(place, 0), PIVOTS - 1)
    return tl.sum(tl.where(tl.arange(0, PIVOTS) == place, values, 0.0), axis=0)


@triton.jit
def _part_above(
    least: tl.tensor, sums: tl.tensor, pivots: tl.tensor, PIVOTS: tl.constexpr
) -> tl.tensor:
    """Return about what lies above `least`, from what lies above the pivots."""
    total = tl.max(sums, axis=0)
    n = tl.sum((pivots > least).to(tl.int32), axis=0)
    floor = _FLOOR * total + _TINY
    a, b = tl.maximum(_at(sums, n - 1, PIVOTS), floor), tl.maximum(_at(sums, n, PIVOTS), floor)
    upper, lower = _at(pivots, n - 1, PIVOTS), _at(pivots, n, PIVOTS)
    share = (upper - least) / tl.maximum(upper - lower, _TINY)
    between = tl.exp(tl.log(a) + tl.minimum(share, 1.0) * (tl.log(b) - tl.log(a)))
    return tl.where((n == 0) | (n >= PIVOTS - 1), b, between)


@triton.jit
def _guessed_bracket(
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
    """Return (low, high): the cut of a row is thought to be at a logit in low ≤ x < high."""
    chunk, pivot = tl.arange(0, opt.chunks_pad)[:, None], tl.arange(0, opt.pivots)
    surveys = scratch.surveys + (row * opt.chunks + chunk) * opt.pivots + pivot[None, :]
    sums = tl.sum(tl.load(surveys, mask=chunk < opt.chunks, other=0.0), axis=0)
    total = tl.max(sums, axis=0)
    sketch = scratch.sketches + row * (opt.pivots + 1)
    pivots = tl.load(sketch + pivot)
    base = _part_above(least, sums, pivots, opt.pivots)
    goal = tl.where(k > 0, k.to(tl.float32), p * base)
    n = tl.sum((sums < goal).to(tl.int32), axis=0)  # pivots above the cut
    a, b = tl.where(n > 0, _at(sums, n - 1, opt.pivots), 0.0), _at(sums, n, opt.pivots)
    lower = _at(pivots, n, opt.pivots)
    upper = tl.where(a > 0.0, _at(pivots, n - 1, opt.pivots), tl.maximum(largest, lower))
    # Between two pivots the log-odds are nearly linear; a third pivot says how they bend.
    other = tl.where((n > 1) & (_at(sums, n - 2, opt.pivots) > 0.0), n - 2, n + 1)
    from_a = _log_odds(goal, total) - _log_odds(a, total)
    b_from_a = tl.maximum(_log_odds(b, total) - _log_odds(a, total), _FLOOR)
    other_from_a = _log_odds(_at(sums, other, opt.pivots), total) - _log_odds(a, total)
    bends = (other < opt.pivots - 1) & (tl.abs(other_from_a * (other_from_a - b_from_a)) > 1e-4)
    slope = (lower - upper) / b_from_a
    to_other = (_at(pivots, other, opt.pivots) - upper) / tl.where(bends, other_from_a, 1.0)
    bend = (to_other - slope) / tl.where(bends, other_from_a - b_from_a, 1.0)
    guess = upper + slope * from_a + tl.where(bends, bend, 0.0) * from_a * (from_a - b_from_a)
    guess = tl.where(a > 0.0, guess, upper - goal / tl.maximum(b, _TINY) * (upper - lower))
    guess = tl.maximum(tl.minimum(guess, upper), lower)
    reference = tl.load(sketch + opt.pivots)
    power = (guess - reference) * scale
    each = tl.exp2(tl.minimum(tl.maximum(power, -LARGEST_EXPONENT), LARGEST_EXPONENT))
    tokens = tl.where(k > 0, b - a, (b - a) / each)
    # Twice this holds half of what there is room for, so that the guess may be off by that.
    half = (upper - lower) * tl.minimum(opt.capacity / 4 / tl.maximum(tokens, 1.0), 1.0)
    # A small k leaves room for all that is above, and top-p then finds its cut there too.
    open_above = ((k > 0) & (k <= opt.capacity // 4)) | ((a <= 0.0) & (guess + half >= upper))
    low = tl.maximum(guess - half, lower)
    # Above all pivots: top-p needs no token that has less than its share of what may be dropped.
    share = tl.log2(tl.maximum((1.0 - p) * base, _TINY) / vocab) / scale
    least_needed = tl.where(k > 0, lower, tl.maximum(lower, reference + share))
    all_above = (n == 0) & ((k == 0) | (b <= opt.capacity))
    low = tl.where(all_above, least_needed, low)
    low = tl.where(n >= opt.pivots - 1, float("-inf"), low)
    high = tl.where(n >= opt.pivots - 1, upper, tl.minimum(guess + half, upper))
    high = tl.where(open_above | all_above, float("inf"), high)
    low = tl.where(low > least, low, least)
    return low, tl.where(high > low, high, low)


@triton.jit
def guess_kernel(
    scratch: Scratch, vocab: tl.tensor, settings: RowSettings, opt: tl.constexpr
) -> None:
    """Store the bracket of a row, empty if nothing cuts it, and its largest logit.

    Also sets the row's `found` to 0.
    """
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(settings.temperature + row)
    largest, scale = row_largest(scratch.tops, row, opt), exponent_scale(t)
    least = least_logit(settings.min_p, row, largest, t)
    low, high = least, least
    k, p = row_top_k(settings.top_k, row, vocab), row_top_p(settings.top_p, row)
    if (k > 0) | (p < 1.0):
        low, high = _guessed_bracket(scratch, row, vocab, k, p, least, largest, scale, opt)
        low = tl.maximum(low, -MOST_LOGIT)  # what is −∞ is never collected
    bracket = scratch.brackets + 3 * row
    tl.store(bracket, low)
    tl.store(bracket + 1, high)
    tl.store(bracket + 2, largest)
    tl.store(scratch.found + row, 0)
