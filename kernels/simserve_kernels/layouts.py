"""The two layouts of a paged KV cache: their shapes, and one address formula for both.

A cache is a pair of tensors over `num_blocks` blocks of `block_size` token slots; slot number
`s` of a slot mapping is place `s % block_size` of block `s // block_size`.

* `nhd`: K and V `[num_blocks, block_size, num_kv_heads, head_size]`, the fast default: one token's
  vector of one head is contiguous, so that a tile of tokens is rows of `head_size` elements.
* `packed`: K `[num_blocks, num_kv_heads, head_size / x, block_size, x]` with x elements of 16 bytes
  together, V `[num_blocks, num_kv_heads, head_size, block_size]`: the layout of the first paged
  attention kernels (Kwon et al., 2023, "Efficient Memory Management for Large Language Model
  Serving with PagedAttention"), in which neighbouring threads read 16 bytes of neighbouring tokens.

Strides are always read off the tensors, never rebuilt from shapes, so that views work: K and V
interleaved per block, a layer of a larger tensor.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

__all__ = [
    "CacheLayout",
    "CacheShape",
    "KVStrides",
    "allocate_cache",
    "check_cache",
    "kv_strides",
    "packing",
    "token_run",
]

CacheLayout = Literal["packed", "nhd"]

_PACK_BYTES = 16
_NUM_DIMS = {"nhd": (4, 4), "packed": (5, 4)}


class CacheShape(NamedTuple):
    """The sizes of a cache, whatever its layout."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int


class KVStrides(NamedTuple):
    """Strides in elements; block b, slot s, head h, dimension d of the cache lie at.

    K: b·k_block + s·k_slot + h·k_head + (d // x)·k_outer + (d % x), and
    V: b·v_block + s·v_slot + h·v_head + d·v_dim.

    In the nhd layout x = 1 and k_outer = v_dim = 1. `b·k_block` may exceed 2^31 - 1: kernels
    cast block numbers to int64 before they multiply.
    """

    k_block: int
    k_slot: int
    k_head: int
    k_outer: int
    x: int
    v_block: int
    v_slot: int
    v_head: int
    v_dim: int


def packing(dtype: torch.dtype) -> int:
    """Elements of `dtype` in 16 bytes: the x of the packed layout's K."""
    return int(_PACK_BYTES // dtype.itemsize)


def cache_shapes(
    shape: CacheShape, layout: CacheLayout, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the K and the V tensor of a cache of `shape`."""
    blocks, slots, heads, dims = shape
    if layout == "nhd":
        return (blocks, slots, heads, dims), (blocks, slots, heads, dims)
    x = packing(dtype)
    return (blocks, heads, dims // x, slots, x), (blocks, heads, dims, slots)


def allocate_cache(
    shape: CacheShape,
    layout: CacheLayout,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate K and V of a cache, uninitialised."""
    k_shape, v_shape = cache_shapes(shape, layout, dtype)
    k_cache = torch.empty(k_shape, dtype=dtype, device=device)
    return k_cache, torch.empty(v_shape, dtype=dtype, device=device)


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, layout: CacheLayout) -> CacheShape:
    """Return the sizes of a cache whose K and V fit each other and the layout.

    Raises:
        ValueError: the layout is unknown, K and V differ in what they describe, or their innermost
            dimension is not contiguous.
        TypeError: K and V are of different dtypes.
    """
    if layout not in get_args(CacheLayout):
        raise ValueError(f"layout is {layout!r}: it must be 'packed' or 'nhd'")
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}: they must agree")
    if (k_cache.dim(), v_cache.dim()) != _NUM_DIMS[layout]:
        raise ValueError(
            f"k_cache has {k_cache.dim()} dimensions and v_cache {v_cache.dim()}: "
            f"the {layout} layout has {_NUM_DIMS[layout][0]} and {_NUM_DIMS[layout][1]}"
        )
    shape = _shape_of_v(v_cache, layout)
    expected, _ = cache_shapes(shape, layout, k_cache.dtype)
    if tuple(k_cache.shape) != expected:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)}: beside v_cache of "
            f"{tuple(v_cache.shape)} the {layout} layout has {expected}"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[-1] > 1 and cache.stride(-1) != 1:
            raise ValueError(
                f"the last dimension of {name} has stride {cache.stride(-1)}: it must be contiguous"
            )
    return shape


def kv_strides(k_cache: torch.Tensor, v_cache: torch.Tensor, layout: CacheLayout) -> KVStrides:
    """Return the strides of a cache that `check_cache` accepts."""
    if layout == "nhd":
        k_block, k_slot, k_head, _ = k_cache.stride()
        v_block, v_slot, v_head, _ = v_cache.stride()
        return KVStrides(k_block, k_slot, k_head, 1, 1, v_block, v_slot, v_head, 1)
    k_block, k_head, k_outer, k_slot, _ = k_cache.stride()
    v_block, v_head, v_dim, _ = v_cache.stride()
    x = packing(k_cache.dtype)
    return KVStrides(k_block, k_slot, k_head, k_outer, x, v_block, 1, v_head, v_dim)


def token_run(v_cache: torch.Tensor, layout: CacheLayout) -> int:
    """Return how many tokens of V are contiguous and aligned, at most 8; 1 where not known."""
    if layout == "nhd":
        return 1
    apart = (v_cache.shape[-1], *v_cache.stride()[:3])
    return next(run for run in (8, 4, 2, 1) if all(stride % run == 0 for stride in apart))


def _shape_of_v(v_cache: torch.Tensor, layout: CacheLayout) -> CacheShape:
    if layout == "nhd":
        blocks, slots, heads, dims = v_cache.shape
    else:
        blocks, heads, dims, slots = v_cache.shape
    return CacheShape(blocks, slots, heads, dims)
