"""The small steps between a decoder's matrix products: RMSNorm, rotary embedding, SiLU gate.

All compute in float32 and round once, to the tensor's dtype. Rows may be strided views, such as the
query and key parts of a fused projection; the last dimension is contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import (
    check_dtype,
    check_float,
    check_index,
    check_last_dim_contiguous,
    check_same_device,
    check_shape,
    device_guard,
)

__all__ = ["check_rope", "rms_norm", "rope", "rotate", "rotate_in_place", "silu_mul"]

SILU_BLOCK = 1024


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, contiguous, in x's dtype.

    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.) With a residual,
    `residual += x` in place first, and that sum, rounded to the dtype, is what is normalised.

    Grid: rows; a program owns one row of one token (and head).

    Args:
        x: `[num_tokens, size]`, or `[num_tokens, num_heads, size]` to norm each head.
        weight: `[size]` in x's dtype.
        eps: added under the root.
        residual: as x.

    Raises:
        TypeError: dtypes that differ or that the kernel does not know.
        ValueError: shapes or devices that do not fit.
    """
    check_float("x", x)
    check_shape("x", x, ("num_tokens", "size") if x.dim() == 2 else ("tokens", "heads", "size"))
    check_dtype("weight", weight, (x.dtype,))
    check_shape("weight", weight, (x.shape[-1],))
    tensors = {"x": x, "weight": weight, "residual": residual}
    if residual is not None:
        check_dtype("residual", residual, (x.dtype,))
        check_shape("residual", residual, tuple(x.shape))
        check_last_dim_contiguous("residual", residual)
    check_last_dim_contiguous("x", x)
    check_last_dim_contiguous("weight", weight)
    check_same_device(tensors)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    size_pad = triton.next_power_of_2(x.shape[-1])
    both = x if residual is None else residual
    if x.numel():
        with device_guard(x):
            _rms_norm_kernel[(x.shape[0] * num_heads,)](
                out, x, weight, residual, eps, x.stride(0), x.stride(-2), both.stride(0),
                both.stride(-2), num_heads, x.shape[-1], size_pad,
                num_warps=max(1, min(8, size_pad // 512)),
            )  # fmt: skip
    return out


@triton.jit
def _rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    eps: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    residual_token: tl.tensor,
    residual_head: tl.tensor,
    num_heads: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    dims = tl.arange(0, SIZE_PAD)
    real = dims < SIZE
    values = tl.load(x + token * x_token + head * x_head + dims, mask=real, other=0.0)
    values = values.to(tl.float32)
    if residual is not None:
        pointers = residual + token * residual_token + head * residual_head + dims
        values += tl.load(pointers, mask=real, other=0.0).to(tl.float32)
        total = values.to(residual.dtype.element_ty)
        tl.store(pointers, total, mask=real)
        values = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    scaled = values * scale * tl.load(weight + dims, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + dims, scaled.to(out.dtype.element_ty), mask=real)


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate q and k in place by their positions.

    (Su et al., "RoFormer", 2021; halves paired as GPT-NeoX does.)

    With r = table.shape[1] / 2, dimension i < r is paired with i + r:
    (a, b) → (a cos - b sin, b cos + a sin), cos = table[p, i], sin = table[p, r + i].
    Dimensions from 2 r on stay as they are.

    Grid: tokens; a program owns all heads of one token, of q and of k.

    Args:
        q: `[num_tokens, num_heads, head_size]`.
        k: `[num_tokens, num_kv_heads, head_size]` in q's dtype.
        positions: `[num_tokens]`, integer, below max_position.
        table: `[max_position, 2 r]` float32, the cosines of a position, then its sines.

    Raises:
        TypeError: dtypes that differ or that the kernel does not know.
        ValueError: shapes or devices that do not fit.
    """
    check_rope(q, k, positions, table)
    half = table.shape[1] // 2
    pads = [triton.next_power_of_2(size) for size in (q.shape[1], k.shape[1], half)]
    if q.shape[0]:
        with device_guard(q):
            _rope_kernel[(q.shape[0],)](
                q, k, positions, table, *q.stride()[:2], *k.stride()[:2], table.stride(0),
                q.shape[1], k.shape[1], half, *pads,
            )  # fmt: skip


def check_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> None:
    """Refuse arguments of `rope` that do not fit, with a sentence.

    Raises:
        TypeError: dtypes that differ or that the kernel does not know.
        ValueError: shapes or devices that do not fit.
    """
    check_float("q", q)
    check_shape("q", q, ("num_tokens", "num_heads", "head_size"))
    check_dtype("k", k, (q.dtype,))
    check_shape("k", k, (q.shape[0], "num_kv_heads", q.shape[2]))
    check_index("positions", positions, (q.shape[0],))
    check_dtype("table", table, (torch.float32,))
    check_shape("table", table, ("max_position", "2 r"))
    if table.shape[1] % 2 or not 0 < table.shape[1] <= q.shape[2]:
        raise ValueError(
            f"table has {table.shape[1]} columns: it must be an even number, "
            f"at most the head size {q.shape[2]}"
        )
    for name, tensor in (("q", q), ("k", k), ("table", table)):
        check_last_dim_contiguous(name, tensor)
    check_same_device({"q": q, "k": k, "positions": positions, "table": table})


@triton.jit
def rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    stride: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Return (pointers of the first halves, which are real, first halves, second ones, rotated)."""
    heads, dims = tl.arange(0, HEADS), tl.arange(0, HALF)
    real = (heads < num_heads)[:, None] & (dims < half)[None, :]
    first = x + heads[:, None] * stride + dims[None, :]
    a = tl.load(first, mask=real, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=real, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    turned = (a * cos[None, :] - b * sin[None, :]).to(dtype)
    return first, real, turned, (b * cos[None, :] + a * sin[None, :]).to(dtype)


@triton.jit
def rotate_in_place(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    stride: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Rotate the heads of one token where they lie."""
    first, real, a, b = rotate(x, cos, sin, stride, num_heads, half, HEADS, HALF)
    tl.store(first, a, mask=real)
    tl.store(first + half, b, mask=real)


@triton.jit
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    table_row: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    HALF: tl.constexpr,
    Q_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF_PAD)
    angles = table + tl.load(positions + token).to(tl.int64) * table_row + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0)
    rotate_in_place(q + token * q_token, cos, sin, q_head, num_heads, HALF, Q_PAD, HALF_PAD)
    rotate_in_place(k + token * k_token, cos, sin, k_head, num_kv_heads, HALF, K_PAD, HALF_PAD)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up of x = [gate, up], silu(g) = g / (1 + e^-g).

    (Shazeer, "GLU Variants Improve Transformer", 2020.)

    Grid: tokens × blocks of 1024; a program owns one block of one token's output.

    Args:
        x: `[num_tokens, 2 · size]`.

    Returns:
        `[num_tokens, size]` in x's dtype.

    Raises:
        TypeError: a dtype that the kernel does not know.
        ValueError: an odd number of columns, or strided ones.
    """
    check_float("x", x)
    check_shape("x", x, ("num_tokens", "2 size"))
    if x.shape[1] % 2:
        raise ValueError(f"x has {x.shape[1]} columns: it must be an even number")
    check_last_dim_contiguous("x", x)
    check_same_device({"x": x})
    size = x.shape[1] // 2
    out = torch.empty(x.shape[0], size, dtype=x.dtype, device=x.device)
    if out.numel():
        with device_guard(x):
            _silu_mul_kernel[(x.shape[0], triton.cdiv(size, SILU_BLOCK))](
                out, x, x.stride(0), size, SILU_BLOCK
            )
    return out


@triton.jit
def _silu_mul_kernel(
    out: tl.tensor, x: tl.tensor, x_token: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = dims < size
    gate = tl.load(x + token * x_token + dims, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_token + size + dims, mask=real, other=0.0).to(tl.float32)
    # The exponent of -|gate| cannot overflow.
    power = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0.0, 1.0, power) / (1.0 + power)
    tl.store(out + token * size + dims, (gate * sigmoid * up).to(out.dtype.element_ty), mask=real)
