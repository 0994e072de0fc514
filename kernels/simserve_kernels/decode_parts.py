"""Device functions that all paged decode kernels share: loads, scores, products, stores, fp8.

A tile is `opt.tile` tokens of one sequence and one KV head. Tiles that are seen whole are loaded
without masks (MASKED false), and the block numbers of the next tile before the tile itself, so
that no load of K or V waits for one. In others a token that is not seen is not read, and neither
is its table entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from simserve_kernels.decode_call import DecodeNumbers, DecodeStrides

__all__ = [
    "add_values",
    "block_numbers",
    "load_k",
    "load_packed_k",
    "load_query",
    "load_v",
    "scaled_scores",
    "score_tile",
    "store_rows",
    "tokens_to_read",
]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tokens_to_read(
    token: tl.tensor, low: tl.tensor, high: tl.tensor, opt: tl.constexpr
) -> tl.tensor:
    """Return which tokens are read: those in [low, high), or all of their blocks.

    opt.vector > 1 says that runs of so many tokens of V are contiguous and aligned (the packed
    layout). A mask per token would split their loads, and a run must have one block number.
    """
    if opt.vector > 1:
        first = token // opt.block_size * opt.block_size
        return (first < high) & (first + opt.block_size > low)
    else:
        return (token >= low) & (token < high)


@triton.jit
def block_numbers(
    table_row: tl.tensor, token: tl.tensor, read: tl.tensor, opt: tl.constexpr
) -> tl.tensor:
    """Return the block number of each token; the table entries of those not read are not read.

    int64, because block · stride passes 2^31 in a cache of a few GB.
    """
    return tl.load(table_row + token // opt.block_size, mask=read, other=0).to(tl.int64)


@triton.jit
def load_k(
    k_head: tl.tensor,
    block: tl.tensor,
    token: tl.tensor,
    seen: tl.tensor,
    by: DecodeStrides,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return K of a tile, transposed `[dims, tokens]`, 0 where a token is not seen."""
    if opt.packed_slot > 0:
        HEAD_PAD: tl.constexpr = opt.head_pad
        TILE: tl.constexpr = opt.tile
        row = block * by.k_block + (token % opt.block_size).to(tl.int64) * opt.packed_slot
        dim = tl.arange(0, opt.head_pad // opt.x)[:, None, None] * opt.x
        column = (dim // opt.x) * by.k_outer + tl.arange(0, opt.x)[None, None, :]
        tile = _load(k_head + row[None, :, None] + column, dim, seen[None, :, None], opt, MASKED)
        return tl.reshape(tl.permute(tile, (0, 2, 1)), (HEAD_PAD, TILE))
    else:
        row = block * by.k_block + (token % opt.block_size).to(tl.int64) * by.k_slot
        dim = tl.arange(0, opt.head_pad)[None, :]
        return tl.trans(_load(k_head + row[:, None] + dim, dim, seen[:, None], opt, MASKED))


@triton.jit
def load_packed_k(
    k_head: tl.tensor,
    block: tl.tensor,
    token: tl.tensor,
    seen: tl.tensor,
    by: DecodeStrides,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return K of a tile by the packed layout's pieces, `[tokens, dims / x, x]`; 0 if not seen.

    Of dimensions that are alike the compiler gives neighbouring threads the first: they read the 16
    bytes of neighbouring tokens, which lie side by side. (For a tensor core the order of `load_k`
    measures faster.)
    """
    row = block * by.k_block + (token % opt.block_size).to(tl.int64) * opt.packed_slot
    dim = tl.arange(0, opt.head_pad // opt.x)[None, :, None] * opt.x
    column = (dim // opt.x) * by.k_outer + tl.arange(0, opt.x)[None, None, :]
    return _load(k_head + row[:, None, None] + column, dim, seen[:, None, None], opt, MASKED)


@triton.jit
def _load(
    pointers: tl.tensor,
    dim: tl.tensor,
    read: tl.tensor,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load dimensions `dim` of a tile, with no more masks than needed; 0 where not loaded."""
    if MASKED:
        return tl.load(pointers, mask=read & (dim < opt.head), other=0.0)
    elif opt.head != opt.head_pad:
        return tl.load(pointers, mask=dim < opt.head, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_v(
    v_head: tl.tensor,
    block: tl.tensor,
    token: tl.tensor,
    read: tl.tensor,
    seen: tl.tensor,
    by: DecodeStrides,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return V of a tile `[tokens, dims]`, 0 where a token is not seen: weight 0 × NaN is NaN."""
    row = block * by.v_block + (token % opt.block_size).to(tl.int64) * by.v_slot
    VECTOR: tl.constexpr = opt.vector
    if VECTOR > 1:
        row = tl.max_contiguous(tl.multiple_of(row, VECTOR), VECTOR)
    dim = tl.arange(0, opt.head_pad)[None, :]
    tile = _load(v_head + row[:, None] + dim * by.v_dim, dim, read[:, None], opt, MASKED)
    if MASKED and VECTOR > 1:
        tile = tl.where(seen[:, None], tile, tl.zeros_like(tile))
    return tile


@triton.jit
def load_query(rows: tl.tensor, real: tl.tensor, scale: tl.tensor, opt: tl.constexpr) -> tl.tensor:
    """Return (q, its odd elements if pairs, what each row's products are multiplied with).

    `rows` are pointers `[rows, 1]`. For fp8 K, q is divided by its largest element and float16.
    """
    STEP: tl.constexpr = 2 if opt.pairs else 1
    ROWS: tl.constexpr = opt.rows
    dim = tl.arange(0, opt.head_pad)[None, :]
    stored = real[:, None] & (dim < opt.head)
    query = tl.load(rows + STEP * dim, mask=stored, other=0.0)
    odd = query
    row_scale = tl.full([ROWS], 1.0, tl.float32) * scale
    if opt.fp8:
        query = query.to(tl.float32)
        largest = tl.max(tl.abs(query), axis=1)
        if opt.pairs:
            odd = tl.load(rows + STEP * dim + 1, mask=stored, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(odd), axis=1))
        largest = tl.where(largest > 0.0, largest, 1.0)
        query = (query / largest[:, None]).to(tl.float16)
        odd = (odd / largest[:, None]).to(tl.float16)
        row_scale = row_scale * largest
    if not (opt.alibi or opt.soft_cap):
        row_scale = row_scale * LOG2_E
    return query, odd, row_scale


@triton.jit
def score_tile(
    query: tl.tensor,
    keys: tl.tensor,
    token: tl.tensor,
    seq_len: tl.tensor,
    num: DecodeNumbers,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return scores `[rows, tokens]` in units of log2; `query` is (of load_query ..., slopes)."""
    if opt.pairs:
        even, odd = unpack_fp8(keys)
        scores = tl.dot(query[1], odd, tl.dot(query[0], even))
    else:
        scores = tl.dot(query[0], keys.to(query[0].dtype), input_precision="ieee")
    return scaled_scores(scores, query, token, seq_len, num, opt)


@triton.jit
def scaled_scores(
    scores: tl.tensor,
    query: tl.tensor,
    token: tl.tensor,
    seq_len: tl.tensor,
    num: DecodeNumbers,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return products `[rows, tokens]` of q and K as scores; arguments as of `score_tile`."""
    scores = scores * query[2][:, None]
    if opt.alibi or opt.soft_cap:
        scores = biased_scores(scores, token, seq_len, query[3], num, opt) * LOG2_E
    return scores


@triton.jit
def add_values(
    acc: tl.tensor, acc_odd: tl.tensor, weights: tl.tensor, values: tl.tensor, opt: tl.constexpr
) -> tl.tensor:
    """Return (acc + weights · V, the same of the odd dimensions if pairs)."""
    if opt.pairs:
        even, odd = unpack_fp8(values)
        return tl.dot(weights, even, acc), tl.dot(weights, odd, acc_odd)
    else:
        values = values.to(weights.dtype)
        return tl.dot(weights, values, acc, input_precision="ieee"), acc_odd


@triton.jit
def store_rows(
    rows: tl.tensor,
    acc: tl.tensor,
    acc_odd: tl.tensor,
    factor: tl.tensor,
    real: tl.tensor,
    opt: tl.constexpr,
) -> None:
    """Store the accumulator times `factor [rows]` at pointers `[rows, 1]`, in their dtype."""
    STEP: tl.constexpr = 2 if opt.pairs else 1
    dtype: tl.constexpr = rows.dtype.element_ty
    dim = tl.arange(0, opt.head_pad)[None, :]
    stored = real[:, None] & (dim < opt.head)
    tl.store(rows + STEP * dim, (acc * factor[:, None]).to(dtype), mask=stored)
    if opt.pairs:
        tl.store(rows + STEP * dim + 1, (acc_odd * factor[:, None]).to(dtype), mask=stored)


@triton.jit
def biased_scores(
    scores: tl.tensor,
    token: tl.tensor,
    seq_len: tl.tensor,
    slope: tl.tensor,
    num: DecodeNumbers,
    opt: tl.constexpr,
) -> tl.tensor:
    """Cap scaled scores `[rows, tokens]`, add slope · (key position − query position)."""
    if opt.soft_cap:
        # tanh(x) = 1 − 2 / (e^2x + 1), right at both infinities
        power = tl.exp(scores * (2.0 / num.soft_cap))
        scores = num.soft_cap * (1.0 - 2.0 / (power + 1.0))
    if opt.alibi:
        scores += slope[:, None] * (token - seq_len + 1).to(tl.float32)[None, :]
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
