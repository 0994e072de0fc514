"""Contiguous regions: first fit, no sharing, and what is wasted."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simserve.errors import CapacityError, ConfigError, PluginError
from simserve.kv.contiguous import ContiguousKVCacheManager
from simserve.registry import check_protocol, resolve
from simserve.types import Request, TraceRequest
from tests.sched.harness import request, simulate


def make(num_gpu_blocks: int, block_size: int, max_model_len: int) -> ContiguousKVCacheManager:
    return ContiguousKVCacheManager(
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )


def waiting(request_id: str, prompt_len: int, max_model_len: int) -> Request:
    prompt = ((request_id, prompt_len),)
    trace = TraceRequest(request_id=request_id, arrival_s=0.0, prompt=prompt, output_len=10**6)
    return Request(trace, max_model_len)


class RegionMachine(RuleBasedStateMachine):
    """Requests come, grow and go; `model` holds the first block of each region in use."""

    kv: ContiguousKVCacheManager

    @initialize(
        more_blocks=st.integers(0, 40), block_size=st.integers(1, 9), length=st.integers(1, 60)
    )
    def start(self, more_blocks: int, block_size: int, length: int) -> None:
        self.region = -(-length // block_size)
        self.length, self.size, self.usable = length, block_size, self.region + more_blocks
        self.kv = make(self.usable + 1, block_size, length)
        self.requests: list[Request] = []
        self.model: dict[str, int] = {}
        self.count = 0

    def first_fit(self) -> int | None:
        """The lowest block at which a whole region is free, found block by block."""
        taken = {b + i for b in self.model.values() for i in range(self.region)}
        for first in range(1, self.usable - self.region + 2):
            if taken.isdisjoint(range(first, first + self.region)):
                return first
        return None

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.count += 1
        new = waiting(f"r{self.count}", data.draw(st.integers(1, self.length)), self.length)
        tokens = data.draw(st.integers(1, new.num_tokens))
        assert self.kv.get_computed_blocks(new) is None
        blocks = self.kv.allocate_slots(new, tokens)
        first = self.first_fit()
        if first is None:
            assert blocks is None
            assert list(self.kv.get_block_ids(new)[0]) == []
            return
        assert blocks is not None
        assert list(blocks[0]) == list(range(first, first + self.region))
        new.num_computed_tokens = tokens
        self.model[new.request_id] = first
        self.requests.append(new)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        some = data.draw(st.sampled_from(self.requests))
        room = self.length - some.num_computed_tokens
        if room == 0:
            return
        count = data.draw(st.integers(1, room))
        assert self.kv.allocate_slots(some, count) == ()
        some.num_computed_tokens += count

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.requests))
        self.requests.remove(gone)
        del self.model[gone.request_id]
        self.kv.free(gone)
        self.kv.free(gone)

    @invariant()
    def every_token_is_used_reserved_free_or_unusable(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv = self.kv
        tables = [list(kv.get_block_ids(r)[0]) for r in self.requests]
        held = [block for table in tables for block in table]
        assert len(set(held)) == len(held)
        assert all(1 <= block <= self.usable for block in held)
        assert [table[0] for table in tables] == [self.model[r.request_id] for r in self.requests]
        used = sum(r.num_computed_tokens for r in self.requests)
        assert kv.reserved_unused_tokens >= 0
        assert kv.reserved_unused_tokens == len(held) * self.size - used
        assert kv.unusable_free_tokens < self.region * self.size
        assert (
            used
            + kv.reserved_unused_tokens
            + kv.num_free_blocks * self.size
            + kv.unusable_free_tokens
            == self.usable * self.size
        )
        assert kv.reset_prefix_cache() == (not held)


TestRegions = RegionMachine.TestCase
TestRegions.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_figures_by_hand() -> None:
    """100 usable blocks of 16 tokens, regions of 512: three regions of 32 blocks, 4 blocks left."""
    kv = make(101, 16, 512)
    assert (kv.num_free_blocks, kv.unusable_free_tokens) == (96, 64)
    first, second = waiting("a", 100, 512), waiting("b", 20, 512)
    for some in (first, second):
        kv.allocate_slots(some, some.num_tokens)
        some.num_computed_tokens = some.num_tokens
    assert list(kv.get_block_ids(second)[0])[:2] == [33, 34]
    assert kv.reserved_unused_tokens == 2 * 512 - 120
    kv.free(first)
    assert kv.reserved_unused_tokens == 512 - 20
    third = waiting("c", 1, 512)
    kv.allocate_slots(third, 1)
    assert list(kv.get_block_ids(third)[0]) == list(range(1, 33))


def test_can_hold_as_much_as_a_region() -> None:
    kv = make(101, 16, 500)
    assert kv.can_hold(500, 500)
    assert not kv.can_hold(501, 501)
    assert kv.get_num_common_prefix_blocks(waiting("a", 1, 500), 1) == (0,)
    assert kv.evicted_cached_blocks == 0


def test_a_pool_smaller_than_a_region_is_an_error() -> None:
    with pytest.raises(
        CapacityError, match=r"takes 4 blocks, and the pool has 3 usable ones: lower "
    ):
        make(4, 16, 64)


def test_prefix_caching_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache.enable_prefix_caching: contiguous regions share"
    ):
        ContiguousKVCacheManager(
            num_gpu_blocks=101, block_size=16, max_model_len=64, enable_prefix_caching=True
        )


def test_it_is_an_allocator() -> None:
    check_protocol(ContiguousKVCacheManager, "allocators")
    assert make(101, 16, 500).decodes is None, (
        "its gauges change in every step: none is passed over"
    )


@pytest.mark.parametrize("kind", ["vllm", "fcfs_static", "prefill_first", "sarathi", "sjf"])
def test_regions_bound_the_batch(kind: str) -> None:
    """19 usable blocks of 4 tokens hold two regions of 32, though all three prompts would fit."""
    run = simulate(kind, [request(name, 4, 4) for name in "abc"], kv=make(20, 4, 32))
    assert run.steps[0] == (["a", "b"], [4, 4])
    assert run.stops[0] == "blocks"
    assert run.steps[4] == (["c"], [4])
    assert run.status == "completed"
    assert not any(run.preempted)


def test_what_serves_as_an_eviction_order_is_a_class_with_all_of_a_queue() -> None:
    check_protocol(resolve("evictions", "lru"), "evictions")
    check_protocol(resolve("evictions", "fifo"), "evictions")
    with pytest.raises(PluginError, match="it lacks popleft_few, popleft_n"):
        check_protocol(list, "evictions")
    with pytest.raises(PluginError, match="'int' cannot serve among evictions: it is not a class"):
        check_protocol(3, "evictions")
