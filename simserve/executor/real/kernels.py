"""The attention functions of a device: the Triton kernels, or their references in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from simserve_kernels import reference

__all__ = ["Kernels", "reference_kernels", "triton_kernels"]


class Kernels(NamedTuple):
    """Functions with the arguments of their namesakes in `simserve_kernels`."""

    rope_kv_write: Callable[..., None] | None
    """Rotates queries and keys on their way; None: that is done before, and `kv_write` writes."""
    kv_write: Callable[..., None]
    paged_decode: Callable[..., object]
    paged_prefill: Callable[..., object]


def triton_kernels() -> Kernels:
    """Return the kernels; tensors are on a CUDA GPU (or the CPU, under Triton's interpreter)."""
    from simserve_kernels.kv_write import kv_write
    from simserve_kernels.paged_decode import paged_decode
    from simserve_kernels.paged_prefill import paged_prefill
    from simserve_kernels.rope_write import rope_kv_write

    return Kernels(rope_kv_write, kv_write, paged_decode, paged_prefill)


def reference_kernels() -> Kernels:
    """Return the references: any device and float dtype, one sequence at a time, in float64."""
    return Kernels(None, reference.kv_write, _paged_decode, _paged_prefill)


def _paged_decode(
    *tensors: torch.Tensor, max_seq_len: int, path: str, out: torch.Tensor, **options: Any
) -> None:
    out.copy_(reference.paged_attention(*tensors, **options))


def _paged_prefill(
    *tensors: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor,
    **options: Any,
) -> None:
    *cache, query_start_loc = tensors
    attended = reference.paged_attention(*cache, query_start_loc=query_start_loc, **options)
    first, end = int(query_start_loc[0]), int(query_start_loc[-1])
    out[first:end] = attended[first:end]
