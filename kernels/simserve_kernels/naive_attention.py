"""Attention that writes its scores S and weights P to memory: what flash attention is measured by.

Three kernels, each of which reads what the one before wrote:

    S = scale · Q K^T   (grid: row tiles × key tiles × query heads; a program owns one tile of S)
    P = softmax(S)      (grid: rows; a program owns one row, and reads it twice)
    O = P V             (grid: row tiles × query heads; a program owns one tile of O)

S is `[num_heads, q_len, kv_len]` float32, P the same in q's dtype. `traffic` counts the bytes that
both ways must move.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import attention_options, check_same_device, device_guard
from simserve_kernels.flash_attention import check_dense

__all__ = ["Traffic", "naive_attention", "traffic"]

SOFTMAX_BLOCK = 2048


class Traffic(NamedTuple):
    """Counted, not measured: bytes between chip and memory, and floating-point operations."""

    naive_bytes: int
    flash_bytes: int
    flops: int
    naive_scratch_bytes: int


def traffic(
    q_len: int,
    kv_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    *,
    causal: bool = True,
) -> Traffic:
    """Count one sequence's attention, every tensor read once by each kernel that needs it.

    Q, K, V and O move in both ways. The naive one also writes and reads S (4 bytes an element) and
    P (of the dtype's), of all q_len × kv_len pairs: its kernels do not know which are masked. The
    operations are 4 · num_heads · head_size for every pair that is seen.
    """
    item = dtype.itemsize
    dense = item * head_size * (2 * q_len * num_heads + 2 * kv_len * num_kv_heads)
    pairs, seeing = q_len * kv_len, min(q_len, kv_len)
    scratch = num_heads * pairs * (4 + item)
    seen = seeing * kv_len - seeing * (seeing - 1) // 2 if causal else pairs
    return Traffic(
        naive_bytes=dense + 2 * scratch,
        flash_bytes=dense,
        flops=4 * num_heads * head_size * seen,
        naive_scratch_bytes=scratch,
    )


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Return attention `[q_len, num_heads, head_size]` of one sequence, in q's dtype.

    Args:
        q: `[q_len, num_heads, head_size]`, bfloat16, float16 or float32: the sequence's last q_len.
        k: `[kv_len, num_kv_heads, head_size]`, in q's dtype; v likewise.
        v: as k.
        causal: False lets every query see every key.
        scale: head_size^-0.5 by default.

    Raises:
        TypeError: a dtype that the kernels do not know.
        ValueError: shapes, devices or a scale that do not fit.
    """
    check_dense(q, k, v)
    check_same_device({"q": q, "k": k, "v": v})
    factor = attention_options(q.shape[2], scale=scale, sliding_window=None, soft_cap=None).scale
    (q_len, num_heads, head), kv_len = q.shape, k.shape[0]
    scores = torch.empty(num_heads, q_len, kv_len, dtype=torch.float32, device=q.device)
    weights = torch.empty_like(scores, dtype=q.dtype)
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    ieee = q.dtype == torch.float32
    # Products of float32 run on the CUDA cores, whose operands take a thread's registers.
    block = 16 if ieee else 64
    shape = (q_len, kv_len, num_heads // k.shape[1], head, triton.next_power_of_2(head), block)
    tiles = triton.cdiv(q_len, block)
    with device_guard(q):
        _scores_kernel[(tiles, triton.cdiv(kv_len, block), num_heads)](
            scores, q, k, factor, *q.stride()[:2], *k.stride()[:2], *shape, ieee, causal
        )
        _softmax_kernel[(q_len * num_heads,)](weights, scores, kv_len, SOFTMAX_BLOCK)
        _output_kernel[(tiles, num_heads)](
            out, weights, v, *out.stride()[:2], *v.stride()[:2], *shape, ieee
        )
    return out


@triton.jit
def _scores_kernel(
    scores: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    IEEE: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> None:
    head = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, HEAD_PAD)
    q_ptrs = q + rows.to(tl.int64)[:, None] * q_token + head * q_head + dims[None, :]
    k_ptrs = k + keys.to(tl.int64)[:, None] * k_token + head // GROUP * k_head + dims[None, :]
    real = (dims < HEAD)[None, :]
    q_tile = tl.load(q_ptrs, mask=(rows < q_len)[:, None] & real, other=0.0)
    k_tile = tl.load(k_ptrs, mask=(keys < kv_len)[:, None] & real, other=0.0)
    PRECISION: tl.constexpr = "ieee" if IEEE else "tf32"
    tile = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
    if CAUSAL:
        seen = keys[None, :] <= rows[:, None] + kv_len - q_len
        tile = tl.where(seen, tile, float("-inf"))
    inside = (rows < q_len)[:, None] & (keys < kv_len)[None, :]
    pointers = scores + (head * q_len + rows)[:, None] * kv_len + keys[None, :]
    tl.store(pointers, tile, mask=inside)


@triton.jit
def _softmax_kernel(
    weights: tl.tensor, scores: tl.tensor, kv_len: tl.tensor, BLOCK: tl.constexpr
) -> None:
    start = tl.program_id(0).to(tl.int64) * kv_len
    m = tl.full([BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, kv_len, BLOCK):
        keys = begin + tl.arange(0, BLOCK)
        tile = tl.load(scores + start + keys, mask=keys < kv_len, other=float("-inf"))
        m_new = tl.maximum(m, tile)
        sums = sums * tl.exp(m - m_new) + tl.exp(tile - m_new)
        m = m_new
    largest = tl.max(m, axis=0)
    total = tl.sum(sums * tl.exp(m - largest), axis=0)
    total = tl.where(total > 0.0, total, 1.0)  # a row that sees no key gives 0
    for begin in tl.range(0, kv_len, BLOCK):
        keys = begin + tl.arange(0, BLOCK)
        tile = tl.load(scores + start + keys, mask=keys < kv_len, other=float("-inf"))
        tile = tl.exp(tile - largest) / total
        tl.store(weights + start + keys, tile.to(weights.dtype.element_ty), mask=keys < kv_len)


@triton.jit
def _output_kernel(
    out: tl.tensor,
    weights: tl.tensor,
    v: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    q_len: tl.tensor,
    kv_len: tl.tensor,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    IEEE: tl.constexpr,
) -> None:
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([BLOCK, HEAD_PAD], tl.float32)
    PRECISION: tl.constexpr = "ieee" if IEEE else "tf32"
    for begin in tl.range(0, kv_len, BLOCK):
        keys = begin + tl.arange(0, BLOCK)
        p_ptrs = weights + (head * q_len + rows)[:, None] * kv_len + keys[None, :]
        v_ptrs = v + keys.to(tl.int64)[:, None] * v_token + head // GROUP * v_head + dims[None, :]
        inside = (rows < q_len)[:, None] & (keys < kv_len)[None, :]
        real = (keys < kv_len)[:, None] & (dims < HEAD)[None, :]
        p_tile = tl.load(p_ptrs, mask=inside, other=0.0)
        v_tile = tl.load(v_ptrs, mask=real, other=0.0)
        acc = tl.dot(p_tile, v_tile, acc, input_precision=PRECISION)
    pointers = out + rows.to(tl.int64)[:, None] * out_token + head * out_head + dims[None, :]
    real = (rows < q_len)[:, None] & (dims < HEAD)[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=real)
