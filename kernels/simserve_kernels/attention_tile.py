"""The tile of attention that paged and contiguous keys share: online softmax over key tiles.

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

from simserve_kernels.attention_loads import block_numbers, load_tiles
from simserve_kernels.layouts import KVStrides

__all__ = ["FEW_KEYS", "Numbers", "Options", "Strides", "Tile", "attention_kernel", "choose_tile"]

LOG2_E = tl.constexpr(1.4426950408889634)
NO_SCORE = tl.constexpr(-1e30)

FEW_KEYS = 4096


class Options(NamedTuple):
    """What a variant of the kernel is compiled for."""

    ieee: bool
    causal: bool
    window: bool
    alibi: bool
    soft_cap: bool
    group: int
    head: int
    head_pad: int
    kv: KVStrides
    vector: int  # values of neighbouring tokens that are contiguous and aligned
    block_size: int  # 0: contiguous keys, no block table
    seqs_pad: int  # 1 if one_tile: it does not matter then
    one_tile: bool  # no sequence that is served has more rows than a tile
    block_m: int
    block_n: int


class Numbers(NamedTuple):
    """Numbers of a call; k_scale is part of `scale`."""

    scale: float
    v_scale: float
    soft_cap: float
    window: int


class Strides(NamedTuple):
    """Strides in elements of what is not K or V."""

    out_token: int
    out_head: int
    q_token: int
    q_head: int
    table_seq: int


class Tile(NamedTuple):
    """The shape of one program: rows, keys a step, warps and software pipelining stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tile(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_pad: int, num_rows: int, max_keys: int
) -> Tile:
    """Return the tile for `num_rows` rows of `head_pad` dimensions (a power of two).

    float32 dots run on the CUDA cores, so that their tiles are small. Few keys are taken 64 at a
    time, by 64 rows: half of a causal tile of 128 keys is masked, which only many keys make up for,
    and of two small programs on a multiprocessor one multiplies while the other takes its softmax.
    """
    height = max(16, triton.next_power_of_2(num_rows))
    if dtype == torch.float32:
        return Tile(min(height, 32), 32 if head_pad <= 128 else 16, 8, 1)
    if height <= 32:
        return Tile(height, 32, 4, 3)
    if height == 64:
        return Tile(64, 64, 4, 3 if head_pad <= 128 else 2)
    if head_pad > 128 or kv_dtype != dtype:
        return Tile(128, 64, 8, 2)
    return Tile(64, 64, 4, 2) if max_keys <= FEW_KEYS else Tile(128, 128, 8, 2)


@triton.jit
def _find_tile(query_start: tl.tensor, num_seqs: tl.tensor, opt: tl.constexpr) -> tl.tensor:
    """Return (sequence, number of its tile) of this program.

    The tiles of sequence s begin at `its first row // block_m + s`: at most one more than its rows
    need, and that one finds that it has no rows.
    """
    if opt.one_tile:
        return tl.program_id(1), 0
    pid = tl.num_programs(1) - 1 - tl.program_id(1)
    seqs = tl.arange(0, opt.seqs_pad)
    origin = tl.load(query_start).to(tl.int32)
    starts = tl.load(query_start + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    begins = (starts - origin) * opt.group // opt.block_m + seqs
    seq = tl.sum(((seqs < num_seqs) & (begins <= pid)).to(tl.int32), axis=0) - 1
    first = (tl.load(query_start + seq).to(tl.int32) - origin) * opt.group // opt.block_m + seq
    return seq, pid - first


@triton.jit
def _biased(
    products: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    slopes: tl.tensor,
    num: Numbers,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return scaled, capped and biased scores `[block_m, block_n]` of `products` q·k."""
    scores = products * num.scale
    if opt.soft_cap:
        # tanh by its exponential, of the absolute value: that cannot overflow.
        power = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / num.soft_cap))
        capped = num.soft_cap * (1.0 - power) / (1.0 + power)
        scores = tl.where(scores < 0.0, -capped, capped)
    if opt.alibi:
        scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    return scores


@triton.jit
def _softmax_step(
    scores: tl.tensor, total: tl.tensor, m: tl.tensor, log2_scale: tl.tensor, opt: tl.constexpr
) -> tl.tensor:
    """Return (weights, factor of the old state, l', m') for the scores of one tile of keys."""
    if opt.ieee:
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2((scores - m_new[:, None]) * log2_scale)
        alpha = tl.exp2((m - m_new) * log2_scale)
    else:
        m_new = tl.maximum(m, tl.max(scores, axis=1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
    return weights, alpha, total * alpha + tl.sum(weights, axis=1), m_new


@triton.jit
def _attend(
    state: tl.tensor,
    row: tl.tensor,
    cache: tl.tensor,
    span: tl.tensor,
    num: Numbers,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Take the keys of [span[0], span[1]) into the state (A, l, m); return the new one.

    `row` is (Q tile, positions, slopes), `cache` (K and V of the head, row of the block table), and
    span[2], span[3] the first and the last key that any row of the tile sees.
    """
    PRECISION: tl.constexpr = "ieee" if opt.ieee else "tf32"
    BLOCK_N: tl.constexpr = opt.block_n
    acc, total, m = state
    q_tile, positions, slopes = row
    log2_scale = num.scale * LOG2_E
    keys = span[0] + tl.arange(0, BLOCK_N)
    blocks = keys
    if not MASKED:
        blocks = block_numbers(cache[2], span[0], keys < span[1], opt)
    for begin in tl.range(span[0], span[1], BLOCK_N):
        keys = tl.multiple_of(begin, BLOCK_N) + tl.arange(0, BLOCK_N)
        loaded = (keys >= span[2]) & (keys <= span[3])
        if MASKED:
            blocks = block_numbers(cache[2], begin, loaded, opt)
        k_tile, v_tile = load_tiles(cache[0], cache[1], blocks, begin, loaded, opt, MASKED)
        if not MASKED:
            # One tile ahead, so that no load of K and V waits for its block numbers.
            blocks = block_numbers(cache[2], begin + BLOCK_N, keys + BLOCK_N < span[1], opt)
        k_tile = tl.trans(k_tile.to(q_tile.dtype))
        scores = tl.dot(q_tile, k_tile, input_precision=PRECISION)
        if opt.alibi or opt.soft_cap:
            scores = _biased(scores, keys, positions, slopes, num, opt)
            log2_scale = LOG2_E
        if MASKED:
            visible = loaded[None, :]
            if opt.causal:
                visible = visible & (keys[None, :] <= positions[:, None])
            if opt.window:
                visible = visible & (keys[None, :] > positions[:, None] - num.window)
            scores = tl.where(visible, scores, float("-inf"))
        weights, alpha, total, m = _softmax_step(scores, total, m, log2_scale, opt)
        weights = weights.to(q_tile.dtype)
        v_tile = v_tile.to(q_tile.dtype)
        acc = tl.dot(weights, v_tile, acc * alpha[:, None], input_precision=PRECISION)
    return acc, total, m


@triton.jit
def _attend_tile(
    row: tl.tensor,
    cache: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    seq_len: tl.tensor,
    num: Numbers,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return A / l of a tile whose rows stand at positions low..high of a sequence."""
    first_key = 0
    last_key = seq_len - 1
    whole_begin = 0
    whole_end = seq_len // opt.block_n * opt.block_n
    if opt.causal:
        last_key = high
        whole_end = (low + 1) // opt.block_n * opt.block_n
    BLOCK_M: tl.constexpr = opt.block_m
    HEAD_PAD: tl.constexpr = opt.head_pad
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    # The left edge of the window, the tiles that every row sees whole, and the right edge.
    if opt.window:
        first_key = tl.maximum(low - num.window + 1, 0)
        begin = first_key // opt.block_n * opt.block_n
        whole_begin = tl.cdiv(tl.maximum(high - num.window + 1, 0), opt.block_n) * opt.block_n
        span = (begin, tl.minimum(whole_begin, last_key + 1), first_key, last_key)
        acc, total, m = _attend((acc, total, m), row, cache, span, num, opt, True)
    span = (whole_begin, whole_end, first_key, last_key)
    acc, total, m = _attend((acc, total, m), row, cache, span, num, opt, False)
    span = (tl.maximum(whole_begin, whole_end), last_key + 1, first_key, last_key)
    acc, total, m = _attend((acc, total, m), row, cache, span, num, opt, True)
    # A row that sees no key gives 0.
    return acc * (num.v_scale / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit
def _sequence(
    k: tl.tensor,
    v: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    key_start: tl.tensor,
    seq: tl.tensor,
    kv_head: tl.tensor,
    by: Strides,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return ((K and V of the head, row of the block table), tokens) of a sequence."""
    k_head = k + kv_head.to(tl.int64) * opt.kv.k_head
    v_head = v + kv_head.to(tl.int64) * opt.kv.v_head
    if opt.block_size > 0:
        table_row = block_table + seq.to(tl.int64) * by.table_seq
        return (k_head, v_head, table_row), tl.load(seq_lens + seq).to(tl.int32)
    else:
        key_token = tl.load(key_start + seq).to(tl.int64)
        k_head += key_token * opt.kv.k_slot
        v_head += key_token * opt.kv.v_slot
        # Contiguous keys have no table; what stands for its row is never read.
        tokens = tl.load(key_start + seq + 1) - tl.load(key_start + seq)
        return (k_head, v_head, k_head), tokens.to(tl.int32)


@triton.jit(
    do_not_specialize=["num_seqs", "min_rows", "max_rows"],
    do_not_specialize_on_alignment=["block_table", "query_start", "seq_lens", "key_start"],
)
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
    min_rows: tl.tensor,
    max_rows: tl.tensor,
    num: Numbers,
    by: Strides,
    opt: tl.constexpr,
) -> None:
    """Attention of varlen queries over paged keys, or over contiguous ones (block_size 0).

    Grid: (K/V heads, tiles), where `tiles` is an upper bound; the spare programs return at once. A
    program owns `block_m` rows of one sequence and one K/V head, from their first visible key to
    their last, and stores them once. Where sequences have several tiles, program numbers run
    backwards: those at a sequence's end, which see the most keys, start first. Else they run
    forwards, as spare programs stand at the end of the batch: real ones need not wait for them.

    Sequences of fewer rows than `min_rows`, or more than `max_rows`, are left to another launch.
    """
    kv_head = tl.program_id(0)
    seq, tile = _find_tile(query_start, num_seqs, opt)
    token = tl.load(query_start + seq).to(tl.int32)
    query_len = tl.load(query_start + seq + 1).to(tl.int32) - token
    num_rows = query_len * opt.group
    served = (num_rows >= min_rows) & (num_rows <= max_rows)
    if served & (tile * opt.block_m < num_rows):
        rows = tile * opt.block_m + tl.arange(0, opt.block_m)
        dims = tl.arange(0, opt.head_pad)
        heads = kv_head * opt.group + rows % opt.group
        tokens = token.to(tl.int64) + rows // opt.group
        real = (rows < num_rows)[:, None] & (dims < opt.head)[None, :]
        q_rows = tokens * by.q_token + heads * by.q_head
        q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=real, other=0.0)
        slopes = num.scale
        if opt.alibi:
            slopes = tl.load(alibi_slopes + heads, mask=rows < num_rows, other=0.0)
        cache, seq_len = _sequence(k, v, block_table, seq_lens, key_start, seq, kv_head, by, opt)
        context = seq_len - query_len
        low = context + tile * opt.block_m // opt.group
        high = context + (tl.minimum(tile * opt.block_m + opt.block_m, num_rows) - 1) // opt.group
        row = (q_tile, context + rows // opt.group, slopes)
        result = _attend_tile(row, cache, low, high, seq_len, num, opt)
        out_rows = tokens * by.out_token + heads * by.out_head
        out_ptrs = out + out_rows[:, None] + dims[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=real)
