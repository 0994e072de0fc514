"""The block pool: reference counts, free blocks, and what is cached under which identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from simserve.kv.free_queue import Blocks, FreeQueue
from simserve.kv.identity import IdentityTrie, Stretch

__all__ = ["BlockPool"]

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_MANY = 4096
"""Evictions that may wait for `settle`."""


class BlockPool:
    """Blocks 0 ... num_gpu_blocks - 1; block 0 is the null block, never handed out or freed.

    A cached block that nobody uses waits in the free queue with its key: "free" includes evictable.
    Blocks are not deduplicated: several may lie under one identity, a lookup finds the oldest.
    """

    def __init__(
        self, num_gpu_blocks: int, trie: IdentityTrie, free_queue: FreeQueue, num_groups: int
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.free_queue = free_queue
        self.ref_counts = np.zeros(num_gpu_blocks, dtype=np.int64)
        self.num_shared = 0
        """Uses of blocks beyond the first one of each."""
        self.num_cached_keys = 0
        """Distinct (identity, group) pairs with at least one block."""
        self.evicted_cached_blocks = 0
        self._evicted: list[tuple[NDArray[np.int64], Blocks]] = []
        """Keys that blocks had before they were handed out, and the blocks; see `settle`."""
        self._evicted_singly: list[tuple[int, int]] = []
        """The same, of single blocks."""
        self._num_evicted = 0
        self._trie = trie
        self._num_groups = num_groups
        # The key of a block: (slot of its stretch * groups + group) << 32 | index. 0: no key.
        self._keys = np.zeros(num_gpu_blocks, dtype=np.int64)
        # The same memory: single entries are read and written faster so.
        self._key_of, self._refs_of = self._keys.data, self.ref_counts.data

    @property
    def num_free_blocks(self) -> int:
        """Blocks in the free queue."""
        return len(self.free_queue)

    def allocate(self, count: int) -> Blocks:
        """Hand out `count` blocks from the queue's head; what was cached in them is evicted."""
        return self.allocate_telling(count)[0]

    def allocate_telling(self, count: int) -> tuple[Blocks, NDArray[np.int64]]:
        """As `allocate`, and the keys under which the blocks were cached, 0: none."""
        blocks = self.free_queue.popleft_n(count)
        keys = self._keys[blocks]
        if num_evicted := int(np.count_nonzero(keys)):
            self.evicted_cached_blocks += num_evicted
            self._keys[blocks] = 0
            self._evicted.append((keys, blocks))
            self._num_evicted += count
            if self._num_evicted > _MANY:
                self.settle()
        self.ref_counts[blocks] = 1
        return blocks, keys

    def allocate_few(self, count: int) -> list[int]:
        """As `allocate`, faster for a handful of blocks."""
        blocks = []
        popleft, key_of, refs_of = self.free_queue.popleft, self._key_of, self._refs_of
        for _ in range(count):
            block = popleft()
            if key := key_of[block]:
                self.evicted_cached_blocks += 1
                self._evicted_singly.append((key, block))
                key_of[block] = 0
            refs_of[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Blocks) -> None:
        """Use cached blocks once more; those nobody used leave the free queue."""
        unused = blocks[self.ref_counts[blocks] == 0]
        if len(unused):
            self.free_queue.remove_n(unused)
        self.num_shared += len(blocks) - len(unused)
        self.ref_counts[blocks] += 1

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
        if start == 0 and not len(stretch.cached[group]):
            stretch.cached[group] = blocks.copy()
            self.num_cached_keys += count
        else:
            self.settle()
            cached = stretch.room_for(group, start + count)[start : start + count]
            if np.count_nonzero(cached):
                self._commit_beside(stretch, start, group, blocks.tolist())
            else:
                cached[:] = blocks
                self.num_cached_keys += count
        first = (stretch.slot * self._num_groups + group) << _INDEX_BITS | start
        self._keys[blocks] = np.arange(first, first + count)
        stretch.refs += count

    def drop_all_keys(self) -> None:
        """Forget everything that is cached."""
        blocks = self._keys.nonzero()[0]
        if len(blocks):
            self._evicted.append((self._keys[blocks], blocks))
            self._keys[blocks] = 0
        self.settle()

    def settle(self) -> None:
        """Take evicted blocks out of their stretches. Until then these name blocks that are gone.

        Nobody may look at a stretch before that; but most are never looked at again, so that many
        evictions are seen to at once.
        """
        if self._evicted_singly:
            singly = np.array(self._evicted_singly, dtype=np.int64)
            self._evicted.append((singly[:, 0], singly[:, 1]))
            self._evicted_singly.clear()
        if self._evicted:
            keys, blocks = map(np.concatenate, zip(*self._evicted, strict=True))
            self._evicted.clear()
            self._num_evicted = 0
            self._drop_keys(keys, blocks)

    def _commit_beside(
        self, stretch: Stretch, start: int, group: int, blocks: Sequence[int]
    ) -> None:
        cached = stretch.cached[group]
        for index, block in enumerate(blocks, start):
            if cached[index] == 0:
                cached[index] = block
                self.num_cached_keys += 1
            else:
                if stretch.duplicates is None:
                    stretch.duplicates = {}
                stretch.duplicates.setdefault((group, index), []).append(block)

    def _drop_keys(self, keys: NDArray[np.int64], blocks: Blocks) -> None:
        """Take out blocks that had these keys (0: none)."""
        for owner, start, stop in _same_owner(keys >> _INDEX_BITS):
            slot, group = divmod(owner, self._num_groups)
            stretch = self._trie.stretches[slot]
            assert stretch is not None
            count = stop - start
            indices = keys[start:stop] & _INDEX_MASK
            if stretch.duplicates:
                self._drop_beside(stretch, group, blocks[start:stop].tolist(), indices.tolist())
            else:
                if stretch.refs > count:  # else nothing else holds it, and it goes
                    stretch.cached[group][indices] = 0
                self.num_cached_keys -= count
            self._trie.unref(stretch, count)

    def _drop_beside(
        self, stretch: Stretch, group: int, blocks: Sequence[int], indices: Sequence[int]
    ) -> None:
        assert stretch.duplicates is not None
        cached = stretch.cached[group]
        for block, index in zip(blocks, indices, strict=True):
            others = stretch.duplicates.get((group, index))
            if cached[index] != block:
                assert others is not None
                others.remove(block)
            elif others:
                cached[index] = others.pop(0)
            else:
                cached[index] = 0
                self.num_cached_keys -= 1
            if others is not None and not others:
                del stretch.duplicates[group, index]


def _same_owner(owners: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """(owner, start, stop) of each run of equal owners; runs of none (0) are left out."""
    cuts = (owners[1:] != owners[:-1]).nonzero()[0].tolist()
    start = 0
    for cut in [*cuts, len(owners) - 1]:
        if owner := owners.item(start):
            yield owner, start, cut + 1
        start = cut + 1
