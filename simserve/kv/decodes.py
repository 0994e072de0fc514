"""Blocks for requests that take one slot in every step: a calendar tells who needs one when.

Nothing here looks at a request that needs no block. Its finished blocks are committed to the prefix
cache when somebody could see them there (a lookup, another commit, its end), not one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from simserve.kv.held import Held, HeldBlocks
from simserve.kv.identity import Chain
from simserve.protocols import Grown, PrefixHit
from simserve.types import Request

__all__ = ["PagedDecodes"]


class _Member(NamedTuple):
    request_id: str
    table: array[int]
    held: Held
    day: int
    """In which of the `block_size` steps of a round it needs a block."""


class PagedDecodes:
    """Handles decodes over one full-attention group (protocol `Decodes`).

    Args:
        blocks: the tables and the pool.
        find_hit: the prefix that is cached for a request.
    """

    def __init__(self, blocks: HeldBlocks, find_hit: Callable[[Request], PrefixHit | None]) -> None:
        self._blocks = blocks
        self._find_hit = find_hit
        self._size = blocks.block_size
        self._members: dict[str, _Member] = {}
        self._calendar: list[list[_Member]] = [[] for _ in range(self._size)]
        self._today = 0

    # -- who takes part ----------------------------------------------------------------------

    def add(self, request: Request) -> bool:
        """Take in a request; False if another decode completes the same blocks."""
        blocks, request_id = self._blocks, request.request_id
        held = blocks.held_by(request)
        table = held.tables[0]
        until_block = self._size * len(table) - request.num_computed_tokens
        if not 0 <= until_block < self._size:
            return False
        if blocks.enable_prefix_caching and not blocks.commit_later(held):
            return False
        day = (self._today + until_block) % self._size
        member = self._members[request_id] = _Member(request_id, table, held, day)
        self._calendar[day].append(member)
        return True

    def remove(self, request: Request) -> None:
        """A request leaves: what it has completed is committed."""
        member = self._members.pop(request.request_id)
        self._calendar[member.day].remove(member)
        self._blocks.commit_no_later(member.held)
        self._blocks.note_slots(member.held)

    def commit(self) -> None:
        """Commit all that decodes have completed."""
        for member in self._members.values():
            self._blocks.commit_now(member.held)

    # -- steps -------------------------------------------------------------------------------

    def take_slots(self) -> dict[str, tuple[Sequence[int], ...]] | None:
        """A slot for each; the new blocks of those that needed one. None: too few were free."""
        needy = self._calendar[self._today]
        pool = self._blocks.pool
        if len(needy) > pool.num_free_blocks:
            return None
        self._today = (self._today + 1) % self._size
        new_blocks: dict[str, tuple[Sequence[int], ...]] = {}
        if needy:
            for member, block in zip(needy, pool.allocate_few(len(needy)), strict=True):
                member.table.append(block)
                new_blocks[member.request_id] = ([block],)
        return new_blocks

    def grow(self, count: int) -> Grown:
        """`take_slots` for `count` further steps, blocks handed out in the same order.

        Returns what each of the steps took, `count` numbers each.
        """
        rounds = self._calendar * (2 + count // self._size)
        days = rounds[self._today : self._today + count]
        self._today = (self._today + count) % self._size
        taken = list(map(len, days))
        needed, pool = sum(taken), self._blocks.pool
        if not needed:
            return Grown(taken, taken)
        before = pool.evicted_cached_blocks
        blocks, keys = pool.allocate_telling(needed)
        for member, block in zip(chain.from_iterable(days), blocks.tolist(), strict=True):
            member.table.append(block)
        num_evicted = pool.evicted_cached_blocks - before
        if num_evicted == needed:
            return Grown(taken, taken)
        if not num_evicted:
            return Grown(taken, [0] * count)
        steps = np.arange(count).repeat(taken)[keys > 0]
        return Grown(taken, np.bincount(steps, minlength=count).tolist())

    def steps_that_fit(self, limit: int, head: Request | None = None) -> int:
        """For how many further steps the free blocks last (at most `limit`).

        `head` is a waiting request that found too few blocks: nor may its prefix hit change.
        """
        free: int | None = self._blocks.pool.num_free_blocks
        if head is not None:
            free = self._blocks_until_hit_changes(head)
        if free is None:
            return 0
        size, each_round = self._size, len(self._members)
        if each_round * (limit // size + 1) <= free:
            return limit
        rounds, left = divmod(free, each_round)
        steps = rounds * size
        for day in range(self._today, self._today + size):
            left -= len(self._calendar[day % size])
            if left < 0 or steps >= limit:
                break
            steps += 1
        return min(steps, limit)

    # -- a blocked request at the head of the queue ------------------------------------------

    def _blocks_until_hit_changes(self, head: Request) -> int | None:
        """So many blocks can be handed out to decodes before a blocked request's hit shrinks.

        It shrinks when one of its blocks is evicted. None if it may grow meanwhile: a running
        request goes on to commit the first block that it lacks.
        """
        pool = self._blocks.pool
        hit = self._find_hit(head)
        if hit is None:
            return pool.num_free_blocks
        wanted = self._blocks.chain(self._blocks.held_by(head))
        (blocks,) = hit.blocks
        is_whole = len(blocks) == min((head.num_tokens - 1) // self._size, wanted.num_blocks)
        if not is_whole and self._may_be_committed(wanted, len(blocks)):
            return None
        unused = blocks[pool.ref_counts[blocks] == 0]
        return pool.free_queue.num_before(unused) if len(unused) else pool.num_free_blocks

    def _may_be_committed(self, wanted: Chain, block: int) -> bool:
        """Whether a request goes on to complete the block that `wanted` has in this place."""
        identity = wanted.at(block)
        held = identity[0].committer
        if held is None:
            return False
        own = self._blocks.chain(held)
        done = (held.request.num_computed_tokens - held.ahead) // self._size
        return own.num_blocks > block >= done and own.at(block) == identity
