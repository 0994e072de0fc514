"""Write new keys and values into the paged cache, by slot mapping.

For token t with slot s = slot_mapping[t] ≥ 0, block b = s // block_size and place s % block_size:
cache[b, place] = k[t] / k_scale (and v[t] / v_scale), rounded to the cache's dtype; scales other
than 1 are for fp8 e4m3 alone, whose values saturate at ±448. Slot −1 marks padding: nothing is
written. One program copies a run of elements of `TOKENS` tokens, K and V together, so that
each of its loads is independent of the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import (
    FP8_DTYPE,
    attention_options,
    check_cache_scales,
    check_float,
    check_index,
    check_kv_cache,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    device_guard,
)
from simserve_kernels.layouts import CacheLayout, CacheShape, KVStrides, kv_strides

__all__ = ["check_write", "kv_write", "to_cache"]

_ELEMENTS = 1024
_TOKENS = {"nhd": 2, "packed": 8}


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: CacheLayout = "nhd",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write `k` and `v` into the cache, in place.

    Args:
        k: new keys `[num_tokens, num_kv_heads, head_size]`, bfloat16, float16 or float32, a view of
            any strides but the last.
        v: new values, of the shape and dtype of `k`.
        k_cache: K of the cache, of `layout`, in the dtype of `k` or float8_e4m3fn.
        v_cache: V of the cache.
        slot_mapping: `[num_tokens]` int32 or int64, each −1 (skipped) or a slot of the cache. Two
            tokens must not share a slot: which of them stays is undefined.
        layout: `nhd` or `packed`.
        k_scale: what an fp8 K is multiplied with when it is read; 1 for other dtypes.
        v_scale: the same of V.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides, devices or scales that do not fit.
    """
    shape = check_write(k, v, k_cache, v_cache, slot_mapping, layout, k_scale, v_scale)
    if k.shape[0] == 0:
        return
    width = shape.num_kv_heads * shape.head_size
    elements = min(_ELEMENTS, triton.next_power_of_2(width))
    tokens = _TOKENS[layout]
    grid = (triton.cdiv(k.shape[0], tokens), triton.cdiv(width, elements))
    by = kv_strides(k_cache, v_cache, layout)
    with device_guard(k):
        _kv_write_kernel[grid](
            k, v, k_cache, v_cache, slot_mapping, k.shape[0], k_scale, v_scale, *k.stride()[:2],
            *v.stride()[:2], by, X=by.x, HEADS=shape.num_kv_heads, HEAD_SIZE=shape.head_size,
            BLOCK_SIZE=shape.block_size, FP8=k_cache.dtype == FP8_DTYPE, TOKENS=tokens,
            ELEMENTS=elements, num_warps=4,
        )  # fmt: skip


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: CacheLayout,
    k_scale: float,
    v_scale: float,
) -> CacheShape:
    """Return the cache's sizes, or refuse arguments of `kv_write` that do not fit with a sentence.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: shapes, strides, devices or scales that do not fit.
    """
    check_same_device(
        {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    )
    check_float("k", k)
    shape = check_kv_cache(k_cache, v_cache, layout, k.dtype)
    if v.dtype != k.dtype:
        raise TypeError(f"v is {v.dtype}, k {k.dtype}: they must agree")
    for name, tensor in (("k", k), ("v", v)):
        check_shape(name, tensor, (k.shape[0], shape.num_kv_heads, shape.head_size))
        check_last_dim_contiguous(name, tensor)
    check_index("slot_mapping", slot_mapping, (k.shape[0],))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    attention_options(shape.head_size, scale=None, sliding_window=None, soft_cap=None, **scales)
    check_cache_scales(k_cache, k_scale, v_scale)
    return shape


@triton.jit
def to_cache(values: tl.tensor, scale: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """Quantise where the cache is fp8: divide by the scale, saturate; NaN stays NaN."""
    if FP8:
        values = tl.div_rn(values.to(tl.float32), scale)
        values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    num_tokens: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    k_token: tl.tensor,
    k_token_head: tl.tensor,
    v_token: tl.tensor,
    v_token_head: tl.tensor,
    by: KVStrides,
    X: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    """Copy ELEMENTS of the heads × head_size elements of TOKENS tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    block = (slot // BLOCK_SIZE)[:, None]
    place = (slot % BLOCK_SIZE)[:, None]
    source = token.to(tl.int64)[:, None]

    element = (tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS))[None, :]
    head = element // HEAD_SIZE
    dim = element % HEAD_SIZE
    mask = (slot >= 0)[:, None] & (element < HEADS * HEAD_SIZE)

    keys = tl.load(k + source * k_token + head * k_token_head + dim, mask=mask)
    values = tl.load(v + source * v_token + head * v_token_head + dim, mask=mask)
    k_dims = (dim // X) * by.k_outer + dim % X
    k_to = block * by.k_block + place * by.k_slot + head * by.k_head + k_dims
    v_to = block * by.v_block + place * by.v_slot + head * by.v_head + dim * by.v_dim
    keys = to_cache(keys, k_scale, FP8).to(k_cache.dtype.element_ty)
    values = to_cache(values, v_scale, FP8).to(v_cache.dtype.element_ty)
    tl.store(k_cache + k_to, keys, mask=mask)
    tl.store(v_cache + v_to, values, mask=mask)
