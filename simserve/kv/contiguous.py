"""The allocator that paging replaced: one contiguous region of max_model_len tokens a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from simserve.errors import CapacityError, ConfigError, Problem
from simserve.protocols import PrefixHit
from simserve.types import Request

__all__ = ["ContiguousKVCacheManager"]


class ContiguousKVCacheManager:
    """Reserves a whole region for a request when it is admitted, and hands out nothing afterwards.

    The region begins at the first place that is free (first fit). A block table lists its blocks,
    so that slots are computed as for pages; the region is max_model_len rounded up to blocks. All
    regions are equally long: free tokens that no request can use are those behind the last one.

    Args:
        num_gpu_blocks: size of the memory, block 0 (the null block) included.
        block_size: tokens per block.
        max_model_len: tokens of a region.
        enable_prefix_caching: must be False, regions share nothing.

    Raises:
        ConfigError: prefix caching is on.
        CapacityError: not even one region fits.
    """

    decodes = None

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool,
    ) -> None:
        if enable_prefix_caching:
            message = "contiguous regions share nothing: set it to false, or use allocator paged"
            raise ConfigError([Problem(path="kv_cache.enable_prefix_caching", message=message)])
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.enable_prefix_caching = False
        self.num_groups = 1
        self.region_blocks = -(-max_model_len // block_size)
        self.num_regions = (num_gpu_blocks - 1) // self.region_blocks
        if self.num_regions == 0:
            raise CapacityError(
                f"kv_cache.allocator: a contiguous region of {max_model_len} tokens takes "
                f"{self.region_blocks} blocks, and the pool has {num_gpu_blocks - 1} usable ones: "
                "lower scheduler.max_model_len, or enlarge the pool"
            )
        self._max_model_len = max_model_len
        self._free = list(range(self.num_regions))
        """A heap: the lowest region is handed out first."""
        self._held: dict[str, tuple[int, Request]] = {}
        """Region, and the request that has it, by request id."""

    # -- what there is ---------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the free regions."""
        return len(self._free) * self.region_blocks

    @property
    def evicted_cached_blocks(self) -> int:
        """0: nothing is cached."""
        return 0

    @property
    def reserved_unused_tokens(self) -> int:
        """Tokens that requests have reserved and do not use now (internal fragmentation)."""
        reserved = len(self._held) * self.region_blocks * self.block_size
        return reserved - sum(request.num_computed_tokens for _, request in self._held.values())

    @property
    def unusable_free_tokens(self) -> int:
        """Free tokens that no request can use: less than a region (external fragmentation)."""
        rest = self.num_gpu_blocks - 1 - self.num_regions * self.region_blocks
        return rest * self.block_size

    def gauges(self) -> Mapping[str, int]:
        """Both kinds of fragmentation (tokens), for the results."""
        return {
            "reserved_unused_tokens": self.reserved_unused_tokens,
            "unusable_free_tokens": self.unusable_free_tokens,
        }

    def get_block_ids(self, request: Request) -> tuple[Sequence[int], ...]:
        """The blocks of a request's region; empty if it has none."""
        held = self._held.get(request.request_id)
        return ([] if held is None else list(self._blocks(held[0])),)

    def can_hold(self, num_tokens: int, num_chunk_tokens: int) -> bool:
        """Whether a region is long enough."""
        return num_tokens <= self._max_model_len

    def can_hold_all(self, request: Request, hit: PrefixHit | None = None) -> bool:
        """Whether a region is free: it has room for every request."""
        return bool(self._free)

    def get_num_common_prefix_blocks(self, request: Request, num_running: int) -> tuple[int, ...]:
        """None: regions share nothing."""
        return (0,)

    # -- the prefix cache that there is not ------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit | None:
        """None: there is no cache to ask."""
        return None

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Nothing is cached."""

    def uncommit(self, request: Request, num_computed_tokens: int) -> None:
        """Nothing is cached."""

    def reset_prefix_cache(self) -> bool:
        """Whether no region is in use."""
        return not self._held

    # -- allocation ------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        num_lookahead_tokens: int = 0,
    ) -> tuple[Sequence[int], ...] | None:
        """A region for a request that has none, () for one that has; None if all are taken."""
        if request.request_id in self._held:
            return ()
        if not self._free:
            return None
        region = heappop(self._free)
        self._held[request.request_id] = region, request
        request.slots_until = self.region_blocks * self.block_size
        return self.get_block_ids(request)

    def free(self, request: Request) -> None:
        """Give back a request's region. Idempotent."""
        held = self._held.pop(request.request_id, None)
        if held is not None:
            heappush(self._free, held[0])
            request.slots_until = 0

    def forget(self, request: Request) -> None:
        """As `free`: nothing else is known of a request."""
        self.free(request)

    def _blocks(self, region: int) -> range:
        first = 1 + region * self.region_blocks
        return range(first, first + self.region_blocks)
