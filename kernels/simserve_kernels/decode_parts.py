"""Device functions that all paged decode kernels share: addresses, masks, scores, fp8."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["biased_scores", "load_k", "load_v", "locate", "tokens_to_read", "unpack_fp8"]


@triton.jit
def tokens_to_read(
    token: tl.tensor,
    seen: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Return which tokens are read: those seen, in [low, high), or all of their blocks.

    VECTOR > 1 says that runs of so many tokens of V are contiguous and aligned (the packed
    layout). A mask per token would split their loads, and a run must have one block number.
    """
    if VECTOR > 1:
        first = token // BLOCK_SIZE * BLOCK_SIZE
        return (first < high) & (first + BLOCK_SIZE > low)
    else:
        return seen


@triton.jit
def locate(
    table_row: tl.tensor, token: tl.tensor, read: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Return (block, place in the block) of each token; the table entries of others are not read.

    int64, because block · stride passes 2^31 in a cache of a few GB.
    """
    block = tl.load(table_row + token // BLOCK_SIZE, mask=read, other=0)
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
    read: tl.tensor,
    seen: tl.tensor,
    dim: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_dim: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Return the V tile `[tokens, dims]`, 0 where a token is not seen: weight 0 × NaN is NaN."""
    row = block * v_block + place * v_slot
    in_head = (dim < HEAD_SIZE)[None, :]
    if VECTOR > 1:
        row = tl.max_contiguous(tl.multiple_of(row, VECTOR), VECTOR)
        pointers = v_head + row[:, None] + dim[None, :] * v_dim
        tile = tl.load(pointers, mask=read[:, None] & in_head, other=0.0)
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


# Two words of two fp8 each, (a, b) and (c, d), become the float16 pairs (a, c) and (b, d).
_UNPACK = tl.constexpr(
    """{
    .reg .b16 first, second;
    .reg .b32 ab, cd;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 ab, first;
    cvt.rn.f16x2.e4m3x2 cd, second;
    prmt.b32 $0, ab, cd, 0x5410;
    prmt.b32 $1, ab, cd, 0x7632;
    }"""
)


@triton.jit
def unpack_fp8(words: tl.tensor) -> tl.tensor:
    """Return the even and the odd elements, float16, of a tile of 16-bit words of two fp8."""
    return tl.inline_asm_elementwise(
        _UNPACK,
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
