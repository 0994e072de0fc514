"""Read a tensor once and add it up: what the memory of a GPU gives at best.

Program p owns elements p · run … (p + 1) · run − 1, which it loads `tile` at a time and sums in
float32: sums[p] = Σ source[p · run + i]. The sums are there so that no load can be left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from simserve_kernels.checks import check_float, device_guard

__all__ = ["read_once"]


@triton.jit
def _read_kernel(source: tl.tensor, sums: tl.tensor, RUN: tl.constexpr, TILE: tl.constexpr) -> None:
    """Sum one run."""
    total = tl.zeros([TILE], tl.float32)
    first = source + tl.program_id(0).to(tl.int64) * RUN
    for start in range(0, RUN, TILE):
        total += tl.load(first + start + tl.arange(0, TILE)).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def read_once(source: torch.Tensor, *, run: int, tile: int, num_warps: int) -> torch.Tensor:
    """Return the sum of each run of `source`, `[num_elements / run]` float32.

    Args:
        source: contiguous, bfloat16, float16 or float32; a multiple of `run` elements.
        run: elements a program reads; a multiple of `tile`.
        tile: elements a load takes; a power of two.
        num_warps: of a program.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: sizes that do not divide, or a tensor that is not contiguous.
    """
    check_float("source", source)
    if source.numel() % run or run % tile or not source.is_contiguous():
        raise ValueError(
            f"source has {source.numel()} elements: it must be contiguous and a multiple of "
            f"run = {run}, and that one of tile = {tile}"
        )
    sums = torch.empty(source.numel() // run, dtype=torch.float32, device=source.device)
    with device_guard(source):
        _read_kernel[(len(sums),)](source, sums, RUN=run, TILE=tile, num_warps=num_warps)
    return sums
