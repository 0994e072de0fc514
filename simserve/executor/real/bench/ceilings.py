"""What this GPU can do at best: reads of memory, and a large matrix product."""

from __future__ import annotations

import statistics
from functools import partial
from typing import NamedTuple

import torch

from simserve.executor.real.bench.timing import Timer
from simserve_kernels.read_once import read_once

__all__ = ["Ceilings", "measure_ceilings"]

_READ_BYTES = 8 << 30
_SHARE_OF_FREE_MEMORY = 0.4
_READERS = ((2048, 32_768, 4), (4096, 65_536, 4), (8192, 131_072, 8))
"""Elements a tile, elements a program, warps: which is fastest depends on the GPU."""
_MATMUL_SIZE = 8192


class Ceilings(NamedTuple):
    """Medians, and the samples that they are of (µs a call)."""

    read_gb_s: float
    """The fastest of some kernels that read a buffer, far larger than the caches, once."""
    matmul_tflop_s: float
    """bfloat16, 8192 × 8192 × 8192."""
    read_samples_us: list[float]
    matmul_samples_us: list[float]


def measure_ceilings(timer: Timer) -> Ceilings:
    """Measure both on the current GPU."""
    read_gb_s, read_samples = _read(timer)
    torch.cuda.empty_cache()
    n = _MATMUL_SIZE
    a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    samples = timer([lambda: torch.mm(a, b, out=out)] * 10)
    return Ceilings(
        read_gb_s=read_gb_s,
        matmul_tflop_s=2 * n**3 / statistics.median(samples) / 1e6,
        read_samples_us=read_samples,
        matmul_samples_us=samples,
    )


def _read(timer: Timer) -> tuple[float, list[float]]:
    free, _ = torch.cuda.mem_get_info()
    num_bytes = min(_READ_BYTES, int(free * _SHARE_OF_FREE_MEMORY))
    largest_run = max(run for _, run, _ in _READERS)
    num_elements = num_bytes // 2 // largest_run * largest_run
    source = torch.ones(num_elements, device="cuda", dtype=torch.bfloat16)
    found = []
    for tile, run, num_warps in _READERS:
        read = partial(read_once, source, run=run, tile=tile, num_warps=num_warps)
        samples = timer([read])
        found.append((source.nbytes / statistics.median(samples) / 1e3, samples))
    return max(found)
