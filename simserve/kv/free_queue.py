"""The free queue: blocks nobody uses, least recently used first.

A log of block ids with tombstones: appends go to the tail, a removed block leaves a 0 behind, and
the head skips zeros. So handing out, freeing and rescuing k blocks are array operations, and the
order is exactly that of a doubly linked list.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["Blocks", "FreeQueue"]

Blocks = NDArray[np.int64]
"""Block ids; 0 is the null block. 64 bits wide, as numpy indexes fastest by such."""


class FreeQueue:
    """LRU order: freed blocks go to the tail, blocks are handed out from the head."""

    def __init__(self, num_gpu_blocks: int) -> None:
        """Queue blocks 1 ... num_gpu_blocks - 1 in that order; block 0 is the null block."""
        # 32 bits: a pool may have millions of blocks, and these arrays are kept.
        self._log = np.zeros(2 * num_gpu_blocks + 64, dtype=np.int32)
        self._log[: num_gpu_blocks - 1] = np.arange(1, num_gpu_blocks)
        self._entries = self._log.data  # the same memory; single entries are read faster so
        self._position = np.arange(-1, num_gpu_blocks - 1, dtype=np.int32)
        self._head = 0
        self._tail = self._len = num_gpu_blocks - 1

    @property
    def _has_tombstones(self) -> bool:
        return self._tail - self._head != self._len

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        """Block ids from head (next to be handed out) to tail."""
        return iter(self.blocks.tolist())

    @property
    def blocks(self) -> Blocks:
        """The same as an array."""
        return self._live.astype(np.int64)

    @property
    def _live(self) -> NDArray[np.int32]:
        live = self._log[self._head : self._tail]
        return live[live > 0]

    def num_before(self, blocks: Blocks) -> int:
        """How many blocks stand before the first of `blocks`, which are all in the queue."""
        first = int(self._position[blocks].min())
        return int(np.count_nonzero(self._log[self._head : first]))

    def popleft_few(self, count: int) -> list[int]:
        """As `popleft_n`, faster for a handful of blocks."""
        head = self._head
        blocks = self._entries[head : head + count].tolist()
        if 0 in blocks:
            blocks = self.popleft_n(count).tolist()
        else:
            self._head = head + count
            self._len -= count
        return blocks

    def popleft_n(self, count: int) -> Blocks:
        """Take `count` blocks from the head; there must be so many."""
        head, width = self._head, count
        blocks = self._log[head : head + count]
        if self._has_tombstones and np.count_nonzero(blocks) < count:
            while len(live := blocks.nonzero()[0]) < count:
                width *= 2
                blocks = self._log[head : min(head + width, self._tail)]
            blocks = blocks[live[:count]]
            width = int(live[count - 1]) + 1
        self._head = head + width
        self._len -= count
        return blocks.astype(np.int64)

    def append_n(self, blocks: Blocks) -> None:
        """Add blocks at the tail, in the order given."""
        count = len(blocks)
        if self._tail + count > len(self._log):
            self._compact()
        tail = self._tail
        self._log[tail : tail + count] = blocks
        self._position[blocks] = np.arange(tail, tail + count, dtype=np.int32)
        self._tail = tail + count
        self._len += count

    def remove_n(self, blocks: Blocks) -> None:
        """Take out blocks wherever they stand (a cached block is used again)."""
        self._log[self._position[blocks]] = 0
        self._len -= len(blocks)

    def _compact(self) -> None:
        live = self._live
        self._log[: len(live)] = live
        self._position[live] = np.arange(len(live), dtype=np.int32)
        self._head, self._tail = 0, len(live)
