"""The steps between a decoder's matrix products on Triton kernels."""

from __future__ import annotations

import torch

from simserve_kernels import norm_rope

__all__ = ["TritonOps"]


class TritonOps:
    """The kernels of `simserve_kernels.norm_rope`: float32, bfloat16 and float16 on a GPU."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops`."""
        return norm_rope.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Ops`."""
        return norm_rope.rms_norm(x, weight, eps, residual=residual)

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops`; in place."""
        norm_rope.rope(q, k, positions, table)
        return q, k

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        return norm_rope.silu_mul(x)
