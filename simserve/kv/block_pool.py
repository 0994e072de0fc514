"""The block pool: reference counts, free blocks, and what is cached under which identity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simserve.kv.free_queue import Blocks, FreeQueue
from simserve.kv.identity import IdentityTrie, Stretch

__all__ = ["BlockPool"]

_INDEX_BITS = 32
_COMMITS_PER_SWEEP = 4096
"""At least so many blocks are committed between two sweeps."""
_BLOCKS_AT_ONCE = 1 << 16
"""A sweep looks at so many: what it computes on the way then stays small."""


class BlockPool:
    """Blocks 0 ... num_gpu_blocks - 1; block 0 is the null block, never handed out or freed.

    A cached block that nobody uses waits in the free queue with its key: "free" includes evictable.
    Blocks are not deduplicated: several may lie under one identity, a lookup finds the oldest.

    A block is cached under an identity as long as it has the key of it. An eviction takes the key
    away and nothing else, so that stretches go on to name blocks that are gone. `cached` leaves
    those out, and `sweep` drops stretches of which no block is left.
    """

    def __init__(
        self, num_gpu_blocks: int, trie: IdentityTrie, free_queue: FreeQueue, num_groups: int
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.free_queue = free_queue
        self.ref_counts = np.zeros(num_gpu_blocks, dtype=np.int32)
        self.num_shared = 0
        """Uses of blocks beyond the first one of each."""
        self.evicted_cached_blocks = 0
        self._trie = trie
        self._num_groups = num_groups
        self._num_committed = 0
        """Blocks committed since the last sweep."""
        self._commits_per_sweep = max(num_gpu_blocks, _COMMITS_PER_SWEEP)
        # The key of a block: (slot of its stretch * groups + group) << 32 | index. 0: no key.
        self._keys = np.zeros(num_gpu_blocks, dtype=np.int64)
        # The same memory: single entries are read and written faster so.
        self._key_of, self._refs_of = self._keys.data, self.ref_counts.data

    @property
    def num_free_blocks(self) -> int:
        """Blocks in the free queue."""
        return len(self.free_queue)

    @property
    def num_cached_keys(self) -> int:
        """Distinct (identity, group) pairs with at least one block."""
        keys = np.sort(self._keys)  # 0: no key
        return int(np.count_nonzero(keys[1:] != keys[:-1]))

    def allocate(self, count: int) -> Blocks:
        """Hand out `count` blocks from the queue's head; what was cached in them is evicted."""
        return self.allocate_telling(count)[0]

    def allocate_telling(self, count: int) -> tuple[Blocks, NDArray[np.int64]]:
        """As `allocate`, and the keys under which the blocks were cached, 0: none."""
        blocks = self.free_queue.popleft_n(count)
        keys = self._keys[blocks]
        if num_evicted := len(keys.nonzero()[0]):
            self.evicted_cached_blocks += num_evicted
            self._keys[blocks] = 0
        self.ref_counts[blocks] = 1
        return blocks, keys

    def allocate_few(self, count: int) -> list[int]:
        """As `allocate`, faster for a handful of blocks."""
        blocks = self.free_queue.popleft_few(count)
        key_of, refs_of = self._key_of, self._refs_of
        for block in blocks:
            if key_of[block]:
                self.evicted_cached_blocks += 1
                key_of[block] = 0
            refs_of[block] = 1
        return blocks

    def touch(self, blocks: Blocks) -> None:
        """Use cached blocks once more; those nobody used leave the free queue."""
        counts = self.ref_counts[blocks]
        self.ref_counts[blocks] = counts + 1
        unused = blocks[counts == 0]
        if len(unused):
            self.free_queue.remove_n(unused)
        self.num_shared += len(blocks) - len(unused)

    def free(self, blocks: Blocks) -> None:
        """Give up one use of each block, in the order given; unused ones join the queue's tail."""
        if self.num_shared:
            counts = self.ref_counts[blocks] - 1
            self.ref_counts[blocks] = counts
            unused = blocks[counts == 0]
            self.num_shared -= len(blocks) - len(unused)
        else:
            self.ref_counts[blocks] = 0
            unused = blocks
        if len(unused):
            self.free_queue.append_n(unused)

    def commit(self, stretch: Stretch, start: int, group: int, blocks: Blocks) -> None:
        """Put blocks under the identities (stretch, start), (stretch, start + 1), …"""
        count = len(blocks)
        named = stretch.room_for(group, start + count)[start : start + count]
        if len(named.nonzero()[0]):
            self._commit_beside(stretch, start, group, blocks.tolist())
        else:
            named[:] = blocks
        first = self._key(stretch, group, start)
        self._keys[blocks] = np.arange(first, first + count)
        self._count_commits(count)

    def commit_few(self, stretch: Stretch, start: int, group: int, blocks: Sequence[int]) -> None:
        """As `commit`, faster for a handful of blocks."""
        named = stretch.room_for(group, start + len(blocks))
        key = self._key(stretch, group, start)
        for index, block in enumerate(blocks, start):
            if named[index]:
                self._commit_beside(stretch, index, group, [block])
            else:
                named[index] = block
            self._key_of[block] = key
            key += 1
        self._count_commits(len(blocks))

    def _count_commits(self, count: int) -> None:
        self._num_committed += count
        if self._num_committed > self._commits_per_sweep:
            self.sweep()

    def cached(self, stretch: Stretch, group: int, start: int, stop: int) -> Blocks:
        """The oldest block under each of the identities `start` ... `stop - 1` of a stretch.

        0, or beyond the end: none.
        """
        named = stretch.cached[group][start:stop]
        first = self._key(stretch, group, start)
        gone = (self._keys[named] != np.arange(first, first + len(named))).nonzero()[0]
        if len(gone):
            if stretch.duplicates:
                for index in (start + gone[named[gone] > 0]).tolist():
                    self._name(stretch, group, index, self._left(stretch, group, index))
            else:
                named[gone] = 0
        return named

    def drop_keys(self, blocks: Blocks) -> None:
        """Forget what is cached in these blocks."""
        self._keys[blocks] = 0

    def drop_all_keys(self) -> None:
        """Forget everything that is cached."""
        self._keys[:] = 0
        self.sweep()

    def sweep(self) -> None:
        """Drop the stretches that no block has a key of, nor anything else holds."""
        self._num_committed = 0
        has_blocks = np.zeros(len(self._trie.stretches), dtype=np.bool_)
        for start in range(0, self.num_gpu_blocks, _BLOCKS_AT_ONCE):
            keys = self._keys[start : start + _BLOCKS_AT_ONCE]
            has_blocks[(keys >> _INDEX_BITS) // self._num_groups] = True
        self._trie.drop_unheld(has_blocks.tolist())

    def _key(self, stretch: Stretch, group: int, index: int) -> int:
        return (stretch.slot * self._num_groups + group) << _INDEX_BITS | index

    def _commit_beside(
        self, stretch: Stretch, start: int, group: int, blocks: Sequence[int]
    ) -> None:
        """Put blocks under identities some of which name others; these are the older ones."""
        for index, block in enumerate(blocks, start):
            self._name(stretch, group, index, [*self._left(stretch, group, index), block])

    def _left(self, stretch: Stretch, group: int, index: int) -> list[int]:
        """The blocks still cached under an identity, in order of insertion."""
        named = [stretch.cached[group].item(index)]
        if stretch.duplicates:
            named += stretch.duplicates.get((group, index), ())
        key = self._key(stretch, group, index)
        return [block for block in named if self._key_of[block] == key]

    @staticmethod
    def _name(stretch: Stretch, group: int, index: int, blocks: Sequence[int]) -> None:
        """Let an identity name these blocks and no others."""
        stretch.cached[group][index] = blocks[0] if blocks else 0
        if stretch.duplicates:
            stretch.duplicates.pop((group, index), None)
        if len(blocks) > 1:
            if stretch.duplicates is None:
                stretch.duplicates = {}
            stretch.duplicates[group, index] = list(blocks[1:])
