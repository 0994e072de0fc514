"""The tile of attention that paged prefill and flash attention share: online softmax over key tiles.

Rows. The queries of one sequence that read one K/V head are `q_len × group` rows, group =
num_heads / num_kv_heads: row r is query `r // group`, query head `kv_head × group + r % group`. A
tile is `BLOCK_M` consecutive rows, so that every head of a group reads K and V once, whatever the
ratio, and a decode (q_len 1) fills `group` rows of a small tile.

Online softmax (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Over tiles j of
`BLOCK_N` keys each row keeps its maximum m, its sum l and its output A, all in float32:

    m' = max(m, max S_j),  l' = e^(m - m') l + Σ e^(S_j - m'),  A' = e^(m - m') A + e^(S_j - m') V_j

and the output is A / l after the last tile. m starts at a finite -1e30, not at -inf, so that a tile
in which a row sees no key gives e^0 × 0, never inf - inf.

Scores. S = scale q·k; with a soft cap c, c tanh(S / c); with ALiBi, + slope × (key - query
position). The exponent is taken to base 2. For float16 and bfloat16 m is kept in units of log2 and
e^(S - m) is exp2(fma(S, log2 e, -m)); the rounding of m is common to all keys of a row. For float32
it is exp2((S - m) log2 e), exact also where multiply and add round apart.

Keys. A row at position p sees keys 0..p (causal), of those the last `window`. Tiles that every row
sees whole skip the masks. In the others a key outside what any row of the tile may see is never
loaded, and neither is its table entry: 0 × NaN is NaN, in V too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["Tile", "attention_kernel", "choose_tile"]

LOG2_E = tl.constexpr(1.4426950408889634)
NO_SCORE = tl.constexpr(-1e30)


class Tile(NamedTuple):
    """The shape of one program: rows, keys a step, warps and software pipelining stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tile(dtype: torch.dtype, kv_dtype: torch.dtype, head_pad: int, num_rows: int) -> Tile:
    """Return the tile for `num_rows` rows of `head_pad` dimensions (a power of two).

    float32 dots run on the CUDA cores, so that their tiles are small.
    """
    small = max(16, triton.next_power_of_2(num_rows))
    if dtype == torch.float32:
        return Tile(min(small, 32), 32 if head_pad <= 128 else 16, 4, 1)
    if small <= 32:
        return Tile(small, 64, 4, 3 if head_pad <= 128 else 2)
    if small == 64:
        return Tile(64, 64, 4, 3 if head_pad <= 128 else 2)
    if kv_dtype != dtype:
        return Tile(128, 64, 8, 2)
    if head_pad <= 128:
        return Tile(128, 128, 8, 2)
    return Tile(128, 64, 8, 2)


@triton.jit
def _find_tile(
    pid: tl.tensor,
    query_start: tl.tensor,
    num_seqs: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SEQS_PAD: tl.constexpr,
) -> tl.tensor:
    """Return (sequence, its tile number) of program `pid`.

    The tiles of sequence s begin at `first row of s // BLOCK_M + s`: one more than the rows need at
    most, which a program sees by having no rows.
    """
    seqs = tl.arange(0, SEQS_PAD)
    starts = tl.load(query_start + seqs, mask=seqs < num_seqs, other=0)
    starts = (starts - tl.load(query_start)) * GROUP
    begins = starts // BLOCK_M + seqs
    seq = tl.sum(((seqs < num_seqs) & (begins <= pid)).to(tl.int32), axis=0) - 1
    first = (tl.load(query_start + seq) - tl.load(query_start)) * GROUP // BLOCK_M + seq
    return seq, pid - first


@triton.jit
def _scores(
    products: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    slopes: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tl.tensor:
    """Return scaled, capped and biased scores `[BLOCK_M, BLOCK_N]` of `products` q·k."""
    scores = products * scale
    if SOFT_CAP:
        half = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / soft_cap))
        capped = soft_cap * (1.0 - half) / (1.0 + half)
        scores = tl.where(scores < 0.0, -capped, capped)
    if ALIBI:
        distance = (keys[None, :] - positions[:, None]).to(tl.float32)
        scores += slopes[:, None] * distance
    return scores


@triton.jit
def _softmax_step(
    scores: tl.tensor, l: tl.tensor, m: tl.tensor, log2_scale: tl.tensor, IEEE: tl.constexpr
) -> tl.tensor:
    """Return (weights, factor of the old state, l', m') for the scores of one tile of keys."""
    if IEEE:
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2((scores - m_new[:, None]) * log2_scale)
        alpha = tl.exp2((m - m_new) * log2_scale)
    else:
        m_new = tl.maximum(m, tl.max(scores, axis=1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
    return weights, alpha, l * alpha + tl.sum(weights, axis=1), m_new


@triton.jit
def _attend(
    acc: tl.tensor,
    l: tl.tensor,
    m: tl.tensor,
    q_tile: tl.tensor,
    positions: tl.tensor,
    slopes: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    table_row: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    last_key: tl.tensor,
    scale: tl.tensor,
    log2_scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_outer: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_dim: tl.tensor,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IEEE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Take the keys of [begin, end) into (A, l, m), tile by tile; return the new state."""
    PRECISION: tl.constexpr = "ieee" if IEEE else "tf32"
    dims = tl.arange(0, HEAD_PAD)
    k_dims = k_head + (dims // PACK) * k_outer + dims % PACK
    v_dims = v_head + dims * v_dim
    for key in tl.range(begin, end, BLOCK_N):
        key = tl.multiple_of(key, BLOCK_N)
        keys = key + tl.arange(0, BLOCK_N)
        loaded = (keys >= first_key) & (keys <= last_key)
        if BLOCK_SIZE == 0:
            blocks = tl.zeros([BLOCK_N], tl.int64)
            slots = keys.to(tl.int64)
        elif MASKED:
            blocks = tl.load(table_row + keys // BLOCK_SIZE, mask=loaded, other=0).to(tl.int64)
            slots = (keys % BLOCK_SIZE).to(tl.int64)
        else:
            blocks = tl.load(table_row + keys // BLOCK_SIZE).to(tl.int64)
            slots = (keys % BLOCK_SIZE).to(tl.int64)
        k_ptrs = k_dims[None, :] + (blocks * k_block + slots * k_slot)[:, None]
        v_ptrs = v_dims[None, :] + (blocks * v_block + slots * v_slot)[:, None]
        if MASKED:
            mask = loaded[:, None] & (dims < HEAD)[None, :]
            k_tile = tl.load(k_ptrs, mask=mask, other=0.0)
            v_tile = tl.load(v_ptrs, mask=mask, other=0.0)
        elif HEAD != HEAD_PAD:
            k_tile = tl.load(k_ptrs, mask=(dims < HEAD)[None, :], other=0.0)
            v_tile = tl.load(v_ptrs, mask=(dims < HEAD)[None, :], other=0.0)
        else:
            k_tile = tl.load(k_ptrs)
            v_tile = tl.load(v_ptrs)
        products = tl.dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), input_precision=PRECISION)
        if ALIBI or SOFT_CAP:
            products = _scores(products, keys, positions, slopes, scale, soft_cap, ALIBI, SOFT_CAP)
        if MASKED:
            visible = loaded[None, :]
            if CAUSAL:
                visible = visible & (keys[None, :] <= positions[:, None])
            if WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            products = tl.where(visible, products, float("-inf"))
        weights, alpha, l, m = _softmax_step(products, l, m, log2_scale, IEEE)
        acc = acc * alpha[:, None]
        v_tile = v_tile.to(q_tile.dtype)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, l, m


@triton.jit
def attention_kernel(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    block_table: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    key_start: tl.tensor,
    alibi_slopes: tl.tensor,
    num_seqs: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    table_seq: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    k_outer: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    v_dim: tl.tensor,
    MIN_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IEEE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Attention of varlen queries over paged keys, or over contiguous ones (BLOCK_SIZE 0).

    Grid: (tiles, K/V heads), where `tiles` is an upper bound; the spare programs return at once. A
    program owns `BLOCK_M` rows of one sequence and one K/V head, from its first visible key to its
    last, and stores them once; nothing is shared between programs. Program numbers run
    backwards, so that the tiles at a sequence's end, which see the most keys, start first.

    Sequences with fewer rows than `MIN_ROWS`, or more than `MAX_ROWS` (if not 0), are not served:
    a mixed batch is two launches with tiles of different heights.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, tile = _find_tile(pid, query_start, num_seqs, GROUP, BLOCK_M, SEQS_PAD)
    token = tl.load(query_start + seq).to(tl.int64)
    query_len = tl.load(query_start + seq + 1) - tl.load(query_start + seq)
    num_rows = query_len * GROUP
    served = (tile * BLOCK_M < num_rows) & (num_rows >= MIN_ROWS)
    if MAX_ROWS > 0:
        served = served & (num_rows <= MAX_ROWS)
    if not served:
        return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    heads = kv_head * GROUP + rows % GROUP
    tokens = token + rows // GROUP
    stored = (rows < num_rows)[:, None] & (dims < HEAD)[None, :]
    q_ptrs = q + tokens[:, None] * q_token + heads[:, None] * q_head + dims[None, :]
    q_tile = tl.load(q_ptrs, mask=stored, other=0.0)

    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len
    positions = context + rows // GROUP
    slopes = scale
    if ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=rows < num_rows, other=0.0).to(tl.float32)

    low = context + tile * BLOCK_M // GROUP
    high = context + (tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1) // GROUP
    last_key = seq_len - 1
    whole_end = seq_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        last_key = high
        whole_end = (low + 1) // BLOCK_N * BLOCK_N
    first_key = 0
    begin = 0
    whole_begin = 0
    if WINDOW:
        first_key = tl.maximum(low - window + 1, 0)
        begin = first_key // BLOCK_N * BLOCK_N
        whole_begin = tl.cdiv(tl.maximum(high - window + 1, 0), BLOCK_N) * BLOCK_N

    table_row = block_table + seq.to(tl.int64) * table_seq
    k_start = k + kv_head.to(tl.int64) * k_head
    v_start = v + kv_head.to(tl.int64) * v_head
    if BLOCK_SIZE == 0:
        key_token = tl.load(key_start + seq).to(tl.int64)
        k_start += key_token * k_slot
        v_start += key_token * v_slot
    log2_scale = scale * LOG2_E
    if ALIBI or SOFT_CAP:
        log2_scale = scale * 0.0 + LOG2_E

    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    # The tiles at the left edge of the window, those that every row sees whole, and the diagonal.
    for part in tl.static_range(0 if WINDOW else 1, 3):
        if part == 0:
            part_begin = begin
            part_end = tl.minimum(whole_begin, last_key + 1)
        elif part == 1:
            part_begin = whole_begin
            part_end = whole_end
        else:
            part_begin = tl.maximum(whole_begin, whole_end)
            part_end = last_key + 1
        acc, l, m = _attend(
            acc, l, m, q_tile, positions, slopes, k_start, v_start, table_row,
            part_begin, part_end, first_key, last_key, scale, log2_scale, soft_cap, window,
            k_block, k_slot, k_outer, v_block, v_slot, v_dim,
            part != 1, CAUSAL, WINDOW, ALIBI, SOFT_CAP, IEEE,
            HEAD, HEAD_PAD, PACK, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip

    result = acc * (v_scale / l)[:, None]
    out_ptrs = out + tokens[:, None] * out_token + heads[:, None] * out_head + dims[None, :]
    tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=stored)
