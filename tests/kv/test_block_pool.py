"""The block pool against a list for the free queue and a dict of lists for the cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simserve.kv.block_pool import BlockPool
from simserve.kv.free_queue import FreeQueue
from simserve.kv.identity import Chain, IdentityTrie
from simserve.segments import Segments
from simserve.types import TraceRequest
from tests.kv.naive import BASES, Key, block_keys, trace_requests

NUM_GROUPS = 2


class Sequence:
    """A request's chain, and what is committed and held under it, per group."""

    def __init__(self, chain: Chain, keys: list[Key]) -> None:
        self.chain = chain
        self.keys = keys
        self.tables: list[list[int]] = [[] for _ in range(NUM_GROUPS)]
        self.committed = [0] * NUM_GROUPS


class PoolMachine(RuleBasedStateMachine):
    """Sequences take blocks, commit them, find each other's, and go."""

    pool: BlockPool

    @initialize(
        num_gpu_blocks=st.integers(2, 60),
        block_size=st.integers(1, 9),
        base=st.sampled_from(BASES),
        data=st.data(),
    )
    def start(
        self, num_gpu_blocks: int, block_size: int, base: Segments, data: st.DataObject
    ) -> None:
        self.base = base
        self.block_size = block_size
        self.trie = IdentityTrie(block_size, NUM_GROUPS)
        self.pool = BlockPool(num_gpu_blocks, self.trie, FreeQueue(num_gpu_blocks), NUM_GROUPS)
        self.sequences: list[Sequence] = []
        # The model.
        self.queue = list(range(1, num_gpu_blocks))
        self.uses: Counter[int] = Counter()
        self.cached: dict[tuple[Key, int], list[int]] = {}
        self.key_of: dict[int, tuple[Key, int]] = {}
        self.evicted = 0
        for _ in range(3):
            self.add(data.draw(trace_requests(base=base)))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.add(data.draw(trace_requests(base=self.base)))

    def add(self, trace: TraceRequest) -> None:
        keys = block_keys(trace, self.block_size)
        self.sequences.append(Sequence(self.trie.chain(trace), keys))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), group=st.integers(0, NUM_GROUPS - 1))
    def look_up_and_touch(self, data: st.DataObject, group: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.tables[group]:
            return
        found: list[int] = []
        for stretch, first, end in sequence.chain.between(0, sequence.chain.num_blocks):
            blocks = np.zeros(end - first, dtype=np.int64)
            view = self.pool.cached(stretch, group, first, end)
            blocks[: len(view)] = view
            found += blocks.tolist()
        oldest = [self.cached.get((key, group), [0])[0] for key in sequence.keys]
        assert found == oldest
        hit = found.index(0) if 0 in found else len(found)
        hit = data.draw(st.just(hit) | st.integers(0, hit))
        self.pool.touch(np.array(found[:hit], dtype=np.int64))
        for block in found[:hit]:
            if not self.uses[block]:
                self.queue.remove(block)
            self.uses[block] += 1
        sequence.tables[group] = found[:hit]
        sequence.committed[group] = hit

    @precondition(lambda self: self.sequences)
    @rule(
        data=st.data(),
        group=st.integers(0, NUM_GROUPS - 1),
        how=st.sampled_from(["at once", "telling", "few"]),
        commit=st.sampled_from([True, True, False]),
    )
    def allocate(self, data: st.DataObject, group: int, how: str, commit: bool) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        count = data.draw(st.integers(0, min(len(self.queue), 12)))
        expected, self.queue = self.queue[:count], self.queue[count:]
        if how == "few":
            blocks = self.pool.allocate_few(count)
        elif how == "telling":
            found, keys = self.pool.allocate_telling(count)
            blocks = found.tolist()
            assert (keys != 0).tolist() == [block in self.key_of for block in blocks]
        else:
            blocks = self.pool.allocate(count).tolist()
        assert blocks == expected
        for block in blocks:
            self.evicted += self.drop_key(block)
            assert self.uses[block] == 0
            self.uses[block] = 1
        sequence.tables[group] += blocks
        if commit:
            self.commit_some(data, sequence, group)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), group=st.integers(0, NUM_GROUPS - 1))
    def commit(self, data: st.DataObject, group: int) -> None:
        self.commit_some(data, data.draw(st.sampled_from(self.sequences)), group)

    def commit_some(self, data: st.DataObject, sequence: Sequence, group: int) -> None:
        start, table = sequence.committed[group], sequence.tables[group]
        most = max(start, min(len(table), len(sequence.keys)))
        stop = data.draw(st.just(most) | st.integers(start, most))
        at = start
        for stretch, first, end in sequence.chain.between(start, stop):
            blocks = table[at : at + end - first]
            assert sequence.chain.at(at) == (stretch, first)
            if data.draw(st.booleans()):
                self.pool.commit(stretch, first, group, np.array(blocks, dtype=np.int64))
            else:
                self.pool.commit_few(stretch, first, group, blocks)
            at += len(blocks)
        assert at == stop
        for index in range(start, stop):
            key = sequence.keys[index], group
            self.cached.setdefault(key, []).append(table[index])
            self.key_of[table[index]] = key
        sequence.committed[group] = stop

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        for table in sequence.tables:
            blocks = table[::-1]
            self.pool.free(np.array(blocks, dtype=np.int64))
            for block in blocks:
                self.uses[block] -= 1
                if not self.uses[block]:
                    self.queue.append(block)
        self.trie.release(sequence.chain)

    @precondition(lambda self: self.evicted > 3)
    @rule()
    def reset(self) -> None:
        if any(sequence.tables[g] for sequence in self.sequences for g in range(NUM_GROUPS)):
            return
        self.pool.drop_all_keys()
        self.cached, self.key_of = {}, {}

    @rule()
    def sweep(self) -> None:
        """Whenever it comes, nobody who looks sees it."""
        self.pool.sweep()
        assert self.pool.num_cached_keys == len(self.cached)

    def drop_key(self, block: int) -> bool:
        key = self.key_of.pop(block, None)
        if key is None:
            return False
        self.cached[key].remove(block)
        if not self.cached[key]:
            del self.cached[key]
        return True

    @invariant()
    def the_pool_is_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert list(pool.free_queue) == self.queue
        assert pool.num_free_blocks == len(self.queue)
        assert pool.ref_counts.tolist() == [self.uses[b] for b in range(pool.num_gpu_blocks)]
        in_use = {block for block, count in self.uses.items() if count}
        assert len(in_use) + len(self.queue) == pool.num_gpu_blocks - 1
        assert in_use.isdisjoint(self.queue)
        assert pool.evicted_cached_blocks == self.evicted

    def teardown(self) -> None:
        """Nothing is left in the trie once nobody needs it."""
        if hasattr(self, "pool"):
            for sequence in self.sequences:
                self.trie.release(sequence.chain)
            self.sweep()
            self.pool.drop_all_keys()
            assert self.pool.num_cached_keys == 0
            assert not any(self.trie.stretches)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=35, deadline=None)


def test_several_blocks_under_one_identity() -> None:
    """A lookup finds the oldest that is left; the key goes with the last of them."""
    trie = IdentityTrie(4, 1)
    pool = BlockPool(6, trie, FreeQueue(6), 1)
    trace: Any = TraceRequest(request_id="r", arrival_s=0.0, prompt=(("p", 4),), output_len=0)
    chain = trie.chain(trace)
    ((stretch, first, _),) = chain.between(0, 1)
    a, b, c, d = (pool.allocate(1) for _ in range(4))
    for blocks in (a, b, c, d):
        pool.commit(stretch, first, 0, blocks)
    assert pool.num_cached_keys == 1
    for blocks in (a, c, b, d):
        pool.free(blocks)
    found = []
    for _ in range(5):  # hands out 5, which was never cached, then a = 1, c = 3, b = 2 and d = 4
        pool.allocate(1)
        found.append(int(pool.cached(stretch, 0, 0, 1)[0]))
    assert found == [1, 2, 2, 4, 0]
    assert pool.num_cached_keys == 0
    assert pool.evicted_cached_blocks == 4


def test_a_block_that_comes_back_under_its_identity_is_the_youngest_there() -> None:
    """It was named first before it was evicted."""
    trie = IdentityTrie(4, 1)
    pool = BlockPool(3, trie, FreeQueue(3), 1)
    trace = TraceRequest(request_id="r", arrival_s=0.0, prompt=(("p", 4),), output_len=0)
    stretch, _ = trie.chain(trace).at(0)
    a, b = pool.allocate(1), pool.allocate(1)
    for blocks in (a, b):
        pool.commit(stretch, 0, 0, blocks)
    pool.free(a)
    assert pool.allocate(1) == a
    pool.commit(stretch, 0, 0, a)
    assert pool.cached(stretch, 0, 0, 1) == b
    pool.free(b)
    assert pool.allocate(1) == b
    assert pool.cached(stretch, 0, 0, 1) == a


@pytest.mark.parametrize("how", ["allocate", "allocate_few"])
def test_a_stretch_whose_blocks_are_gone_gives_its_slot_to_another(how: str) -> None:
    """Nobody takes one's blocks for the other's."""
    trie = IdentityTrie(4, 1)
    pool = BlockPool(4, trie, FreeQueue(4), 1)
    a, b = (
        TraceRequest(request_id=name, arrival_s=0.0, prompt=((name, 8),), output_len=0)
        for name in "ab"
    )
    chain = trie.chain(a)
    gone = chain.at(0)[0].slot
    pool.commit(chain.at(0)[0], 0, 0, blocks := pool.allocate(2))
    pool.free(blocks[::-1])
    trie.release(chain)
    getattr(pool, how)(3)  # evicts both: nothing holds the stretch any more
    other = trie.chain(b).at(0)[0]
    pool.commit(other, 0, 0, np.array([3]))
    pool.sweep()
    assert pool.num_cached_keys == 1
    assert pool.cached(other, 0, 0, 1).tolist() == [3]
    assert pool.evicted_cached_blocks == 2
    assert trie.stretches[gone] is None


def test_evictions_do_not_wait_for_ever() -> None:
    """A pool that nobody looks at does not hoard what it has evicted."""
    trie = IdentityTrie(4, 1)
    pool = BlockPool(2001, trie, FreeQueue(2001), 1)
    for name in map(str, range(12)):
        trace = TraceRequest(request_id=name, arrival_s=0.0, prompt=((name, 8000),), output_len=0)
        chain = trie.chain(trace)
        blocks = pool.allocate(2000)
        pool.commit(chain.at(0)[0], 0, 0, blocks)
        pool.free(blocks)
        trie.release(chain)
    assert pool.evicted_cached_blocks == 11 * 2000
    assert sum(stretch is not None for stretch in trie.stretches) <= 4
