"""What requests hold: their block tables, and how far these are committed to the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from simserve.errors import SimserveError
from simserve.kv.block_pool import BlockPool
from simserve.kv.free_queue import Blocks
from simserve.kv.groups import Group, SlidingWindow
from simserve.kv.identity import Chain, IdentityTrie, Stretch
from simserve.types import Request

__all__ = ["FEW_BLOCKS", "Held", "HeldBlocks", "as_blocks"]

FEW_BLOCKS = 8
"""So many are dealt with one by one; more are quicker as an array."""


def as_blocks(table: array[int]) -> Blocks:
    """A view of a block table that is not empty. No block can be appended while it exists."""
    return np.frombuffer(table, dtype=np.int64)


class Held:
    """What a request holds: its block table per group, and how far it is committed to the cache."""

    __slots__ = ("ahead", "chain", "committed", "request", "tables", "waiting")

    def __init__(self, request: Request, num_groups: int) -> None:
        self.request = request
        self.tables = [array("q") for _ in range(num_groups)]
        self.committed = [0] * num_groups
        self.chain: Chain | None = None
        self.waiting: list[Stretch] = []
        """Where blocks it completes are not committed at once."""
        self.ahead = 0
        """Of the tokens it has computed then, the last ones that were not known when scheduled."""


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

    def get_block_ids(self, request: Request) -> tuple[Sequence[int], ...]:
        """The block table of a request, per KV group: copies."""
        return tuple([table[:] for table in self.held_by(request).tables])

    def free(self, request: Request) -> None:
        """Give back a request's blocks, last first. The cache keys stay. Idempotent."""
        held = self._held.get(request.request_id)
        if held is None:
            return
        for g, table in enumerate(held.tables):
            if table:
                blocks = as_blocks(table)[::-1]
                self.pool.free(blocks[blocks > 0] if self._windows else blocks)
                held.tables[g] = array("q")
            held.committed[g] = 0
        request.slots_until = 0

    def forget(self, request: Request) -> None:
        """Free what a finished request holds and drop all that is known of it."""
        self.free(request)
        held = self._held.pop(request.request_id, None)
        if held is not None and held.chain is not None:
            self._trie.release(held.chain)

    def held_by(self, request: Request) -> Held:
        """What a request holds; nothing yet, if it is new."""
        held = self._held.get(request.request_id)
        if held is None:
            held = self._held[request.request_id] = Held(request, self.num_groups)
        return held

    def note_slots(self, held: Held) -> None:
        """Until when its request needs neither a block nor a commit."""
        if not self._windows:
            until = self.block_size * len(held.tables[0])
            if self.enable_prefix_caching:
                until = min(until, self.block_size * (held.committed[0] + 1) - 1)
            held.request.slots_until = until

    def chain(self, held: Held) -> Chain:
        """The identities of its request's blocks; made when first asked for."""
        if held.chain is None:
            held.chain = self._trie.chain(held.request.trace)
        return held.chain

    # -- the prefix cache ------------------------------------------------------------------------

    def commit_later(self, held: Held) -> bool:
        """Let the blocks that a decode completes wait until somebody could see them in the cache.

        False if another one's blocks under the same identities wait already: which of them is
        older would be lost.
        """
        chain = self.chain(held)
        pieces = chain.between(held.committed[0], chain.num_blocks)
        stretches = [stretch for stretch, _, _ in pieces if stretch.committer is None]
        if len(stretches) < len(pieces):
            return False
        for stretch in stretches:
            stretch.committer = held
        held.waiting = stretches
        held.ahead = held.request.num_output_placeholders
        return True

    def commit_now(self, held: Held) -> None:
        """Commit what a decode has completed so far."""
        full_blocks = (held.request.num_computed_tokens - held.ahead) // self.block_size
        if held.waiting and full_blocks > held.committed[0]:
            self._commit(held, full_blocks)

    def commit_no_later(self, held: Held) -> None:
        """Commit what a decode has completed; from now on its blocks do not wait."""
        self.commit_now(held)
        for stretch in held.waiting:
            stretch.committer = None
        held.waiting = []

    def uncommit(self, request: Request, num_computed_tokens: int) -> None:
        """Take its blocks beyond the first `num_computed_tokens` tokens out of the prefix cache."""
        held = self.held_by(request)
        full_blocks = num_computed_tokens // self.block_size
        for g, table in enumerate(held.tables):
            if held.committed[g] > full_blocks:
                self.pool.drop_keys(as_blocks(table)[full_blocks : held.committed[g]])
                held.committed[g] = full_blocks

    def _commit(self, held: Held, full_blocks: int) -> None:
        chain = self.chain(held)
        for g, table in enumerate(held.tables):
            start = held.committed[g]
            if full_blocks <= start:
                continue
            held.committed[g] = full_blocks
            if table[start] == 0:
                raise SimserveError(
                    f"request {held.request.request_id}: block {start} fell out of the sliding "
                    "window before it was complete; the window is shorter than the accepted drafts"
                )
            done = start
            for stretch, first, end in chain.between(start, full_blocks):
                if stretch.committer is not None and stretch.committer is not held:
                    self.commit_now(stretch.committer)
                stop = done + end - first
                if end - first <= FEW_BLOCKS:
                    self.pool.commit_few(stretch, first, g, table[done:stop])
                else:
                    self.pool.commit(stretch, first, g, as_blocks(table)[done:stop])
                done = stop
