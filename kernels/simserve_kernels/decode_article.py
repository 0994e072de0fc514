"""Paged decode as the first paged attention kernels do it: V1, and V2 with partitions of 512.

Both own one query head of one sequence in a program and keep *all* scores of their range: first
every score, into a float32 scratch tensor, and the maximum; then the sum of the exponentials; then
the weights, normalised, times V. No online softmax, and no sharing of K and V between the query
heads of a group. V1 takes the whole context, grid (query heads, sequences). V2 takes one partition
of 512 tokens, grid (query heads, sequences, partitions), and a second kernel merges the
partitions' outputs O_j by their maxima m_j and sums l_j: with m = max m_j and
L = Σ l_j e^(m_j − m), O = Σ O_j l_j e^(m_j − m) / L.

The design is that of vLLM v0.11.0's CUDA kernels paged_attention_v1 and _v2 (Kwon et al., 2023).
Four decisions differ. Scores live in global memory, which the L2 holds, since Triton programs
cannot index shared memory. They are kept in units of log2, and their exponentials are taken again
where they are used instead of being kept beside them. On the nhd layout the products run on the
tensor cores, the query repeated in the 16 rows of a matrix, of which one is kept; on the packed one
they run as there, element by element in float32, since what a thread loads is not what it would
have to hold for a tensor core. And the 1e-6 that those kernels add to the sum is dropped: the
largest term of a sum is e^0 = 1, so that it protects nothing but a sequence of length 0, which
gives 0 here, and it biases every output by up to 1e-6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simserve_kernels.decode_call import DecodeCall, DecodeNumbers, DecodeStrides
from simserve_kernels.decode_parts import (
    add_values,
    block_numbers,
    load_k,
    load_packed_k,
    load_query,
    load_v,
    scaled_scores,
    score_tile,
    store_rows,
    tokens_to_read,
)

__all__ = ["PARTITION_SIZE", "decode_v1", "decode_v2"]

PARTITION_SIZE = 512

_ROWS = 16
_SUM_TILE = 512


@triton.jit
def _score_tiles(
    tops: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    span: tl.tensor,
    num: DecodeNumbers,
    by: DecodeStrides,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Store the scores of the tiles of [span[0], span[1]); return tops and them, the larger.

    `query` is (q in every row, odd q, row scale, slopes), `cache` (K and V of the head, row of the
    block table, row of scores),
    and span[2], span[3], span[4] are the first token seen, the end of those, and seq_len.
    """
    TILE: tl.constexpr = opt.tile
    STAGES: tl.constexpr = 1 if MASKED or opt.packed_slot > 0 else None
    token = span[0] + tl.arange(0, TILE)
    if not MASKED:
        block = block_numbers(cache[2], token, token < span[1], opt)
    for start in tl.range(span[0], span[1], TILE, num_stages=STAGES):
        token = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        seen = (token >= span[2]) & (token < span[3])
        if MASKED:
            block = block_numbers(cache[2], token, seen, opt)
        if opt.packed_slot > 0:
            keys = load_packed_k(cache[0], block, token, seen, by, opt, MASKED)
        else:
            keys = load_k(cache[0], block, token, seen, by, opt, MASKED)
        if not MASKED:
            block = block_numbers(cache[2], token + TILE, token + TILE < span[1], opt)
        if opt.packed_slot > 0:
            products = tl.sum(tl.sum(query[0] * keys.to(tl.float32), axis=2), axis=1)[None, :]
            scores = scaled_scores(products, query, token, span[4], num, opt)
        else:
            scores = score_tile(query, keys, token, span[4], num, opt)
        if MASKED:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        row = tl.arange(0, opt.rows)[:, None]
        tl.store(cache[3] + row * 0 + token[None, :], scores, mask=(row == 0) & (token < span[3]))
        tops = tl.maximum(tops, scores)
    return tops


@triton.jit
def _output_tiles(
    acc: tl.tensor,
    acc_odd: tl.tensor,
    cache: tl.tensor,
    span: tl.tensor,
    top: tl.tensor,
    inverse: tl.tensor,
    dtype: tl.constexpr,
    by: DecodeStrides,
    opt: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return (acc, acc of odd dimensions) + weights · V over the tiles; arguments as above.

    On the packed layout acc is `[tokens of a tile, dims]`, to be summed up at the end.
    """
    ROWS: tl.constexpr = opt.rows
    TILE: tl.constexpr = opt.tile
    STAGES: tl.constexpr = 1 if MASKED or opt.packed_slot > 0 else None
    token = span[0] + tl.arange(0, TILE)
    if not MASKED:
        block = block_numbers(cache[2], token, token < span[1], opt)
        score = tl.load(cache[3] + token, mask=token < span[1], other=0.0)
    for start in tl.range(span[0], span[1], TILE, num_stages=STAGES):
        token = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        seen = (token >= span[2]) & (token < span[3])
        read = tokens_to_read(token, span[2], span[3], opt)
        if MASKED:
            block = block_numbers(cache[2], token, read, opt)
            score = tl.load(cache[3] + token, mask=seen, other=float("-inf"))
        values = load_v(cache[1], block, token, read, seen, by, opt, MASKED)
        weight = tl.exp2(score - top) * inverse
        if not MASKED:
            following = token + TILE
            block = block_numbers(cache[2], following, following < span[1], opt)
            score = tl.load(cache[3] + following, mask=following < span[1], other=0.0)
        if opt.packed_slot > 0:
            acc += weight[:, None] * values.to(tl.float32)
        else:
            weights = tl.broadcast_to(weight.to(dtype)[None, :], (ROWS, TILE))
            acc, acc_odd = add_values(acc, acc_odd, weights, values, opt)
    return acc, acc_odd


@triton.jit
def _attend_range(
    query: tl.tensor,
    cache: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    seq_len: tl.tensor,
    num: DecodeNumbers,
    by: DecodeStrides,
    opt: tl.constexpr,
    SUM_TILE: tl.constexpr,
) -> tl.tensor:
    """Return (output, that of odd dimensions, maximum, sum) of one query over [low, high).

    The barrier orders the scores' writes before the reads of other threads of the program.
    """
    ROWS: tl.constexpr = opt.rows
    TILE: tl.constexpr = opt.tile
    HEAD_PAD: tl.constexpr = opt.head_pad
    first = low // TILE * TILE
    begin = tl.cdiv(low, TILE) * TILE
    whole = begin if opt.ieee else tl.maximum(begin, high // TILE * TILE)
    left = (first, tl.minimum(begin, high), low, high, seq_len)
    middle = (begin, whole, low, high, seq_len)
    right = (whole, high, low, high, seq_len)

    tops = tl.full([ROWS, TILE], float("-inf"), tl.float32)
    if opt.window > 0:
        tops = _score_tiles(tops, query, cache, left, num, by, opt, True)
    if not opt.ieee:
        tops = _score_tiles(tops, query, cache, middle, num, by, opt, False)
    tops = _score_tiles(tops, query, cache, right, num, by, opt, True)
    top = tl.max(tl.max(tops, axis=1), axis=0)
    tl.debug_barrier()

    sums = tl.zeros([SUM_TILE], tl.float32)
    for start in tl.range(first, high, SUM_TILE):
        token = start + tl.arange(0, SUM_TILE)
        score = tl.load(cache[3] + token, mask=token < high, other=float("-inf"))
        sums += tl.exp2(score - top)
    total = tl.sum(sums, axis=0)

    inverse = 1.0 / total
    dtype: tl.constexpr = query[0].dtype
    ACC_ROWS: tl.constexpr = TILE if opt.packed_slot > 0 else ROWS
    acc = tl.zeros([ACC_ROWS, HEAD_PAD], tl.float32)
    odd = acc
    if opt.window > 0:
        acc, odd = _output_tiles(acc, odd, cache, left, top, inverse, dtype, by, opt, True)
    if not opt.ieee:
        acc, odd = _output_tiles(acc, odd, cache, middle, top, inverse, dtype, by, opt, False)
    acc, odd = _output_tiles(acc, odd, cache, right, top, inverse, dtype, by, opt, True)
    if opt.packed_slot > 0:
        acc = tl.sum(acc, axis=0)[None, :]
        odd = acc
    return acc, odd, top, total


@triton.jit
def _in_pieces(query: tl.tensor, opt: tl.constexpr) -> tl.tensor:
    """Return q as its products need it: on the packed layout float32 `[1, dims / x, x]`."""
    if opt.packed_slot > 0:
        PARTS: tl.constexpr = opt.head_pad // opt.x
        X: tl.constexpr = opt.x
        return tl.reshape(query, (1, PARTS, X)).to(tl.float32)
    else:
        return query


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
    out_part: tl.tensor,
    scores_row: tl.tensor,
    num: DecodeNumbers,
    by: DecodeStrides,
    opt: tl.constexpr,
    PARTITION: tl.constexpr,
    SUM_TILE: tl.constexpr,
) -> None:
    """One query head of one sequence: the whole context (PARTITION 0), or one partition of it."""
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    low = tl.maximum(seq_len - opt.window, 0) if opt.window > 0 else 0
    high = seq_len
    if PARTITION > 0:
        low = tl.maximum(low, part * PARTITION)
        high = tl.minimum(high, part * PARTITION + PARTITION)
    row = seq * opt.heads + head
    ROWS: tl.constexpr = opt.rows
    same = tl.zeros([ROWS], tl.int64)
    one = tl.arange(0, ROWS) == 0
    out_rows = (out + seq * by.out_seq + head * by.out_head + part * out_part + same)[:, None]
    if low >= high:
        if PARTITION == 0:
            HEAD_PAD: tl.constexpr = opt.head_pad
            nothing = tl.zeros([ROWS, HEAD_PAD], tl.float32)
            store_rows(out_rows, nothing, nothing, same.to(tl.float32), one, opt)
        return

    slope = tl.zeros([ROWS], tl.float32)
    if opt.alibi:
        slope += tl.load(alibi_slopes + head).to(tl.float32)
    q_rows = (q + seq * by.q_seq + head * by.q_head + same)[:, None]
    query, odd, row_scale = load_query(q_rows, same == 0, num.scale, opt)
    cache = (
        k_cache + (head // opt.group) * by.k_head,
        v_cache + (head // opt.group) * by.v_head,
        block_table + seq * by.table_seq,
        scores + row * scores_row,
    )
    query = (_in_pieces(query, opt), odd, row_scale, slope)
    acc, odd, top, total = _attend_range(query, cache, low, high, seq_len, num, by, opt, SUM_TILE)
    store_rows(out_rows, acc, odd, same.to(tl.float32) + num.v_scale, one, opt)
    if PARTITION > 0:
        statistic = row * tl.num_programs(2) + part
        tl.store(max_logits + statistic, top)
        tl.store(exp_sums + statistic, total)


@triton.jit(do_not_specialize=["num_parts"])
def _reduce_kernel(
    out: tl.tensor,
    tmp_out: tl.tensor,
    max_logits: tl.tensor,
    exp_sums: tl.tensor,
    seq_lens: tl.tensor,
    num_parts: tl.tensor,
    by: DecodeStrides,
    HEADS: tl.constexpr,
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
    row = (seq * HEADS + head) * num_parts
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
        weight = tl.load(exp_sums + row + part, mask=valid, other=0.0) * tl.exp2(maximum - top)
        total += tl.sum(weight, axis=0)
        pointers = tmp_out + (row + part)[:, None] * HEAD_SIZE + dim[None, :]
        mask = valid[:, None] & (dim < HEAD_SIZE)[None, :]
        output += tl.sum(weight[:, None] * tl.load(pointers, mask=mask, other=0.0), axis=0)
    output = output / tl.where(end > begin, total, 1.0)
    pointers = out + seq * by.out_seq + head * by.out_head + dim
    tl.store(pointers, output.to(out.dtype.element_ty), mask=dim < HEAD_SIZE)


def _launch(
    call: DecodeCall,
    out: torch.Tensor,
    out_part: int,
    statistics: tuple[torch.Tensor, torch.Tensor],
    num_parts: int,
    partition: int,
) -> None:
    row = triton.cdiv(call.max_seq_len, _SUM_TILE) * _SUM_TILE
    scores = call.q.new_empty((call.num_seqs, call.num_heads, row), dtype=torch.float32)
    tile, num_warps, stages = _tile(call, call.num_heads * call.num_seqs * num_parts, partition)
    _decode_kernel[(call.num_heads, call.num_seqs, num_parts)](
        out, *statistics, call.q, call.k_cache, call.v_cache, scores, call.block_table,
        call.seq_lens, call.slopes, out_part, row, call.numbers(), call.strides(out),
        call.kernel_options(tile, 1 if call.layout == "packed" else _ROWS), PARTITION=partition,
        SUM_TILE=_SUM_TILE, num_warps=num_warps, num_stages=stages,
    )  # fmt: skip


def _tile(call: DecodeCall, num_programs: int, partition: int) -> tuple[int, int, int]:
    """Return tokens of a tile, warps and stages.

    On the packed layout nothing but other warps hides how long a load takes: few large programs, or
    many of one warp. A V1 program has a whole sequence, the longest of which sets the time of a
    ragged batch: it is large, too. (Copies ahead of time, through shared memory, take twice as
    long.)
    """
    if call.k_cache.dtype == torch.float32:
        return 16, 4, 1
    if call.layout == "nhd":
        return (64 if call.head_size <= 128 else 32), 2, 3
    if num_programs <= 512:
        return 64, 8, 1
    if not partition:
        return 32, 8, 1
    one_warp = num_programs > 1024 and call.head_size <= 128
    return 16, 1 if one_warp else 4, 1


def decode_v1(call: DecodeCall, out: torch.Tensor) -> None:
    """Write the attention of `call` to `out`, one program a query head and sequence."""
    _launch(call, out, 0, (out, out), 1, 0)


def decode_v2(call: DecodeCall, out: torch.Tensor) -> None:
    """Write the attention of `call` to `out`, by partitions of 512 tokens and a merge."""
    num_parts = max(1, triton.cdiv(call.max_seq_len, PARTITION_SIZE))
    rows = (call.num_seqs, call.num_heads, num_parts)
    tmp_out = call.q.new_empty((*rows, call.head_size), dtype=torch.float32)
    max_logits = call.q.new_empty(rows, dtype=torch.float32)
    exp_sums = torch.empty_like(max_logits)
    part = tmp_out.stride(2)
    _launch(call, tmp_out, part, (max_logits, exp_sums), num_parts, PARTITION_SIZE)
    _reduce_kernel[(call.num_heads, call.num_seqs)](
        out, tmp_out, max_logits, exp_sums, call.seq_lens, num_parts, call.strides(out),
        HEADS=call.num_heads, HEAD_SIZE=call.head_size,
        HEAD_PAD=triton.next_power_of_2(call.head_size), WINDOW=call.options.sliding_window,
        PARTITION=PARTITION_SIZE, PARTS=min(16, triton.next_power_of_2(num_parts)), num_warps=4,
    )  # fmt: skip
