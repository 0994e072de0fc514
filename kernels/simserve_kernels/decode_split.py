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
element first (and the scores multiplied by it), so that any bfloat16 or float32 q fits. In the
nhd layout, on GPUs that convert fp8 in hardware, K and V are read as 16-bit words of two elements:
shared memory is transposed into matrix operands by 16-bit units, so that a word goes straight to
the thread that multiplies it. Even and odd dimensions are then two products each.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import FP8_DTYPE
from simserve_kernels.decode_call import DecodeCall
from simserve_kernels.decode_parts import (
    biased_scores,
    load_k,
    load_v,
    locate,
    tokens_to_read,
    unpack_fp8,
)
from simserve_kernels.decode_plan import find_chunk, merge_kernel

__all__ = ["SplitTile", "decode_split", "split_tile"]

LOG2_E = tl.constexpr(1.4426950408889634)

_FINE_TOKENS = 512
_INTERPRETED_SMS = 1


class SplitTile(NamedTuple):
    """Tokens of a tile, warps of a program, stages of its pipeline, programs planned for an SM.

    A K or V load waits for a load of its block number, so that two stages prefetch one tile.
    """

    tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def split_tile(call: DecodeCall) -> SplitTile:
    """Return the tile for a call: 16 KB of K a stage, so that several programs share an SM."""
    row_bytes = triton.next_power_of_2(call.head_size) * call.k_cache.dtype.itemsize
    if call.q.dtype == torch.float32 and call.k_cache.dtype == torch.float32:
        return SplitTile(16 if row_bytes > 512 else 32, 4, 2, 4)
    tokens = max(32, min(128, 16384 // row_bytes))
    if call.k_cache.dtype == FP8_DTYPE:
        return SplitTile(tokens, 4, 5 if _pairs(call) else 3, 2)
    return SplitTile(tokens, 4, 3, 4)


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _load_query(
    pointers: tl.tensor,
    stored: tl.tensor,
    scale: tl.tensor,
    FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return (q, its odd elements if PAIRS, what each row's products are multiplied with)."""
    query = tl.load(pointers, mask=stored, other=0.0)
    odd = query
    if PAIRS:
        odd = tl.load(pointers + 1, mask=stored, other=0.0).to(tl.float32)
    row_scale = tl.full([ROWS], 1.0, tl.float32) * scale
    if FP8:
        query = query.to(tl.float32)
        largest = tl.max(tl.abs(query), axis=1)
        if PAIRS:
            largest = tl.maximum(largest, tl.max(tl.abs(odd), axis=1))
        largest = tl.where(largest > 0.0, largest, 1.0)
        query = (query / largest[:, None]).to(tl.float16)
        if PAIRS:
            odd = (odd / largest[:, None]).to(tl.float16)
        row_scale = row_scale * largest
    return query, odd, row_scale


@triton.jit
def _attend_chunk(
    query: tl.tensor,
    query_odd: tl.tensor,
    row_scale: tl.tensor,
    slope: tl.tensor,
    k_start: tl.tensor,
    v_start: tl.tensor,
    table_row: tl.tensor,
    begin: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    seq_len: tl.tensor,
    soft_cap: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_outer: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_dim: tl.tensor,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return (accumulator, that of odd dimensions, m, l) over [max(begin, low), high)."""
    dim = tl.arange(0, HEAD_PAD)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    acc_odd = acc
    for start in tl.range(begin, high, TILE):
        token = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        seen = token < high
        if WINDOW > 0:
            seen = seen & (token >= low)
        read = tokens_to_read(token, seen, low, high, BLOCK_SIZE, VECTOR)
        block, place = locate(table_row, token, read, BLOCK_SIZE)
        keys = load_k(k_start, block, place, seen, dim, k_block, k_slot, k_outer, X, HEAD_SIZE)
        values = load_v(
            v_start, block, place, read, seen, dim, v_block, v_slot, v_dim,
            HEAD_SIZE, VECTOR,
        )  # fmt: skip
        if PAIRS:
            even, odd = unpack_fp8(tl.trans(keys))
            scores = tl.dot(query_odd, odd, tl.dot(query, even))
        else:
            scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        scores = scores * row_scale[:, None]
        if ALIBI or SOFT_CAP:
            distance = (token - seq_len + 1).to(tl.float32)[None, :]
            scores = biased_scores(scores, distance, slope[:, None], soft_cap, ALIBI, SOFT_CAP)
            scores = scores * LOG2_E
        scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp2(m - m_new)
        weights = tl.exp2(scores - m_new[:, None])
        norm = norm * alpha + tl.sum(weights, axis=1)
        weights = weights.to(query.dtype)
        acc = acc * alpha[:, None]
        if PAIRS:
            even, odd = unpack_fp8(values)
            acc = tl.dot(weights, even, acc)
            acc_odd = tl.dot(weights, odd, acc_odd * alpha[:, None])
        else:
            acc = tl.dot(weights, values.to(query.dtype), acc, input_precision="ieee")
        m = m_new

    return acc, acc_odd, m, norm


@triton.jit
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
    budget: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    soft_cap: tl.tensor,
    out_seq: tl.tensor,
    out_head: tl.tensor,
    q_seq: tl.tensor,
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
    X: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    FINE_TILES: tl.constexpr,
    SEQS: tl.constexpr,
) -> None:
    """Attend from the query heads of one KV head (ROWS of them at most) to one chunk of keys."""
    STEP: tl.constexpr = 2 if PAIRS else 1
    GROUP_PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // GROUP_PARTS
    chunk = tl.program_id(1)
    seq, num_chunks, part, size = find_chunk(
        chunk, seq_lens, num_seqs, budget, WINDOW, TILE, FINE_TILES, SEQS
    )
    if seq >= num_seqs:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    low = seq_len * 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - WINDOW, 0)
    begin = low // TILE * TILE + part * size
    high = tl.minimum(begin + size, seq_len)

    member = (tl.program_id(0) % GROUP_PARTS) * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    dim = tl.arange(0, HEAD_PAD)
    seq = seq.to(tl.int64)
    stored = (member < GROUP)[:, None] & (dim < HEAD_SIZE)[None, :]
    q_pointers = q + seq * q_seq + head[:, None].to(tl.int64) * q_head + STEP * dim[None, :]
    query, query_odd, row_scale = _load_query(q_pointers, stored, scale, FP8, PAIRS, ROWS)
    slope = row_scale
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=member < GROUP, other=0.0).to(tl.float32)
    if not (ALIBI or SOFT_CAP):
        row_scale = row_scale * LOG2_E
    acc, acc_odd, m, norm = _attend_chunk(
        query, query_odd, row_scale, slope,
        k_cache + kv_head.to(tl.int64) * k_head,
        v_cache + kv_head.to(tl.int64) * v_head,
        block_table + seq * table_seq,
        begin, low, high, seq_len, soft_cap,
        k_block, k_slot, k_outer, v_block, v_slot, v_dim,
        X, ROWS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, VECTOR, WINDOW, ALIBI, SOFT_CAP, PAIRS, TILE,
    )  # fmt: skip

    if num_chunks == 1:
        factor = (v_scale / norm)[:, None]
        pointers = out + seq * out_seq + head[:, None].to(tl.int64) * out_head + STEP * dim[None, :]
        tl.store(pointers, (acc * factor).to(out.dtype.element_ty), mask=stored)
        if PAIRS:
            tl.store(pointers + 1, (acc_odd * factor).to(out.dtype.element_ty), mask=stored)
    else:
        row = chunk.to(tl.int64) * HEADS + head
        places = partials + (row[:, None] * HEAD_SIZE + dim[None, :]) * STEP
        tl.store(places, acc, mask=stored)
        if PAIRS:
            tl.store(places + 1, acc_odd, mask=stored)
        tl.store(maxima + row, m, mask=member < GROUP)
        tl.store(sums + row, norm, mask=member < GROUP)


def _pairs(call: DecodeCall) -> bool:
    """Whether the cache can be read as words of two fp8 elements."""
    if call.k_cache.dtype != FP8_DTYPE or call.layout != "nhd" or not call.q.is_cuda:
        return False
    if torch.cuda.get_device_capability(call.q.device) < (8, 9):
        return False
    caches = (call.k_cache, call.v_cache)
    apart = [n for x in caches for n in (*x.stride()[:-1], x.storage_offset())]
    return all(n % 2 == 0 for n in apart)


def _as_words(call: DecodeCall) -> DecodeCall:
    return dataclasses.replace(
        call,
        k_cache=call.k_cache.view(torch.int16),
        v_cache=call.v_cache.view(torch.int16),
        cache=call.cache._replace(head_size=call.head_size // 2),
    )


def decode_split(call: DecodeCall, out: torch.Tensor) -> None:
    """Write the attention of `call` to `out`."""
    tile = split_tile(call)
    rows = min(64, max(16, triton.next_power_of_2(call.group)))
    programs = call.cache.num_kv_heads * triton.cdiv(call.group, rows)
    budget = max(1, _num_sms(call.q.device) * tile.programs_per_sm // programs)
    max_chunks = 2 * budget + call.num_seqs
    partials = call.q.new_empty((max_chunks, call.num_heads, call.head_size), dtype=torch.float32)
    maxima = call.q.new_empty((max_chunks, call.num_heads), dtype=torch.float32)
    sums = torch.empty_like(maxima)
    shared = {
        "HEADS": call.num_heads,
        "TILE": tile.tokens,
        "FINE_TILES": triton.cdiv(_FINE_TOKENS, tile.tokens),
        "SEQS": triton.next_power_of_2(call.num_seqs),
    }
    pairs = _pairs(call)
    read = _as_words(call) if pairs else call
    _split_kernel[(programs, max_chunks)](
        out,
        partials,
        maxima,
        sums,
        call.q,
        read.k_cache,
        read.v_cache,
        call.block_table,
        call.seq_lens,
        call.slopes,
        call.num_seqs,
        budget,
        call.score_scale,
        call.options.v_scale,
        call.options.soft_cap,
        *out.stride()[:2],
        *call.q.stride()[:2],
        call.block_table.stride(0),
        **read.cache_arguments(),
        **shared,
        HEAD_PAD=triton.next_power_of_2(read.head_size),
        GROUP=call.group,
        ROWS=rows,
        FP8=call.k_cache.dtype == FP8_DTYPE,
        PAIRS=pairs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _merge(call, out, (partials, maxima, sums), budget, shared)


def _merge(
    call: DecodeCall,
    out: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    budget: int,
    shared: dict[str, int],
) -> None:
    # Programs for every head where sequences are few; where they are many, most have no work.
    spread = min(call.num_heads, triton.cdiv(8 * _num_sms(call.q.device), call.num_seqs))
    merge_kernel[(spread, call.num_seqs)](
        out,
        *workspace,
        call.seq_lens,
        call.num_seqs,
        budget,
        call.options.v_scale,
        *out.stride()[:2],
        HEAD_SIZE=call.head_size,
        HEAD_PAD=triton.next_power_of_2(call.head_size),
        WINDOW=call.options.sliding_window,
        PARTS=16,
        **shared,
        num_warps=4,
    )
