"""Paged decode that splits the keys by the actual lengths: the `auto` path.

Work is cut into chunks of whole tiles such that all sequences together give about as many chunks
as the GPU can hold programs, however ragged the batch: one long sequence among short ones gets
many chunks, not one late program. Lengths stay on the device, so that a CUDA graph replays
the call for any lengths: the grid is an upper bound, (KV heads, chunks), and every program derives
the same plan from seq_lens. With span_i the tiles of sequence i, c = max(MIN_TILES,
⌈Σ span_i / budget⌉ tiles a chunk, and each sequence's chunks evened out, there are at most
budget + num_seqs of them.

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
from simserve_kernels.decode_parts import biased_scores, load_k, load_v, locate

__all__ = ["SplitTile", "decode_split", "split_tile"]

LOG2_E = tl.constexpr(1.4426950408889634)

_MIN_CHUNK_TOKENS = 256
_PROGRAMS_PER_SM = 4
_INTERPRETED_SMS = 2


class SplitTile(NamedTuple):
    """Tokens of a tile, warps of a program, and stages of its software pipeline."""

    tokens: int
    num_warps: int
    num_stages: int


def split_tile(call: DecodeCall) -> SplitTile:
    """Return the tile for a call: 16 KB of K a stage, so that several programs share an SM."""
    row_bytes = triton.next_power_of_2(call.head_size) * call.k_cache.dtype.itemsize
    if call.q.dtype == torch.float32 and call.k_cache.dtype == torch.float32:
        return SplitTile(16 if row_bytes > 512 else 32, 4, 2)
    return SplitTile(max(32, min(128, 16384 // row_bytes)), 4, 3)


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
def _unpack_fp8(words: tl.tensor) -> tl.tensor:
    """Return the even and the odd elements, float16, of a tile of 16-bit words of two fp8."""
    return tl.inline_asm_elementwise(
        _UNPACK,
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _plan(
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    budget: tl.tensor,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SEQS: tl.constexpr,
) -> tl.tensor:
    """Return (sequence numbers, chunks of each, tiles a chunk of each), by the module's rule."""
    seq = tl.arange(0, SEQS)
    length = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE
    span = tl.cdiv(length, TILE) - first
    largest = tl.maximum(tl.cdiv(tl.sum(span, axis=0), budget), MIN_TILES)
    wanted = tl.maximum(tl.cdiv(span, largest), 1)
    tiles = tl.maximum(tl.cdiv(span, wanted), 1)
    return seq, tl.cdiv(span, tiles), tiles


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
    MIN_TILES: tl.constexpr,
    SEQS: tl.constexpr,
) -> None:
    """Attend from the query heads of one KV head (ROWS of them at most) to one chunk of keys."""
    STEP: tl.constexpr = 2 if PAIRS else 1
    GROUP_PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // GROUP_PARTS
    chunk = tl.program_id(1)
    numbers, chunks, tiles = _plan(seq_lens, num_seqs, budget, WINDOW, TILE, MIN_TILES, SEQS)
    ends = tl.cumsum(chunks, axis=0)
    seq = tl.sum((ends <= chunk).to(tl.int32), axis=0)
    if seq >= num_seqs:
        return
    own = numbers == seq
    num_chunks = tl.sum(tl.where(own, chunks, 0), axis=0)
    size = tl.sum(tl.where(own, tiles, 0), axis=0) * TILE
    part = chunk - (tl.sum(tl.where(own, ends, 0), axis=0) - num_chunks)

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
    query = tl.load(q_pointers, mask=stored, other=0.0)
    query_odd = query
    if PAIRS:
        query_odd = tl.load(q_pointers + 1, mask=stored, other=0.0).to(tl.float32)
    row_scale = tl.full([ROWS], 1.0, tl.float32) * scale
    if FP8:
        query = query.to(tl.float32)
        largest = tl.max(tl.abs(query), axis=1)
        if PAIRS:
            largest = tl.maximum(largest, tl.max(tl.abs(query_odd), axis=1))
        largest = tl.where(largest > 0.0, largest, 1.0)
        query = (query / largest[:, None]).to(tl.float16)
        if PAIRS:
            query_odd = (query_odd / largest[:, None]).to(tl.float16)
        row_scale = row_scale * largest
    slope = row_scale
    if ALIBI:
        slope = tl.load(alibi_slopes + head, mask=member < GROUP, other=0.0).to(tl.float32)
    if not (ALIBI or SOFT_CAP):
        row_scale = row_scale * LOG2_E

    k_start = k_cache + kv_head.to(tl.int64) * k_head
    v_start = v_cache + kv_head.to(tl.int64) * v_head
    table_row = block_table + seq * table_seq
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    acc_odd = acc
    for start in tl.range(begin, high, TILE):
        token = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        seen = token < high
        if WINDOW > 0:
            seen = seen & (token >= low)
        block, place = locate(table_row, token, seen, BLOCK_SIZE)
        keys = load_k(k_start, block, place, seen, dim, k_block, k_slot, k_outer, X, HEAD_SIZE)
        values = load_v(
            v_start, block, place, token, seen, low, high, dim, v_block, v_slot, v_dim,
            HEAD_SIZE, BLOCK_SIZE, VECTOR,
        )  # fmt: skip
        if PAIRS:
            even, odd = _unpack_fp8(tl.trans(keys))
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
            even, odd = _unpack_fp8(values)
            acc = tl.dot(weights, even, acc)
            acc_odd = tl.dot(weights, odd, acc_odd * alpha[:, None])
        else:
            acc = tl.dot(weights, values.to(query.dtype), acc, input_precision="ieee")
        m = m_new

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


@triton.jit
def _merge_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    budget: tl.tensor,
    v_scale: tl.tensor,
    out_seq: tl.tensor,
    out_head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SEQS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Merge the chunks of one sequence, some of its query heads; 0 for a sequence of length 0."""
    seq = tl.program_id(1)
    numbers, chunks, _ = _plan(seq_lens, num_seqs, budget, WINDOW, TILE, MIN_TILES, SEQS)
    num_chunks = tl.sum(tl.where(numbers == seq, chunks, 0), axis=0)
    if num_chunks == 1:
        return
    first = tl.sum(tl.where(numbers < seq, chunks, 0), axis=0)

    dim = tl.arange(0, HEAD_PAD)
    for head in range(tl.program_id(0), HEADS, tl.num_programs(0)):
        m = -float("inf")
        norm = 0.0
        acc = tl.zeros([HEAD_PAD], tl.float32)
        for start in range(0, num_chunks, PARTS):
            part = start + tl.arange(0, PARTS)
            valid = part < num_chunks
            row = (first + part).to(tl.int64) * HEADS + head
            maximum = tl.load(maxima + row, mask=valid, other=float("-inf"))
            total = tl.load(sums + row, mask=valid, other=0.0)
            pointers = partials + row[:, None] * HEAD_SIZE + dim[None, :]
            mask = valid[:, None] & (dim < HEAD_SIZE)[None, :]
            partial = tl.load(pointers, mask=mask, other=0.0)
            m_new = tl.maximum(m, tl.max(maximum, axis=0))
            alpha = tl.exp2(m - m_new)
            weight = tl.exp2(maximum - m_new)
            norm = norm * alpha + tl.sum(weight * total, axis=0)
            acc = acc * alpha + tl.sum(weight[:, None] * partial, axis=0)
            m = m_new
        result = acc * (v_scale / tl.where(num_chunks > 0, norm, 1.0))
        pointers = out + seq.to(tl.int64) * out_seq + head * out_head + dim
        tl.store(pointers, result.to(out.dtype.element_ty), mask=dim < HEAD_SIZE)


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
    num_sms = _num_sms(call.q.device)
    budget = max(1, num_sms * _PROGRAMS_PER_SM // programs)
    max_chunks = budget + call.num_seqs
    partials = call.q.new_empty((max_chunks, call.num_heads, call.head_size), dtype=torch.float32)
    maxima = call.q.new_empty((max_chunks, call.num_heads), dtype=torch.float32)
    sums = torch.empty_like(maxima)
    shared = {
        "HEADS": call.num_heads,
        "TILE": tile.tokens,
        "MIN_TILES": triton.cdiv(_MIN_CHUNK_TOKENS, tile.tokens),
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
    spread = min(call.num_heads, triton.cdiv(8 * num_sms, call.num_seqs))
    _merge_kernel[(spread, call.num_seqs)](
        out,
        partials,
        maxima,
        sums,
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
