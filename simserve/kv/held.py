"""What requests hold: their block tables, and how far these are committed to the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simserve.errors import SimserveError
from simserve.kv.block_pool import BlockPool
from simserve.kv.groups import Group, SlidingWindow
from simserve.kv.identity import Chain, IdentityTrie
from simserve.types import Request

__all__ = ["Held", "HeldBlocks"]


class Held:
    """What a request holds: its block table per group, and how far it is committed to the cache."""

    __slots__ = ("chain", "committed", "tables")

    def __init__(self, num_groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.committed = [0] * num_groups
        self.chain: Chain | None = None


class HeldBlocks:
    """Tables of all live requests over one pool. The manager decides what goes into them."""

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[Group],
        free_queue: Any,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = tuple(groups)
        self.num_groups = len(self.groups)
        self._trie = IdentityTrie(block_size, self.num_groups)
        self.pool = BlockPool(
            num_gpu_blocks, self._trie, free_queue(num_gpu_blocks), self.num_groups
        )
        self._held: dict[str, Held] = {}
        self._windows = [(g, w) for g, w in enumerate(self.groups) if isinstance(w, SlidingWindow)]
        self._single = self.num_groups == 1 and not self._windows

    def get_block_ids(self, request: Request) -> tuple[Sequence[int], ...]:
        """The block table of a request, per KV group."""
        return tuple(self._held_by(request).tables)

    def free(self, request: Request) -> None:
        """Give back a request's blocks, last first. The cache keys stay. Idempotent."""
        held = self._held.get(request.request_id)
        if held is None:
            return
        for g, table in enumerate(held.tables):
            if table:
                blocks = np.array(table[::-1], dtype=np.int32)
                self.pool.free(blocks[blocks > 0] if self._windows else blocks)
                held.tables[g] = []
            held.committed[g] = 0
        request.slots_until = 0

    def forget(self, request: Request) -> None:
        """Free what a finished request holds and drop all that is known of it."""
        self.free(request)
        held = self._held.pop(request.request_id, None)
        if held is not None and held.chain is not None:
            self._trie.release(held.chain)

    def _held_by(self, request: Request) -> Held:
        held = self._held.get(request.request_id)
        if held is None:
            held = self._held[request.request_id] = Held(len(self.groups))
        return held

    def _note_slots(self, request: Request, held: Held) -> None:
        """Until when this request needs neither a block nor a commit."""
        if not self._windows:
            until = self.block_size * len(held.tables[0])
            if self.enable_prefix_caching:
                until = min(until, self.block_size * (held.committed[0] + 1) - 1)
            request.slots_until = until

    def _chain(self, request: Request) -> Chain:
        held = self._held_by(request)
        if held.chain is None:
            held.chain = self._trie.chain(request.trace)
        return held.chain

    def _commit_next(self, request: Request, held: Held) -> None:
        """`_commit` one more block in a single group."""
        chain = held.chain or self._chain(request)
        block = held.committed[0]
        held.committed[0] = block + 1
        stretch, index = chain.at(block)
        self.pool.commit_one(stretch, index, 0, held.tables[0][block])

    def _commit(self, request: Request, held: Held, full_blocks: int) -> None:
        chain = held.chain or self._chain(request)
        for g, table in enumerate(held.tables):
            start = held.committed[g]
            if full_blocks <= start:
                continue
            held.committed[g] = full_blocks
            if table[start] == 0:
                raise SimserveError(
                    f"request {request.request_id}: block {start} fell out of the sliding window "
                    "before it was complete; the window is shorter than the accepted drafts"
                )
            done = start
            for stretch, first, end in chain.between(start, full_blocks):
                stop = done + end - first
                self.pool.commit(stretch, first, g, np.array(table[done:stop], dtype=np.int32))
                done = stop
