"""The paged KV cache manager: block tables, allocation and prefix cache as in vLLM v0.11.0."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from simserve.kv.decodes import PagedDecodes
from simserve.kv.free_queue import Blocks, FreeQueue
from simserve.kv.groups import FullAttention, Group, SlidingWindow, find_hit
from simserve.kv.held import FEW_BLOCKS, Held, HeldBlocks, as_blocks
from simserve.protocols import PrefixHit
from simserve.types import Request

__all__ = ["PagedKVCacheManager"]

_SHORT_PREFIX = 64
"""Common blocks are looked for among so many before all are looked at."""


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

    decodes: PagedDecodes | None = None

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
        nothing = np.zeros(0, dtype=np.int64)
        self._nothing_common = (0,) * self.num_groups
        self._no_hit = PrefixHit((nothing,) * self.num_groups, 0)
        if self.num_groups == 1 and not self._windows:
            self.decodes = PagedDecodes(self, self.get_computed_blocks)

    # -- what there is ---------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, evictable cached ones included."""
        return len(self.pool.free_queue)

    @property
    def evicted_cached_blocks(self) -> int:
        """Blocks with cached content that were handed out for other content, since the start."""
        return self.pool.evicted_cached_blocks

    @property
    def num_cached_keys(self) -> int:
        """Distinct (block identity, KV group) pairs in the prefix cache."""
        if self.decodes is not None:
            self.decodes.commit()
        return self.pool.num_cached_keys

    @property
    def num_shared_tokens(self) -> int:
        """Tokens in blocks of several requests: each block counts once for all but one of them. Of
        several KV groups, the mean."""
        return self.pool.num_shared * self.block_size // self.num_groups

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

    def can_hold_all(self, request: Request, hit: PrefixHit | None = None) -> bool:
        """Whether blocks for all tokens of a waiting request, after its `hit`, are free now."""
        slots = min(request.num_tokens, self._max_model_len)
        num_blocks = -(-slots // self.block_size)
        return self._num_needed(self.held_by(request), num_blocks, hit) <= self.num_free_blocks

    def get_num_common_prefix_blocks(self, request: Request, num_running: int) -> tuple[int, ...]:
        """Leading blocks of `request` that `num_running` requests use, per KV group."""
        if not self.enable_prefix_caching:
            return self._nothing_common
        if num_running > 1 and not self.pool.num_shared:
            return self._nothing_common
        counts, tables = self.pool.ref_counts, self.held_by(request).tables
        if all(not table or counts.item(table[0]) != num_running for table in tables):
            return self._nothing_common
        common = []
        for group, table in zip(self.groups, tables, strict=True):
            shared = 0
            if isinstance(group, FullAttention) and table and counts.item(table[0]) == num_running:
                shared = self._num_used_by(num_running, table)
            common.append(shared)
        return tuple(common)

    # -- the prefix cache ------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit | None:
        """Longest usable cached prefix; None if the cache is not asked. Touches nothing.

        At least one token is left to compute, so a fully cached prompt loses its last block.
        """
        if not self.enable_prefix_caching or request.trace.prompt_logprobs:
            return None
        chain = self.chain(self.held_by(request))
        for span in chain.spans:
            if span.stretch.committer is not None:
                self.commit_now(span.stretch.committer)
        if not (chain.spans and len(chain.spans[0].stretch.cached[0])):
            return self._no_hit
        hit = find_hit(
            self.pool.cached,
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
            self._commit(self.held_by(request), num_computed_tokens // self.block_size)

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
        held = self.held_by(request)
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
                self._commit(held, full_blocks)
        self.note_slots(held)
        return new_blocks

    # -- inside ----------------------------------------------------------------------------------

    def _num_used_by(self, num_requests: int, table: array[int]) -> int:
        """Leading blocks of a table that so many requests use."""
        for end in (_SHORT_PREFIX, len(table)):
            same = self.pool.ref_counts[as_blocks(table)[:end]] == num_requests
            first = int(same.argmin())
            if not same[first]:
                return first
        return len(table)

    def _allocate(
        self, held: Held, num_blocks: int, hit: PrefixHit | None
    ) -> tuple[Sequence[int], ...] | None:
        """Bring all tables to `num_blocks` blocks, hits first; None if too few are free."""
        if self._num_needed(held, num_blocks, hit) > self.num_free_blocks:
            return None
        if hit:
            for g, blocks in enumerate(hit.blocks):
                if len(used := self._without_null(blocks)):
                    self.pool.touch(used)
                held.tables[g].frombytes(blocks.tobytes())
                held.committed[g] = len(blocks)
        new_blocks = []
        for table in held.tables:
            count = max(0, num_blocks - len(table))
            taken: Sequence[int] = (
                self.pool.allocate_few(count)
                if count <= FEW_BLOCKS
                else array("q", self.pool.allocate(count).tobytes())
            )
            table.extend(taken)
            new_blocks.append(taken)
        return tuple(new_blocks)

    def _num_needed(self, held: Held, num_blocks: int, hit: PrefixHit | None) -> int:
        """Free blocks that it takes to bring all tables to `num_blocks` blocks, hits first."""
        needed = num_blocks * len(held.tables) - sum(map(len, held.tables))
        for blocks in hit.blocks if hit else ():
            used = self._without_null(blocks)
            # Hit blocks that nobody uses leave the free queue: they use up free blocks too.
            in_use = int(np.count_nonzero(self.pool.ref_counts[used]))
            needed += len(used) - in_use - len(blocks)
        return needed

    def _without_null(self, blocks: Blocks) -> Blocks:
        return blocks[blocks > 0] if self._windows else blocks

    def _drop_out_of_window(self, table: array[int], last_useful_block: int) -> None:
        """Give back what lies before the window, from its edge down to what is gone already."""
        dropped = []
        for block in range(min(last_useful_block, len(table)) - 1, -1, -1):
            if table[block] == 0:
                break
            dropped.append(table[block])
            table[block] = 0
        if dropped:
            self.pool.free(np.array(dropped, dtype=np.int64))
