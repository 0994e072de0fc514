"""How split-KV decode is cut into chunks, and how the chunks' results are merged.

Every program derives the plan from seq_lens alone, so that nothing about the lengths has to be
known on the host, and a CUDA graph replays for any of them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from simserve_kernels.decode_call import DecodeNumbers, DecodeStrides

__all__ = ["PlanOptions", "find_chunk", "merge_kernel"]


class PlanOptions(NamedTuple):
    """What a plan is compiled for."""

    budget: int  # chunks that fill the GPU
    window: int
    tile: int  # tokens
    fine_tiles: int
    seqs_pad: int


@triton.jit
def plan_chunks(seq_lens: tl.tensor, num_seqs: tl.tensor, plan: tl.constexpr) -> tl.tensor:
    """Return (sequence numbers, chunks of each, tiles a chunk of each).

    With span_i the tiles of sequence i and total = Σ span_i: a sequence of at most
    coarse = ⌈total / budget⌉ tiles is one chunk. A longer one is cut into chunks of at most
    ⌈total / (2 · budget)⌉ tiles, but not below fine_tiles unless coarse is, and evenly. There are
    at most 2 · budget + num_seqs chunks, and none is empty.
    """
    seq = tl.arange(0, plan.seqs_pad)
    length = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    first = length * 0
    if plan.window > 0:
        first = tl.maximum(length - plan.window, 0) // plan.tile
    span = tl.cdiv(length, plan.tile) - first
    total = tl.sum(span, axis=0)
    coarse = tl.maximum(tl.cdiv(total, plan.budget), 1)
    fine = tl.maximum(tl.cdiv(total, 2 * plan.budget), tl.minimum(coarse, plan.fine_tiles))
    pieces = tl.where(span <= coarse, 1, tl.cdiv(span, fine))
    tiles = tl.maximum(tl.cdiv(span, pieces), 1)
    return seq, tl.cdiv(span, tiles), tiles


@triton.jit
def find_chunk(
    chunk: tl.tensor, seq_lens: tl.tensor, num_seqs: tl.tensor, plan: tl.constexpr
) -> tl.tensor:
    """Return (sequence, its chunks, which of them this is, tokens of it) of chunk `chunk`.

    The sequence is num_seqs or more if there is no such chunk.
    """
    numbers, chunks, tiles = plan_chunks(seq_lens, num_seqs, plan)
    ends = tl.cumsum(chunks, axis=0)
    seq = tl.sum((ends <= chunk).to(tl.int32), axis=0)
    own = numbers == seq
    num_chunks = tl.sum(tl.where(own, chunks, 0), axis=0)
    size = tl.sum(tl.where(own, tiles, 0), axis=0) * plan.tile
    part = chunk - (tl.sum(tl.where(own, ends, 0), axis=0) - num_chunks)
    return seq, num_chunks, part, size


@triton.jit(do_not_specialize=["num_seqs"])
def merge_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    num: DecodeNumbers,
    by: DecodeStrides,
    plan: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Merge the chunks of one sequence, some of its query heads; 0 for a sequence of length 0."""
    seq = tl.program_id(1)
    numbers, chunks, _ = plan_chunks(seq_lens, num_seqs, plan)
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
        result = acc * (num.v_scale / tl.where(num_chunks > 0, norm, 1.0))
        pointers = out + seq.to(tl.int64) * by.out_seq + head * by.out_head + dim
        tl.store(pointers, result.to(out.dtype.element_ty), mask=dim < HEAD_SIZE)
