"""The paged KV cache manager: block tables, allocation and prefix cache as in vLLM v0.11.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from simserve.kv.free_queue import Blocks, FreeQueue
from simserve.kv.groups import FullAttention, Group, SlidingWindow, find_hit
from simserve.kv.held import Held, HeldBlocks
from simserve.kv.identity import Chain
from simserve.protocols import BlockStats, Grown, PrefixHit
from simserve.types import Request

__all__ = ["PagedKVCacheManager"]


class PagedKVCacheManager(HeldBlocks):
    """Hands out blocks of `block_size` tokens on demand and finds cached prefixes.

    Args:
        num_gpu_blocks: size of the pool, block 0 (the null block) included.
        block_size: tokens per block, the same in every group.
        max_model_len: no request is given slots beyond this many tokens.
        enable_prefix_caching: whether blocks get identities and are found again.
        groups: KV groups; one full-attention group by default.
        drop_last_hit: recompute the last hit block (eagle-style drafters).
        free_queue: the eviction order.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[Group] = (FullAttention(),),
        drop_last_hit: bool = False,
        free_queue: Any = FreeQueue,
    ) -> None:
        super().__init__(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            groups=groups,
            free_queue=free_queue,
        )
        self._max_model_len = max_model_len
        self._drop_last_hit = drop_last_hit
        nothing = np.zeros(0, dtype=np.int32)
        self._no_hit = PrefixHit((nothing,) * self.num_groups, 0)

    # -- what there is ---------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, evictable cached ones included."""
        return len(self.pool.free_queue)

    @property
    def stats(self) -> BlockStats:
        """Counters since the start."""
        return BlockStats(self.pool.evicted_cached_blocks, self.pool.num_cached_keys)

    def can_hold(self, num_tokens: int, num_chunk_tokens: int) -> bool:
        """Whether an otherwise empty pool could hold a request that computes so many tokens.

        `num_chunk_tokens` is the most it computes in one step: beside its window, a sliding-window
        group holds all of those.
        """
        size = self.block_size
        blocks = -(-num_tokens // size)
        needed = sum(
            min(blocks, -(-(group.window - 1 + num_chunk_tokens) // size) + 1)
            if isinstance(group, SlidingWindow)
            else blocks
            for group in self.groups
        )
        return needed <= self.num_gpu_blocks - 1

    def get_num_common_prefix_blocks(self, request: Request, num_running: int) -> tuple[int, ...]:
        """Leading blocks of `request` that `num_running` requests use, per KV group."""
        if not self.enable_prefix_caching:
            return (0,) * len(self.groups)
        counts = self.pool.ref_counts
        common = []
        for group, table in zip(self.groups, self._held_by(request).tables, strict=True):
            shared = 0
            if isinstance(group, FullAttention) and table and counts[table[0]] == num_running:
                same = counts[table] == num_running
                shared = len(table) if same.all() else int(same.argmin())
            common.append(shared)
        return tuple(common)

    # -- the prefix cache ------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit | None:
        """Longest usable cached prefix; None if the cache is not asked. Touches nothing.

        At least one token is left to compute, so a fully cached prompt loses its last block.
        """
        if not self.enable_prefix_caching or request.trace.prompt_logprobs:
            return None
        chain = self._chain(request)
        if not (chain.spans and len(chain.spans[0].stretch.cached[0])):
            return self._no_hit
        hit = find_hit(
            chain,
            self.groups,
            request.num_tokens - 1,
            self.block_size,
            self._drop_last_hit,
        )
        return PrefixHit(tuple(hit), len(hit[0]) * self.block_size)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Commit the full blocks of the first `num_computed_tokens` tokens to the prefix cache."""
        if self.enable_prefix_caching:
            held = self._held_by(request)
            self._commit(request, held, num_computed_tokens // self.block_size)

    def reset_prefix_cache(self) -> bool:
        """Drop all cache keys if no block is in use; whether it did. The queue's order stays."""
        if self.num_free_blocks != self.num_gpu_blocks - 1:
            return False
        self.pool.drop_all_keys()
        return True

    # -- allocation ------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        num_lookahead_tokens: int = 0,
    ) -> tuple[Sequence[int], ...] | None:
        """Make room for tokens. New blocks per group, () if none were needed, None if it failed.

        On failure nothing has changed, but for blocks that fell out of a sliding window.
        A block enters the prefix cache here, before its KV is computed, once all its tokens are
        known; drafts never do.
        """
        held = self._held_by(request)
        size = self.block_size
        computed = request.num_computed_tokens
        for g, window in self._windows:
            self._drop_out_of_window(held.tables[g], window.last_useful_block(computed, size))
        end = computed + num_new_tokens + (hit.num_tokens if hit else 0)
        slots = min(end + num_lookahead_tokens, self._max_model_len)
        new_blocks: tuple[Sequence[int], ...] = ()
        if hit or slots > size * len(held.tables[0]):
            allocated = self._allocate(held, -(-slots // size), hit)
            if allocated is None:
                return None
            new_blocks = allocated
        if self.enable_prefix_caching:
            full_blocks = min(end, request.num_tokens) // size
            if full_blocks > held.committed[0]:
                self._commit(request, held, full_blocks)
        self._note_slots(request, held)
        return new_blocks

    # -- decodes --------------------------------------------------------------------

    def append_slots(self, requests: Sequence[Request]) -> Mapping[str, tuple[Sequence[int], ...]]:
        """`allocate_slots` for one known token of each request; a block for each must be free.

        Returns the new blocks of those that needed some.
        """
        new_blocks: dict[str, tuple[Sequence[int], ...]] = {}
        if not self._single:
            for request in requests:
                if added := self.allocate_slots(request, 1):
                    new_blocks[request.request_id] = added
            return new_blocks
        size, caching = self.block_size, self.enable_prefix_caching
        allocate_one, held_by_id = self.pool.allocate_one, self._held
        for request in requests:
            held = held_by_id[request.request_id]
            table = held.tables[0]
            capacity, end = size * len(table), request.num_computed_tokens + 1
            if end > capacity:
                block = allocate_one()
                table.append(block)
                new_blocks[request.request_id] = ([block],)
                capacity += size
            if caching:
                if end // size > held.committed[0]:
                    self._commit_next(request, held)
                request.slots_until = min(capacity, size * (held.committed[0] + 1) - 1)
            else:
                request.slots_until = capacity
        return new_blocks

    def steps_that_fit(
        self, requests: Sequence[Request], limit: int, head: Request | None = None
    ) -> int:
        """For how many further steps of one token each the free blocks last (at most `limit`).

        `head` is a waiting request that found too few blocks: nor may its prefix hit change.
        """
        if not self._single:
            return 0
        size = self.block_size
        free: int | None = self.num_free_blocks
        if head is not None:
            free = self._blocks_until_hit_changes(head, requests)
        if free is None:
            return 0
        if len(requests) * (limit // size + 1) <= free:
            return limit
        computed = np.array([r.num_computed_tokens for r in requests])
        has = np.array([len(self._held[r.request_id].tables[0]) for r in requests])
        low, high = 0, limit
        while low < high:
            steps = (low + high + 1) // 2
            if int((-(-(computed + steps) // size) - has).clip(0).sum()) <= free:
                low = steps
            else:
                high = steps - 1
        return low

    def grow(self, requests: Sequence[Request], count: int) -> Grown:
        """Allocate `count` further single-token steps of all requests, in single-step order.

        Reads `num_computed_tokens` as it was before these steps, and does not change it.
        Returns what each of the steps took, arrays of shape [count].
        """
        size = self.block_size
        wants: list[tuple[int, int, list[int]]] = []
        touched = [r for r in requests if r.num_computed_tokens + count > r.slots_until]
        for position, request in enumerate(touched):
            table = self._held[request.request_id].tables[0]
            first = len(table) * size - request.num_computed_tokens
            if first < count:
                wants.extend((step, position, table) for step in range(first, count, size))
        steps = np.zeros(0, dtype=np.int64)
        was_cached = np.zeros(0, dtype=bool)
        if wants:
            wants.sort()  # by step and position; no two share both
            blocks, was_cached = self.pool.allocate_telling(len(wants))
            for (_, _, table), block in zip(wants, blocks.tolist(), strict=True):
                table.append(block)
            steps = np.array([step for step, _, _ in wants], dtype=np.int64)
        if self.enable_prefix_caching:
            self._commit_in_order(touched, count)
        for request in touched:
            self._note_slots(request, self._held[request.request_id])
        return Grown(
            np.bincount(steps, minlength=count),
            np.bincount(steps[was_cached], minlength=count),
        )

    def _commit_in_order(self, requests: Sequence[Request], count: int) -> None:
        """Commit what `count` further steps complete, block by block as single steps would."""
        size = self.block_size
        completed: list[tuple[int, int, Request, Held]] = []
        for position, request in enumerate(requests):
            held = self._held[request.request_id]
            computed = request.num_computed_tokens
            first = (held.committed[0] + 1) * size - computed
            steps = range(first, count + 1, size)
            completed.extend((step, position, request, held) for step in steps)
        completed.sort(key=itemgetter(0, 1))
        for _, _, request, held in completed:
            self._commit_next(request, held)

    def _blocks_until_hit_changes(self, head: Request, running: Sequence[Request]) -> int | None:
        """So many blocks can be handed out to decodes before a blocked request's hit shrinks.

        It shrinks when one of its blocks is evicted. None if it may grow meanwhile: a running
        request goes on to commit the first block that it lacks.
        """
        hit = self.get_computed_blocks(head)
        if hit is None:
            return self.num_free_blocks
        chain = self._chain(head)
        (blocks,) = hit.blocks
        is_whole = len(blocks) == min((head.num_tokens - 1) // self.block_size, chain.num_blocks)
        if not is_whole and any(self._may_commit(r, len(blocks), chain) for r in running):
            return None
        unused = blocks[self.pool.ref_counts[blocks] == 0]
        return self.pool.free_queue.num_before(unused) if len(unused) else self.num_free_blocks

    def _may_commit(self, request: Request, block: int, chain: Chain) -> bool:
        """Whether a request goes on to complete the block that `chain` has in this place."""
        held = self._held[request.request_id]
        own = held.chain
        return (
            own is not None
            and own.num_blocks > block >= held.committed[0]
            and own.at(block) == chain.at(block)
        )

    # -- inside ----------------------------------------------------------------------------------

    def _allocate(
        self, held: Held, num_blocks: int, hit: PrefixHit | None
    ) -> tuple[Sequence[int], ...] | None:
        """Bring all tables to `num_blocks` blocks, hits first; None if too few are free."""
        hits: list[Blocks] = []
        needed = 0
        for g, table in enumerate(held.tables):
            needed += num_blocks - len(table)
            if hit:
                blocks = hit.blocks[g]
                used = blocks[blocks > 0] if self._windows else blocks
                hits.append(used)
                # Hit blocks that nobody uses leave the free queue: they use up free blocks too.
                in_use = int(np.count_nonzero(self.pool.ref_counts[used]))
                needed += len(used) - in_use - len(blocks)
        if needed > self.num_free_blocks:
            return None
        if hit:
            for g, used in enumerate(hits):
                if len(used):
                    self.pool.touch(used)
                held.tables[g].extend(hit.blocks[g].tolist())
                held.committed[g] = len(hit.blocks[g])
        new_blocks = []
        for table in held.tables:
            count = num_blocks - len(table)
            blocks_of_group = self.pool.allocate(count).tolist() if count > 0 else []
            table.extend(blocks_of_group)
            new_blocks.append(blocks_of_group)
        return tuple(new_blocks)

    def _drop_out_of_window(self, table: list[int], last_useful_block: int) -> None:
        """Give back what lies before the window, from its edge down to what is gone already."""
        dropped = []
        for block in range(min(last_useful_block, len(table)) - 1, -1, -1):
            if table[block] == 0:
                break
            dropped.append(table[block])
            table[block] = 0
        if dropped:
            self.pool.free(np.array(dropped, dtype=np.int32))
