"""Paged decode as the first paged attention kernels do it: V1, and V2 with partitions of 512.

Both own one query head of one sequence in a program and keep *all* scores of their range: first
every score, into a float32 scratch tensor, and the maximum; then the exponentials and their sum;
then the weights, normalised, times V. No online softmax, and no sharing of K and V between the
query heads of a group. V1 takes the whole context, grid (query heads, sequences). V2 takes one
partition of 512 tokens, grid (query heads, sequences, partitions), and a second kernel merges the
partitions' outputs O_j by their maxima m_j and sums l_j: with m = max m_j and
L = Σ l_j e^(m_j − m), O = Σ O_j l_j e^(m_j − m) / L.

The design is that of vLLM v0.11.0's CUDA kernels paged_attention_v1 and _v2 (Kwon et al., 2023).
Two decisions differ. Scores live in global memory, which the L2 holds, since Triton programs
cannot index shared memory. And the 1e-6 that those kernels add to the sum is dropped: the largest
term of a sum is e^0 = 1, so that it protects nothing but a sequence of length 0, which gives 0
here, and it biases every output by up to 1e-6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simserve_kernels.decode_call import DecodeCall
from simserve_kernels.decode_parts import (
    biased_scores,
    load_k,
    load_v,
    locate,
    tokens_to_read,
)

__all__ = ["PARTITION_SIZE", "decode_v1", "decode_v2"]

PARTITION_SIZE = 512

_TILE_ELEMENTS = 8192
_SUM_TILE = 512


@triton.jit
def _attend_range(
    q_row: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    scores: tl.tensor,
    table_row: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    first: tl.tensor,
    seq_len: tl.tensor,
    slope: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_outer: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_dim: tl.tensor,
    X: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr,
    SUM_TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Return (output, maximum, sum) of one query over the tokens [low, high); first ≤ low.

    `scores` is the query's row of the scratch tensor. The barriers order its writes before the
    reads of other threads of the program.
    """
    dim = tl.arange(0, HEAD_PAD)
    query = tl.load(q_row + dim, mask=dim < HEAD_SIZE, other=0.0).to(tl.float32)

    tops = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(first, high, TILE, num_stages=STAGES):
        token = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        seen = (token >= low) & (token < high)
        block, place = locate(table_row, token, seen, BLOCK_SIZE)
        keys = load_k(k_head, block, place, seen, dim, k_block, k_slot, k_outer, X, HEAD_SIZE)
        score = tl.sum(query[None, :] * keys.to(tl.float32), axis=1) * scale
        distance = (token - seq_len + 1).to(tl.float32)
        score = biased_scores(score, distance, slope, soft_cap, ALIBI, SOFT_CAP)
        score = tl.where(seen, score, float("-inf"))
        tl.store(scores + token, score, mask=token < high)
        tops = tl.maximum(tops, score)
    top = tl.max(tops, axis=0)
    tl.debug_barrier()

    sums = tl.zeros([SUM_TILE], tl.float32)
    for start in tl.range(first, high, SUM_TILE):
        token = start + tl.arange(0, SUM_TILE)
        score = tl.load(scores + token, mask=token < high, other=float("-inf"))
        weight = tl.exp(score - top)
        tl.store(scores + token, weight, mask=token < high)
        sums += weight
    total = tl.sum(sums, axis=0)
    tl.debug_barrier()

    inverse = 1.0 / total
    outputs = tl.zeros([TILE, HEAD_PAD], tl.float32)
    for start in tl.range(first, high, TILE, num_stages=STAGES):
        token = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        seen = (token >= low) & (token < high)
        read = tokens_to_read(token, seen, low, high, BLOCK_SIZE, VECTOR)
        block, place = locate(table_row, token, read, BLOCK_SIZE)
        values = load_v(
            v_head, block, place, read, seen, dim, v_block, v_slot, v_dim,
            HEAD_SIZE, VECTOR,
        )  # fmt: skip
        weight = tl.load(scores + token, mask=seen, other=0.0) * inverse
        outputs += weight[:, None] * values.to(tl.float32)
    return tl.sum(outputs, axis=0), top, total


@triton.jit
def _decode_kernel(
    out: tl.tensor,
    max_logits: tl.tensor,
    exp_sums: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    scores: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    alibi_slopes: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    soft_cap: tl.tensor,
    out_seq: tl.tensor,
    out_head: tl.tensor,
    out_part: tl.tensor,
    q_seq: tl.tensor,
    q_head: tl.tensor,
    scores_row: tl.tensor,
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
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PARTITION: tl.constexpr,
    TILE: tl.constexpr,
    SUM_TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One query head of one sequence: the whole context (PARTITION 0), or one partition of it."""
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    low = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    high = seq_len
    if PARTITION > 0:
        low = tl.maximum(low, part * PARTITION)
        high = tl.minimum(high, part * PARTITION + PARTITION)
    row = seq * tl.num_programs(0) + head
    dim = tl.arange(0, HEAD_PAD)
    out_row = out + seq * out_seq + head * out_head + part * out_part + dim
    if low >= high:
        if PARTITION == 0:
            nothing = tl.zeros([HEAD_PAD], tl.float32).to(out.dtype.element_ty)
            tl.store(out_row, nothing, mask=dim < HEAD_SIZE)
        return

    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_slopes + head).to(tl.float32)
    output, top, total = _attend_range(
        q + seq * q_seq + head * q_head,
        k_cache + (head // GROUP) * k_head,
        v_cache + (head // GROUP) * v_head,
        scores + row * scores_row,
        block_table + seq * table_seq,
        low, high, low // TILE * TILE, seq_len, slope, scale, soft_cap,
        k_block, k_slot, k_outer, v_block, v_slot, v_dim,
        X, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, VECTOR, ALIBI, SOFT_CAP, TILE, SUM_TILE, STAGES,
    )  # fmt: skip
    tl.store(out_row, (output * v_scale).to(out.dtype.element_ty), mask=dim < HEAD_SIZE)
    if PARTITION > 0:
        statistic = row * tl.num_programs(2) + part
        tl.store(max_logits + statistic, top)
        tl.store(exp_sums + statistic, total)


@triton.jit
def _reduce_kernel(
    out: tl.tensor,
    tmp_out: tl.tensor,
    max_logits: tl.tensor,
    exp_sums: tl.tensor,
    seq_lens: tl.tensor,
    num_parts: tl.tensor,
    out_seq: tl.tensor,
    out_head: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTITION: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Merge the partitions of one query head of one sequence; those it has none of are not read."""
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    begin = tl.maximum(seq_len - WINDOW, 0) // PARTITION if WINDOW > 0 else 0
    end = tl.cdiv(seq_len, PARTITION)
    row = (seq * tl.num_programs(0) + head) * num_parts
    dim = tl.arange(0, HEAD_PAD)

    tops = tl.full([PARTS], float("-inf"), tl.float32)
    for start in range(begin, end, PARTS):
        part = start + tl.arange(0, PARTS)
        top = tl.load(max_logits + row + part, mask=part < end, other=float("-inf"))
        tops = tl.maximum(tops, top)
    top = tl.max(tops, axis=0)

    total = 0.0
    output = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(begin, end, PARTS):
        part = start + tl.arange(0, PARTS)
        valid = part < end
        maximum = tl.load(max_logits + row + part, mask=valid, other=float("-inf"))
        weight = tl.load(exp_sums + row + part, mask=valid, other=0.0) * tl.exp(maximum - top)
        total += tl.sum(weight, axis=0)
        pointers = tmp_out + (row + part)[:, None] * HEAD_SIZE + dim[None, :]
        mask = valid[:, None] & (dim < HEAD_SIZE)[None, :]
        output += tl.sum(weight[:, None] * tl.load(pointers, mask=mask, other=0.0), axis=0)
    output = output / tl.where(end > begin, total, 1.0)
    pointers = out + seq * out_seq + head * out_head + dim
    tl.store(pointers, output.to(out.dtype.element_ty), mask=dim < HEAD_SIZE)


def _launch(
    call: DecodeCall,
    out: torch.Tensor,
    out_strides: tuple[int, int, int],
    statistics: tuple[torch.Tensor, torch.Tensor],
    num_parts: int,
    partition: int,
) -> None:
    head_pad = triton.next_power_of_2(call.head_size)
    row = triton.cdiv(call.max_seq_len, _SUM_TILE) * _SUM_TILE
    scores = call.q.new_empty((call.num_seqs, call.num_heads, row), dtype=torch.float32)
    _decode_kernel[(call.num_heads, call.num_seqs, num_parts)](
        out,
        *statistics,
        call.q,
        call.k_cache,
        call.v_cache,
        scores,
        call.block_table,
        call.seq_lens,
        call.slopes,
        call.score_scale,
        call.options.v_scale,
        call.options.soft_cap,
        *out_strides,
        *call.q.stride()[:2],
        row,
        call.block_table.stride(0),
        **call.cache_arguments(),
        GROUP=call.group,
        HEAD_PAD=head_pad,
        PARTITION=partition,
        TILE=_TILE_ELEMENTS // head_pad,
        SUM_TILE=_SUM_TILE,
        STAGES=3,
        num_warps=4,
    )


def decode_v1(call: DecodeCall, out: torch.Tensor) -> None:
    """Write the attention of `call` to `out`, one program a query head and sequence."""
    seq, head, _ = out.stride()
    _launch(call, out, (seq, head, 0), (out, out), 1, 0)


def decode_v2(call: DecodeCall, out: torch.Tensor) -> None:
    """Write the attention of `call` to `out`, by partitions of 512 tokens and a merge."""
    num_parts = max(1, triton.cdiv(call.max_seq_len, PARTITION_SIZE))
    rows = (call.num_seqs, call.num_heads, num_parts)
    tmp_out = call.q.new_empty((*rows, call.head_size), dtype=torch.float32)
    max_logits = call.q.new_empty(rows, dtype=torch.float32)
    exp_sums = torch.empty_like(max_logits)
    seq, head, part, _ = tmp_out.stride()
    _launch(call, tmp_out, (seq, head, part), (max_logits, exp_sums), num_parts, PARTITION_SIZE)
    _reduce_kernel[(call.num_heads, call.num_seqs)](
        out,
        tmp_out,
        max_logits,
        exp_sums,
        call.seq_lens,
        num_parts,
        *out.stride()[:2],
        HEAD_SIZE=call.head_size,
        HEAD_PAD=triton.next_power_of_2(call.head_size),
        WINDOW=call.options.sliding_window,
        PARTITION=PARTITION_SIZE,
        PARTS=min(16, triton.next_power_of_2(num_parts)),
        num_warps=4,
    )
