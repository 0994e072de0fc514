"""The block pool: reference counts, free blocks, and what is cached under which identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from simserve.kv.free_queue import Blocks, FreeQueue
from simserve.kv.identity import IdentityTrie, Stretch

__all__ = ["BlockPool"]


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
        self.ref_counts = np.zeros(num_gpu_blocks, dtype=np.int32)
        self.num_cached_keys = 0
        """Distinct (identity, group) pairs with at least one block."""
        self.evicted_cached_blocks = 0
        self._trie = trie
        self._num_groups = num_groups
        # The key of a block: slot of its stretch * groups + group, and its index there. 0: no key.
        self._owner = np.zeros(num_gpu_blocks, dtype=np.int64)
        self._index = np.zeros(num_gpu_blocks, dtype=np.int32)

    @property
    def num_free_blocks(self) -> int:
        """Blocks in the free queue."""
        return len(self.free_queue)

    def allocate(self, count: int) -> Blocks:
        """Hand out `count` blocks from the queue's head; what was cached in them is evicted."""
        return self.allocate_telling(count)[0]

    def allocate_telling(self, count: int) -> tuple[Blocks, NDArray[np.bool_]]:
        """As `allocate`, and in which of the blocks something was cached."""
        blocks = self.free_queue.popleft_n(count)
        owners = self._owner[blocks]
        if np.count_nonzero(owners):
            self.evicted_cached_blocks += self._drop_keys(owners, blocks)
        self.ref_counts[blocks] = 1
        return blocks, owners > 0

    def allocate_one(self) -> int:
        """Hand out the block at the head of the queue."""
        block = self.free_queue.popleft()
        if owner := self._owner.item(block):
            self._drop_key(owner, block)
            self.evicted_cached_blocks += 1
        self.ref_counts[block] = 1
        return block

    def touch(self, blocks: Blocks) -> None:
        """Use cached blocks once more; those nobody used leave the free queue."""
        unused = blocks[self.ref_counts[blocks] == 0]
        if len(unused):
            self.free_queue.remove_n(unused)
        self.ref_counts[blocks] += 1

    def free(self, blocks: Blocks) -> None:
        """Give up one use of each block, in the order given; unused ones join the queue's tail."""
        counts = self.ref_counts[blocks] - 1
        self.ref_counts[blocks] = counts
        unused = blocks[counts == 0]
        if len(unused):
            self.free_queue.append_n(unused)

    def commit(self, stretch: Stretch, start: int, group: int, blocks: Blocks) -> None:
        """Put blocks under the identities (stretch, start), (stretch, start + 1), …"""
        count = len(blocks)
        if start == 0 and not len(stretch.cached[group]):
            stretch.cached[group] = blocks.copy()
            self.num_cached_keys += count
        else:
            cached = stretch.room_for(group, start + count)[start : start + count]
            if np.count_nonzero(cached):
                self._commit_beside(stretch, start, group, blocks.tolist())
            else:
                cached[:] = blocks
                self.num_cached_keys += count
        self._owner[blocks] = stretch.slot * self._num_groups + group
        self._index[blocks] = np.arange(start, start + count)
        stretch.refs += count

    def commit_one(self, stretch: Stretch, index: int, group: int, block: int) -> None:
        """Put one block under the identity (stretch, index)."""
        cached = stretch.cached[group]
        if index >= len(cached):
            cached = stretch.room_for(group, index + 1)
        if cached.item(index):
            self._commit_beside(stretch, index, group, [block])
        else:
            cached[index] = block
            self.num_cached_keys += 1
        self._owner[block] = stretch.slot * self._num_groups + group
        self._index[block] = index
        stretch.refs += 1

    def drop_all_keys(self) -> None:
        """Forget everything that is cached."""
        blocks = np.flatnonzero(self._owner).astype(np.int32)
        if len(blocks):
            self._drop_keys(self._owner[blocks], blocks)

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

    def _drop_key(self, owner: int, block: int) -> None:
        """As `_drop_keys`, for one block that has a key."""
        slot, group = divmod(owner, self._num_groups)
        stretch = self._trie.stretches[slot]
        assert stretch is not None
        index = self._index.item(block)
        if stretch.duplicates:
            self._drop_beside(stretch, group, [block], [index])
        else:
            stretch.cached[group][index] = 0
            self.num_cached_keys -= 1
        self._owner[block] = 0
        self._trie.unref(stretch, 1)

    def _drop_keys(self, owners: NDArray[np.int64], blocks: Blocks) -> int:
        """Take the keys off `blocks`; how many had one."""
        dropped = 0
        for owner, members in _same_owner(owners, blocks):
            slot, group = divmod(owner, self._num_groups)
            stretch = self._trie.stretches[slot]
            assert stretch is not None
            if stretch.duplicates:
                indices = self._index[members].tolist()
                self._drop_beside(stretch, group, members.tolist(), indices)
            else:
                if stretch.refs > len(members):  # else nothing else holds it, and it goes
                    stretch.cached[group][self._index[members]] = 0
                self.num_cached_keys -= len(members)
            dropped += len(members)
            self._trie.unref(stretch, len(members))
        self._owner[blocks] = 0
        return dropped

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


def _same_owner(owners: NDArray[np.int64], blocks: Blocks) -> Iterator[tuple[int, Blocks]]:
    """Cut `blocks` where the owner changes; blocks without one are left out."""
    cuts = (owners[1:] != owners[:-1]).nonzero()[0].tolist()
    start = 0
    for cut in [*cuts, len(blocks) - 1]:
        if owner := owners.item(start):
            yield owner, blocks[start : cut + 1]
        start = cut + 1
