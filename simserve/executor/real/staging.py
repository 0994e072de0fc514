"""Pinned memory from which arrays are sent to the device without waiting for the copies."""

from __future__ import annotations

import torch

__all__ = ["Staging"]

_FIRST_SIZE = 1 << 16
_ALIGNED = 2
"""Elements of 16 bytes: Triton compiles a kernel anew for pointers that are not multiples of it."""


class Staging:
    """A piece of pinned memory that the copies of one step start from, one behind the other.

    Allocating pinned memory takes longer than most copies. What was sent must have arrived when
    `restart` is called, as it has when a step is over. Without a GPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.int64)
        self._used = 0

    def restart(self) -> None:
        """Begin a step."""
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """The next piece, int64 `[size]` on the host; to be filled, then sent.

        More memory is allocated if it is used up: what was sent keeps its own.
        """
        if not self._is_cuda:
            return torch.empty(size, dtype=torch.int64)
        end = self._used + size
        if end > len(self._memory):
            capacity = max(_FIRST_SIZE, 2 * len(self._memory), 2 * size)
            self._memory = torch.empty(capacity, dtype=torch.int64).pin_memory()
            self._used, end = 0, size
        piece: torch.Tensor = self._memory[self._used : end]
        self._used = -(-end // _ALIGNED) * _ALIGNED
        return piece

    def send(self, piece: torch.Tensor) -> torch.Tensor:
        """A copy on the device, on its way."""
        return piece.to(self.device, non_blocking=True)
