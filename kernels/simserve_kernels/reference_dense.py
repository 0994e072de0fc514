"""RMSNorm, rotary embedding and SiLU gate in plain torch and float64: what the kernels equal.

Contiguous attention is in `reference`.
"""

from __future__ import annotations

import torch

__all__ = ["rms_norm", "rope", "silu_mul"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension of any x, float64."""
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return x `[num_tokens, num_heads, head_size]` rotated by its positions, float64.

    `table` `[max_position, 2 r]` holds r cosines, then r sines; dimension i is paired with i + r.
    """
    x = x.double()
    half = table.shape[1] // 2
    cos, sin = table.double()[positions.long()][:, None, :].split(half, dim=-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up of x = [gate, up] along the last dimension, float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
