"""What the sampling kernels make of a logit: a number, a key that sorts like it, a whole weight.

Weights are whole numbers: 2⁴⁰ · e^((x − largest) / t), rounded. Sums of whole numbers do not
depend on their order, so that a cut and a draw come out the same however a row is split among
programs. What is lighter than 2⁻⁴¹ of the likeliest token weighs nothing; a vocabulary of 128,256
such tokens would have 6e-8 of its weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from simserve_kernels.sampling_settings import GREEDY_BELOW, LARGEST_LOGIT

__all__ = [
    "GREEDY_LIMIT",
    "LARGEST_EXPONENT",
    "MOST_LOGIT",
    "WEIGHT_OF_LARGEST",
    "canonical_logits",
    "exponent_scale",
    "key_of",
    "least_logit",
    "logit_of",
    "row_largest",
    "row_top_k",
    "row_top_p",
    "weight_of",
]

WEIGHT_OF_LARGEST = tl.constexpr(2.0**40)
GREEDY_LIMIT = tl.constexpr(GREEDY_BELOW)
_LOG2_E = tl.constexpr(1.4426950408889634)
MOST_LOGIT = tl.constexpr(LARGEST_LOGIT)
LARGEST_EXPONENT = tl.constexpr(100.0)
"""Of two, in weights that are not relative to the largest logit."""
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def canonical_logits(pointers: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Load float32 logits: NaN is −∞, +∞ the largest logit, −0 is 0; what is not real is −∞."""
    x = tl.load(pointers, mask=real, other=float("-inf")).to(tl.float32)
    x = tl.where(x > -MOST_LOGIT, x, float("-inf"))
    return tl.minimum(x, MOST_LOGIT) + 0.0


@triton.jit
def exponent_scale(temperature: tl.tensor) -> tl.tensor:
    """Return log₂(e) / t; a smaller t than the smallest that is not greedy counts as that."""
    return _LOG2_E / tl.maximum(temperature, GREEDY_LIMIT)


@triton.jit
def weight_of(x: tl.tensor, largest: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return 2⁴⁰ · 2^((x − largest) · scale) as int64; `largest` is finite."""
    return (tl.exp2((x - largest) * scale) * WEIGHT_OF_LARGEST + 0.5).to(tl.int64)


@triton.jit
def key_of(x: tl.tensor) -> tl.tensor:
    """Return the int32 whose order is that of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MAGNITUDE_BITS)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """Return the float32 number of a key."""
    bits = key ^ ((key >> 31) & _MAGNITUDE_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def row_top_k(top_k: tl.tensor, row: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """Return the k of a row as int32; 0: there is none, or it keeps all."""
    k = tl.full([], 0, tl.int32)
    if top_k is not None:
        k = tl.load(top_k + row)
        k = tl.where((k >= 1) & (k < vocab), k, 0)
    return k


@triton.jit
def row_top_p(top_p: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the p of a row; 1: all are kept."""
    p = tl.full([], 1.0, tl.float32)
    if top_p is not None:
        p = tl.load(top_p + row)
    return p


@triton.jit
def row_largest(tops: tl.tensor, row: tl.tensor, opt: tl.constexpr) -> tl.tensor:
    """Return the largest logit of a row by its chunks; 0 if there is none above −∞."""
    chunk = tl.arange(0, opt.chunks_pad)
    real = chunk < opt.chunks
    top = tl.load(tops + row * opt.chunks + chunk, mask=real, other=float("-inf"))
    largest = tl.max(top, axis=0)
    return tl.where(largest > float("-inf"), largest, 0.0)


@triton.jit
def least_logit(
    min_p: tl.tensor, row: tl.tensor, largest: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Return the smallest logit that min-p keeps: largest + t · ln(min_p)."""
    least = tl.full([], float("-inf"), tl.float32)
    if min_p is not None:
        share = tl.load(min_p + row)
        distance = temperature * tl.log(tl.maximum(share, 1e-37))
        least = tl.where(share > 0.0, largest + distance, float("-inf"))
    return least + 0.0
