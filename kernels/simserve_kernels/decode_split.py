"""Paged decode that splits the keys by the actual lengths: the `auto` path.

Work is cut into chunks of whole tiles so that all sequences together give about as many chunks
as the GPU holds programs, however ragged the batch: one long sequence among short ones gets
many chunks, not one late program. The grid is (KV heads, an upper bound of chunks), and each
program derives the plan from seq_lens on the device (decode_plan).

A program owns one chunk and the query heads of one KV head: it loads K and V once for the whole
group and multiplies on the tensor cores (group padded to 16 rows), with online softmax (m, l and
the accumulator in float32; base-2 exponents). A sequence of one chunk is finished by its
program. Others leave (accumulator, m, l) in a float32 workspace for a second kernel:
m = max m_j, out = Σ A_j 2^(m_j − m) / Σ l_j 2^(m_j − m). No chunk is ever
empty, so that no m_j is −inf. This is split-KV as in Flash-Decoding (Dao et al., 2023), with
the splits taken from the lengths.

fp8 K and V are exact in float16, in which they are multiplied: q is divided by its largest
element first (and the scores multiplied by it), so that any bfloat16 or float32 q fits.

Nothing waits for the host and all sizes are bounds, so that a captured CUDA graph replays for any
lengths. `decode_workspace` allocates the scratch once, for all layers of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from simserve_kernels.decode_call import DecodeCall, DecodeNumbers, DecodeStrides
from simserve_kernels.decode_parts import (
    add_values,
    block_numbers,
    load_k,
    load_query,
    load_v,
    score_tile,
    store_rows,
    tokens_to_read,
)
from simserve_kernels.decode_plan import PlanOptions, find_chunk, merge_kernel
from simserve_kernels.decode_workspace import (
    MAX_PROGRAMS_PER_SM,
    DecodeWorkspace,
    fitting_workspace,
    num_sms,
    split_grid,
)
from simserve_kernels.layouts import CacheLayout

__all__ = ["FINE_TOKENS", "MANY_SEQS", "decode_split", "split_tile"]

FINE_TOKENS = 512
"""Chunks have no fewer tokens, unless an even share of the batch has."""
MANY_SEQS = 32
"""From so many sequences on, long contexts are read in larger tiles."""
_LONG = 8192


class SplitTile(NamedTuple):
    """Tokens of a tile, warps of a program, stages of its pipeline, programs planned for an SM."""

    tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def split_tile(
    kv_dtype: torch.dtype, head_size: int, layout: CacheLayout, num_seqs: int, max_seq_len: int
) -> SplitTile:
    """Return the tile for a call: 16 KB of K a stage, so that several programs share an SM."""
    item = kv_dtype.itemsize
    if item == 4:
        return SplitTile(16, 4, 1, MAX_PROGRAMS_PER_SM)
    if layout == "packed":
        return SplitTile(32, 4, 4, MAX_PROGRAMS_PER_SM)
    row_bytes = triton.next_power_of_2(head_size) * item
    if max_seq_len >= _LONG and num_seqs >= MANY_SEQS and row_bytes == 256:
        return SplitTile(128, 4, 2, 2)
    return SplitTile(max(32, min(128, 16384 // row_bytes)), 4, 2, MAX_PROGRAMS_PER_SM)


@triton.jit
def _attend(
    state: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    span: tl.tensor,
    num: DecodeNumbers,
    by: DecodeStrides,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Take the tiles of [span[0], span[1]) into the state (acc, acc of odd dimensions, m, l).

    `query` is (q, odd q, row scale, slopes), `cache` (K and V of the head, row of the block
    table), and span[2], span[3], span[4] are the first token seen, the end of those, and seq_len.
    """
    TILE: tl.constexpr = opt.tile
    STAGES: tl.constexpr = 1 if MASKED else None  # None: those of the launch
    acc, acc_odd, m, norm = state
    token = span[0] + tl.arange(0, TILE)
    if not MASKED:
        block = block_numbers(cache[2], token, token < span[1], opt)
    for start in tl.range(span[0], span[1], TILE, num_stages=STAGES):
        token = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        seen = (token >= span[2]) & (token < span[3])
        read = tokens_to_read(token, span[2], span[3], opt)
        if MASKED:
            block = block_numbers(cache[2], token, read, opt)
        keys = load_k(cache[0], block, token, seen, by, opt, MASKED)
        values = load_v(cache[1], block, token, read, seen, by, opt, MASKED)
        if not MASKED:
            block = block_numbers(cache[2], token + TILE, token + TILE < span[1], opt)
        scores = score_tile(query, keys, token, span[4], num, opt)
        if MASKED:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp2(m - m_new)
        weights = tl.exp2(scores - m_new[:, None])
        norm = norm * alpha + tl.sum(weights, axis=1)
        m = m_new
        weights = weights.to(query[0].dtype)
        if opt.pairs:
            acc_odd = acc_odd * alpha[:, None]
        acc, acc_odd = add_values(acc * alpha[:, None], acc_odd, weights, values, opt)
    return acc, acc_odd, m, norm


@triton.jit
def _attend_chunk(
    query: tl.tensor,
    cache: tl.tensor,
    begin: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    seq_len: tl.tensor,
    num: DecodeNumbers,
    by: DecodeStrides,
    opt: tl.constexpr,
) -> tl.tensor:
    """Return (accumulator, that of odd dimensions, m, l) over [max(begin, low), high)."""
    ROWS: tl.constexpr = opt.rows
    HEAD_PAD: tl.constexpr = opt.head_pad
    TILE: tl.constexpr = opt.tile
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    state = (acc, acc, m, norm)
    whole = high // TILE * TILE
    if opt.window > 0:
        # The tile at the left edge of the window.
        span = (begin, tl.minimum(begin + TILE, high), low, high, seq_len)
        state = _attend(state, query, cache, span, num, by, opt, True)
        begin += TILE
    if opt.ieee:
        whole = begin
    else:
        span = (begin, whole, low, high, seq_len)
        state = _attend(state, query, cache, span, num, by, opt, False)
    span = (tl.maximum(begin, whole), high, low, high, seq_len)
    return _attend(state, query, cache, span, num, by, opt, True)


@triton.jit(do_not_specialize=["num_seqs"])
def _split_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    alibi_slopes: tl.tensor,
    num_seqs: tl.tensor,
    num: DecodeNumbers,
    by: DecodeStrides,
    opt: tl.constexpr,
    plan: tl.constexpr,
) -> None:
    """Attend from the query heads of one KV head (`rows` of them at most) to one chunk of keys."""
    PARTS: tl.constexpr = (opt.group + opt.rows - 1) // opt.rows
    kv_head = (tl.program_id(0) // PARTS).to(tl.int64)
    chunk = tl.program_id(1)
    seq, num_chunks, part, size = find_chunk(chunk, seq_lens, num_seqs, plan)
    if seq >= num_seqs:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    low = seq_len * 0
    if opt.window > 0:
        low = tl.maximum(seq_len - opt.window, 0)
    begin = low // opt.tile * opt.tile + part * size
    high = tl.minimum(begin + size, seq_len)

    member = (tl.program_id(0) % PARTS) * opt.rows + tl.arange(0, opt.rows)
    real = member < opt.group
    head = kv_head * opt.group + member
    seq = seq.to(tl.int64)
    q_rows = q + seq * by.q_seq + head * by.q_head
    query, odd, row_scale = load_query(q_rows[:, None], real, num.scale, opt)
    slope = row_scale
    if opt.alibi:
        slope = tl.load(alibi_slopes + head, mask=real, other=0.0).to(tl.float32)
    k_head, v_head = k_cache + kv_head * by.k_head, v_cache + kv_head * by.v_head
    cache = (k_head, v_head, block_table + seq * by.table_seq)
    query = (query, odd, row_scale, slope)
    acc, odd, m, norm = _attend_chunk(query, cache, begin, low, high, seq_len, num, by, opt)
    if num_chunks == 1:
        out_rows = out + seq * by.out_seq + head * by.out_head
        store_rows(out_rows[:, None], acc, odd, num.v_scale / norm, real, opt)
    else:
        row = chunk.to(tl.int64) * opt.heads + head
        ROWS: tl.constexpr = opt.rows
        one = tl.full([ROWS], 1.0, tl.float32)
        HEAD_SIZE: tl.constexpr = opt.head * 2 if opt.pairs else opt.head
        store_rows((partials + row * HEAD_SIZE)[:, None], acc, odd, one, real, opt)
        tl.store(maxima + row, m, mask=real)
        tl.store(sums + row, norm, mask=real)


def decode_split(
    call: DecodeCall, out: torch.Tensor, workspace: DecodeWorkspace | None = None
) -> None:
    """Write the attention of `call` to `out`.

    Raises:
        ValueError: the workspace does not fit.
    """
    tile = split_tile(
        call.k_cache.dtype, call.cache.head_size, call.layout, call.num_seqs, call.max_seq_len
    )
    device, num_seqs, num_heads = call.q.device, call.num_seqs, call.num_heads
    grid = split_grid(device, num_seqs, num_heads, call.cache.num_kv_heads, tile.programs_per_sm)
    workspace = fitting_workspace(call, grid.max_chunks, workspace)
    plan = PlanOptions(
        budget=grid.budget,
        window=call.options.sliding_window,
        tile=tile.tokens,
        fine_tiles=triton.cdiv(FINE_TOKENS, tile.tokens),
        seqs_pad=triton.next_power_of_2(num_seqs),
    )
    _split_kernel[(grid.programs, grid.max_chunks)](
        out, *workspace, call.q, call.k_cache, call.v_cache, call.block_table, call.seq_lens,
        call.slopes, num_seqs, call.numbers(), call.strides(out),
        call.kernel_options(tile.tokens, grid.rows), plan, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    # Programs for every head where sequences are few; where they are many, most have no work.
    spread = min(num_heads, triton.cdiv(8 * num_sms(device), num_seqs))
    merge_kernel[(spread, num_seqs)](
        out, *workspace, call.seq_lens, num_seqs, call.numbers(), call.strides(out), plan,
        HEADS=num_heads, HEAD_SIZE=call.head_size, HEAD_PAD=triton.next_power_of_2(call.head_size),
        PARTS=16, num_warps=4,
    )  # fmt: skip
