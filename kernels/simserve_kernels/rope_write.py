"""Rotary embedding and the write into the cache in one kernel: `rope`, then `kv_write`, bit by bit.

The rotated keys go to the cache alone and are never read back, and a step has a launch less. Keys
are rounded to their own dtype before they are quantised, so that fp8 caches hold the same numbers
as after the two calls.

Grid: (tokens, 2); of a token's two programs one rotates q in place, all heads, and one rotates k
into the cache and copies v.

In the packed layout V of one token is scattered, so that many tokens are better written together:
there the two calls are made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import FP8_DTYPE, device_guard
from simserve_kernels.kv_write import check_write, kv_write, to_cache
from simserve_kernels.layouts import CacheLayout, CacheShape, KVStrides, kv_strides
from simserve_kernels.norm_rope import check_rope, rope, rotate, rotate_in_place

__all__ = ["rope_kv_write"]

_MAX_PACKED_TOKENS = 256


class _Options(NamedTuple):
    """What the kernel is compiled for."""

    heads: int
    heads_pad: int
    kv_heads: int
    kv_heads_pad: int
    head: int
    half: int  # pairs of dimensions that are rotated
    half_pad: int
    rest_pad: int  # dimensions that are not rotated, rounded up; 0 if there are none
    head_pad: int
    x: int
    block_size: int
    fp8: bool


class _Strides(NamedTuple):
    """Strides in elements of the tensors beside the cache."""

    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    table_row: int


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: CacheLayout = "nhd",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate q in place; write k, rotated, and v into the cache. What `k` then holds is undefined.

    The arguments are those of `norm_rope.rope` and of `kv_write.kv_write`; slot −1 writes nothing,
    and the query of such a token is rotated all the same.

    Raises:
        TypeError: dtypes that differ or that the kernel does not know.
        ValueError: shapes, strides, devices or scales that do not fit.
    """
    check_rope(q, k, positions, table)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    shape = check_write(k, v, k_cache, v_cache, slot_mapping, layout, k_scale, v_scale)
    if q.shape[0] == 0:
        return
    if layout == "packed" and q.shape[0] > _MAX_PACKED_TOKENS:
        rope(q, k, positions, table)
        kv_write(k, v, k_cache, v_cache, slot_mapping, layout=layout, **scales)
        return
    by = kv_strides(k_cache, v_cache, layout)
    rows = _Strides(
        q_token=q.stride(0),
        q_head=q.stride(1),
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=v.stride(0),
        v_head=v.stride(1),
        table_row=table.stride(0),
    )
    with device_guard(q):
        _rope_kv_write_kernel[(q.shape[0], 2)](
            q, k, v, positions, table, k_cache, v_cache, slot_mapping, k_scale, v_scale, rows, by,
            _options(q, table, shape, by.x, k_cache.dtype == FP8_DTYPE), num_warps=4,
        )  # fmt: skip


def _options(
    q: torch.Tensor, table: torch.Tensor, shape: CacheShape, x: int, fp8: bool
) -> _Options:
    half = table.shape[1] // 2
    rest = shape.head_size - 2 * half
    return _Options(
        heads=q.shape[1],
        heads_pad=triton.next_power_of_2(q.shape[1]),
        kv_heads=shape.num_kv_heads,
        kv_heads_pad=triton.next_power_of_2(shape.num_kv_heads),
        head=shape.head_size,
        half=half,
        half_pad=triton.next_power_of_2(half),
        rest_pad=triton.next_power_of_2(rest) if rest else 0,
        head_pad=triton.next_power_of_2(shape.head_size),
        x=x,
        block_size=shape.block_size,
        fp8=fp8,
    )


@triton.jit
def _store_keys(
    k_cache: tl.tensor,
    keys: tl.tensor,
    dim: tl.tensor,
    real: tl.tensor,
    scale: tl.tensor,
    by: KVStrides,
    opt: tl.constexpr,
) -> None:
    """Store keys `[kv_heads_pad, dims]` at dimensions `dim` of a slot of the cache."""
    head = tl.arange(0, opt.kv_heads_pad)[:, None]
    to = k_cache + head * by.k_head + (dim // opt.x * by.k_outer + dim % opt.x)[None, :]
    keys = to_cache(keys, scale, opt.fp8).to(k_cache.dtype.element_ty)
    tl.store(to, keys, mask=(head < opt.kv_heads) & real[None, :])


@triton.jit
def _rope_kv_write_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    rows: _Strides,
    by: KVStrides,
    opt: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, opt.half_pad)
    angles = table + tl.load(positions + token).to(tl.int64) * rows.table_row + dim
    cos = tl.load(angles, mask=dim < opt.half, other=0.0)
    sin = tl.load(angles + opt.half, mask=dim < opt.half, other=0.0)
    if tl.program_id(1) == 0:
        rotate_in_place(
            q + token * rows.q_token, cos, sin, rows.q_head, opt.heads, opt.half, opt.heads_pad,
            opt.half_pad,
        )  # fmt: skip
        return
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, place = slot // opt.block_size, slot % opt.block_size
    k_cache += block * by.k_block + place * by.k_slot
    v_cache += block * by.v_block + place * by.v_slot
    keys = k + token * rows.k_token
    _, _, a, b = rotate(
        keys, cos, sin, rows.k_head, opt.kv_heads, opt.half, opt.kv_heads_pad, opt.half_pad
    )
    _store_keys(k_cache, a, dim, dim < opt.half, k_scale, by, opt)
    _store_keys(k_cache, b, dim + opt.half, dim < opt.half, k_scale, by, opt)
    head = tl.arange(0, opt.kv_heads_pad)[:, None]
    if opt.rest_pad > 0:
        rest = 2 * opt.half + tl.arange(0, opt.rest_pad)
        real = (head < opt.kv_heads) & (rest < opt.head)[None, :]
        same = tl.load(keys + head * rows.k_head + rest[None, :], mask=real)
        _store_keys(k_cache, same, rest, rest < opt.head, k_scale, by, opt)
    dims = tl.arange(0, opt.head_pad)[None, :]
    real = (head < opt.kv_heads) & (dims < opt.head)
    values = tl.load(v + token * rows.v_token + head * rows.v_head + dims, mask=real)
    values = to_cache(values, v_scale, opt.fp8).to(v_cache.dtype.element_ty)
    tl.store(v_cache + head * by.v_head + dims * by.v_dim, values, mask=real)
