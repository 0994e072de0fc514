"""What memory there is: for KV blocks on the GPU beside the model, and for weights on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from simserve.errors import CapacityError

__all__ = ["MemoryUse", "blocks_that_fit", "free_host_bytes", "measure"]

GIB = 1024**3


class MemoryUse(NamedTuple):
    """A GPU's memory after a step of the largest size, in bytes."""

    total: int
    own_now: int
    """What this process holds: weights and buffers."""
    own_peak: int
    """The most it held during that step."""
    others: int
    """What is taken and not torch's: other processes, the CUDA context, compiled kernels."""

    @property
    def activations(self) -> int:
        """What the step took on top."""
        return self.own_peak - self.own_now


def measure(device: torch.device) -> MemoryUse:
    """Read the memory counters; the peak is that since torch's statistics were last reset."""
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return MemoryUse(total, torch.cuda.memory_allocated(device), peak, others)


def free_host_bytes() -> int | None:
    """What Linux can still give without swapping, its caches counted; None: elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(found.split()[1]) * 1024  # the file counts in KiB


def blocks_that_fit(use: MemoryUse, block_bytes: int, gpu_memory_utilization: float) -> int:
    """Blocks, the null block included, within this process's share and within what is free.

    The share is gpu_memory_utilization times the GPU's memory; weights, buffers and the step's
    peak come off it. Of what is free, the step's peak is left twice: graphs keep memory of their
    own for their steps.

    Raises:
        CapacityError: not even one usable block fits.
    """
    share = int(use.total * gpu_memory_utilization)
    within_share = share - use.own_peak
    free = use.total - use.others - use.own_now - 2 * use.activations
    num_blocks = min(within_share, free) // block_bytes
    if num_blocks < 2:
        raise CapacityError(
            f"no room for a KV cache on the GPU: this run's share is {share / GIB:.2f} GiB "
            f"({use.total / GIB:.2f} GiB times gpu_memory_utilization), weights and activations "
            f"take {use.own_peak / GIB:.2f} GiB of it, and others on the GPU hold "
            f"{use.others / GIB:.2f} GiB; end them, take a smaller model or "
            "max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    return num_blocks
