"""Device functions that all paged decode kernels share: cache addresses, masks and scores."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["biased_scores", "load_k", "load_v", "locate"]


@triton.jit
def locate(
    table_row: tl.tensor, token: tl.tensor, seen: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Return (block, place in the block) of each token, int64; table entries of others are 0.

    int64, because block · stride passes 2^31 in a cache of a few GB.
    """
    block = tl.load(table_row + token // BLOCK_SIZE, mask=seen, other=0)
    return block.to(tl.int64), (token % BLOCK_SIZE).to(tl.int64)


@triton.jit
def load_k(
    k_head: tl.tensor,
    block: tl.tensor,
    place: tl.tensor,
    seen: tl.tensor,
    dim: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_outer: tl.tensor,
    X: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
) -> tl.tensor:
    """Return the K tile `[tokens, dims]`; tokens not seen are not read."""
    row = block * k_block + place * k_slot
    column = (dim // X) * k_outer + dim % X
    mask = seen[:, None] & (dim < HEAD_SIZE)[None, :]
    return tl.load(k_head + row[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_v(
    v_head: tl.tensor,
    block: tl.tensor,
    place: tl.tensor,
    token: tl.tensor,
    seen: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    dim: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_dim: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Return the V tile `[tokens, dims]`, 0 where a token is not seen: weight 0 × NaN is NaN.

    VECTOR > 1 says that runs of so many tokens are contiguous and aligned (the packed layout). A
    mask per token would split their loads, so that whole blocks are read and the tokens that are
    not in [low, high) replaced.
    """
    row = block * v_block + place * v_slot
    in_head = (dim < HEAD_SIZE)[None, :]
    if VECTOR > 1:
        row = tl.max_contiguous(tl.multiple_of(row, VECTOR), VECTOR)
        first = token // BLOCK_SIZE * BLOCK_SIZE
        touched = (first < high) & (first + BLOCK_SIZE > low)
        pointers = v_head + row[:, None] + dim[None, :] * v_dim
        tile = tl.load(pointers, mask=touched[:, None] & in_head, other=0.0)
        tile = tl.where(seen[:, None], tile, tl.zeros_like(tile))
    else:
        pointers = v_head + row[:, None] + dim[None, :] * v_dim
        tile = tl.load(pointers, mask=seen[:, None] & in_head, other=0.0)
    return tile


@triton.jit
def biased_scores(
    scores: tl.tensor,
    distance: tl.tensor,
    slope: tl.tensor,
    soft_cap: tl.tensor,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tl.tensor:
    """Cap scaled scores, then add slope · (key position − query position)."""
    if SOFT_CAP:
        # tanh(x) = 1 − 2 / (e^2x + 1), right at both infinities
        scores = soft_cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / soft_cap)) + 1.0))
    if ALIBI:
        scores += slope * distance
    return scores
