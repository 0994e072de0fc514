"""The steps between a decoder's matrix products: the seam, and its plain torch side."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

__all__ = ["Ops", "OpsKind", "TorchOps", "load_ops"]

OpsKind = Literal["torch", "triton"]


class Ops(Protocol):
    """Norm, rotary embedding and gate. All compute in float32 at least and round to x's dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, contiguous.

        x is `[num_tokens, size]` or `[num_tokens, num_heads, size]`.
        """

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """`residual += x` in place, then return the RMSNorm of that sum; both `[tokens, size]`."""

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k rotated by their positions; may be q and k themselves, changed in place.

        q and k are `[num_tokens, heads, head_dim]`; `table` is that of `rope_table`.
        """

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) · up of x = [gate, up], `[num_tokens, size]` of `[…, 2 size]`."""


class TorchOps:
    """Plain torch, on any device and in any float dtype: what the kernels are held against."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops`."""
        wide = _widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Ops`."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops`."""
        cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        gate, up = _widen(x).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def load_ops(kind: OpsKind) -> Ops:
    """Return the ops of that name; triton is imported only if they are the Triton kernels."""
    if kind == "torch":
        return TorchOps()
    from simserve.executor.real.ops_triton import TritonOps

    return TritonOps()


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = _widen(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
