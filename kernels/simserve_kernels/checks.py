"""Refusals before a launch: what a kernel cannot do is said in one sentence, not found by the GPU.

A kernel handed a tensor of another device, a wrong dtype or a rebuilt view reads where it should
not, and the failure surfaces at a later, unrelated call. Everything here is decided on the host,
from shapes, dtypes and strides alone: no check copies from the device or waits for it. What only
the device knows (slots, block numbers, lengths) stays the caller's promise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import NamedTuple

import torch

from simserve_kernels.layouts import CacheLayout, CacheShape, check_cache

__all__ = [
    "BLOCK_SIZES",
    "FP8_DTYPE",
    "HEAD_SIZES",
    "AttentionOptions",
    "attention_options",
    "check_cache_scales",
    "check_dtype",
    "check_float",
    "check_heads",
    "check_index",
    "check_kv_cache",
    "check_last_dim_contiguous",
    "check_logits",
    "check_same_device",
    "check_shape",
    "check_slopes",
    "device_guard",
]

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = range(1, 257)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
FP8_DTYPE = torch.float8_e4m3fn
_NO_LIMIT = 2**31 - 1  # a window that no sequence fills: positions are 32-bit integers


class AttentionOptions(NamedTuple):
    """What modifies the scores, checked; 0 stands for `off`.

    A score is softcap(scale · q·k) + slope · (key position − query position), with
    softcap(s) = soft_cap · tanh(s / soft_cap); a key is seen if query position − key position
    is in [0, sliding_window).
    """

    scale: float
    sliding_window: int
    soft_cap: float
    k_scale: float
    v_scale: float


def check_same_device(tensors: Mapping[str, torch.Tensor | None]) -> torch.device:
    """Return the one device that all tensors are on, a CUDA GPU (or the CPU, interpreted).

    Raises:
        ValueError: two devices, or one that Triton cannot launch on.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(present.items()))
    for name, tensor in present.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device}, {first_name} on {first.device}: "
                "all tensors of a call must be on one device"
            )
    if first.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{first_name} is on {first.device}: the Triton kernels need a CUDA GPU; "
            "without one use simserve_kernels.reference"
        )
    return first.device


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one: Triton launches on the current GPU, not the data's."""
    if tensor.device.type != "cuda":
        return nullcontext()
    guard: AbstractContextManager[object] = torch.cuda.device(tensor.device)
    return guard


def check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Refuse a tensor of a dtype that is not `allowed`, with a TypeError."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} is {tensor.dtype}: it must be one of {names}")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not bfloat16, float16 or float32, with a TypeError."""
    check_dtype(name, tensor, FLOAT_DTYPES)


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int | str, ...]) -> None:
    """Refuse a tensor of another shape; a string in `expected` names a dimension of any size."""
    fits = len(tensor.shape) == len(expected) and all(
        isinstance(want, str) or size == want
        for size, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(want) for want in expected)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be [{wanted}]")


def check_last_dim_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is strided; all others may be views, with ValueError."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} has stride {tensor.stride(-1)}: it must be contiguous"
        )


def check_index(name: str, tensor: torch.Tensor, expected: tuple[int | str, ...]) -> None:
    """Refuse anything but an int32 or int64 tensor of the shape, its last dimension contiguous."""
    check_dtype(name, tensor, INDEX_DTYPES)
    check_shape(name, tensor, expected)
    check_last_dim_contiguous(name, tensor)


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """Return the rows and the vocabulary of logits; refuse what is no `[rows, vocab]` of floats."""
    check_float("logits", logits)
    check_shape("logits", logits, ("num_rows", "vocab_size"))
    check_last_dim_contiguous("logits", logits)
    num_rows, vocab_size = logits.shape
    return num_rows, vocab_size


def check_slopes(slopes: torch.Tensor | None, num_heads: int) -> None:
    """Refuse ALiBi slopes that are not a contiguous float32 tensor, one for each query head."""
    if slopes is not None:
        check_dtype("alibi_slopes", slopes, (torch.float32,))
        check_shape("alibi_slopes", slopes, (num_heads,))
        check_last_dim_contiguous("alibi_slopes", slopes)


def check_heads(num_heads: int, holder: str, num_kv_heads: int) -> None:
    """Refuse query heads that the KV heads of `holder` cannot serve in groups of one size."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads, {holder} {num_kv_heads}: "
            "the query heads must be a multiple of the KV heads"
        )


def check_cache_scales(k_cache: torch.Tensor, k_scale: float, v_scale: float) -> None:
    """Refuse scales of a cache that is not quantised, with ValueError."""
    if k_cache.dtype != FP8_DTYPE and (k_scale, v_scale) != (1.0, 1.0):
        raise ValueError(f"k_scale and v_scale must be 1 for a cache of {k_cache.dtype}")


def check_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: CacheLayout,
    dtype: torch.dtype,
) -> CacheShape:
    """Return the cache's sizes; it holds `dtype` or fp8 e4m3 and has sizes that the kernels know.

    Raises:
        TypeError: the cache is of another dtype.
        ValueError: K, V and layout do not fit, or the head size or block size is not supported.
    """
    shape = check_cache(k_cache, v_cache, layout)
    check_dtype("k_cache", k_cache, (dtype, FP8_DTYPE))
    if shape.head_size not in HEAD_SIZES:
        raise ValueError(f"the head size is {shape.head_size}: it must be one of {HEAD_SIZES}")
    if shape.num_kv_heads == 0:
        raise ValueError("the cache has 0 KV heads: there must be one at least")
    if shape.block_size not in BLOCK_SIZES:
        raise ValueError(f"the block size is {shape.block_size}: it must be from 1 to 256")
    return shape


def attention_options(
    head_size: int,
    *,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> AttentionOptions:
    """Check the options of an attention call and fill in the defaults; scale is head_size^-0.5.

    A window that no sequence fills is no limit.

    Raises:
        ValueError: a scale or cap that is not a positive finite number, or a window that is not a
            positive integer.
    """
    scale = head_size**-0.5 if scale is None else scale
    numbers = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale}
    if soft_cap is not None:
        numbers["soft_cap"] = soft_cap
    for name, number in numbers.items():
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} is {number}: it must be positive and finite")
    return AttentionOptions(
        float(scale), _window(sliding_window), float(soft_cap or 0), float(k_scale), float(v_scale)
    )


def _window(sliding_window: int | None) -> int:
    if sliding_window is None:
        return 0
    if not isinstance(sliding_window, Integral) or sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}: it must be a positive integer")
    return int(sliding_window) if sliding_window < _NO_LIMIT else 0
