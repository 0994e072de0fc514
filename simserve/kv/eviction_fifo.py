"""First in, first out: another eviction order, by when a block was handed out last."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from simserve.kv.free_queue import Blocks

__all__ = ["FifoFreeQueue"]


class FifoFreeQueue:
    """Free blocks, the one that was handed out longest ago first.

    A cached block that is used again and freed goes back to its place: unlike in the LRU
    `FreeQueue`, use does not lengthen its life, and the head of a prefix goes before its tail.
    Blocks that were never handed out come before all others, in the order of their numbers.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        """Queue blocks 1 ... num_gpu_blocks - 1; block 0 is the null block."""
        self._age = np.arange(num_gpu_blocks, dtype=np.int64)
        """Number of the hand-out of each block; the smallest is the oldest."""
        self._next_age = num_gpu_blocks
        self._is_free = np.ones(num_gpu_blocks, dtype=bool)
        self._is_free[0] = False
        # A block that was taken out stays on the heap, so that it is not put there twice.
        self._heap = [(block, block) for block in range(1, num_gpu_blocks)]
        self._on_heap = self._is_free.copy()
        self._len = num_gpu_blocks - 1

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        """Block ids from head (next to be handed out) to tail."""
        free = np.flatnonzero(self._is_free)
        return iter(free[np.argsort(self._age[free])].tolist())

    def popleft_few(self, count: int) -> list[int]:
        """As `popleft_n`, for a handful of blocks."""
        blocks: list[int] = self.popleft_n(count).tolist()
        return blocks

    def popleft_n(self, count: int) -> Blocks:
        """Take `count` blocks from the head; there must be so many."""
        taken = np.empty(count, dtype=np.int64)
        found = 0
        while found < count:
            block = heappop(self._heap)[1]
            self._on_heap[block] = False
            if self._is_free[block]:
                taken[found] = block
                found += 1
        self._is_free[taken] = False
        self._age[taken] = np.arange(self._next_age, self._next_age + count)
        self._next_age += count
        self._len -= count
        return taken

    def num_before(self, blocks: Blocks) -> int:
        """How many blocks stand before the first of `blocks`, which are all in the queue."""
        return int(np.count_nonzero(self._is_free & (self._age < self._age[blocks].min())))

    def append_n(self, blocks: Blocks) -> None:
        """Put blocks back, each to its place."""
        self._is_free[blocks] = True
        for block in blocks[~self._on_heap[blocks]].tolist():
            heappush(self._heap, (int(self._age[block]), block))
        self._on_heap[blocks] = True
        self._len += len(blocks)

    def remove_n(self, blocks: Blocks) -> None:
        """Take out blocks wherever they stand (a cached block is used again)."""
        self._is_free[blocks] = False
        self._len -= len(blocks)
