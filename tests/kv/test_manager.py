"""The paged manager against a plain one: the same hits, blocks, tables, queue and statistics."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simserve.kv.groups import FullAttention, SlidingWindow
from simserve.kv.manager import PagedKVCacheManager
from simserve.segments import Segments, total_len
from simserve.types import Request, TraceRequest
from tests.kv.naive import BASES, NaiveManager, cut, trace_requests

MAX_MODEL_LEN = 96
MAX_DRAFTS = 3


class ManagerMachine(RuleBasedStateMachine):
    """Requests wait, run in chunks, decode with and without drafts, are preempted, and end."""

    kv: PagedKVCacheManager

    def draw_windows(self, data: st.DataObject) -> list[int | None]:
        return [None]

    @initialize(
        data=st.data(),
        pool_tokens=st.integers(20, 200),
        block_size=st.integers(1, 4) | st.integers(1, 32),
        caching=st.sampled_from([True] * 5 + [False]),
        drop_last=st.sampled_from([False, False, True]),
    )
    def start(
        self,
        data: st.DataObject,
        pool_tokens: int,
        block_size: int,
        caching: bool,
        drop_last: bool,
    ) -> None:
        windows = self.draw_windows(data)
        num_gpu_blocks = 2 + pool_tokens * len(windows) // block_size
        self.kv = PagedKVCacheManager(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            groups=[FullAttention() if w is None else SlidingWindow(w) for w in windows],
            drop_last_hit=drop_last,
        )
        self.model = NaiveManager(
            num_gpu_blocks, block_size, MAX_MODEL_LEN, windows, caching, drop_last
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.had_drafts: set[str] = set()
        self.conversations: list[Segments] = []
        self.count = 0

    @rule(data=st.data(), now=st.booleans())
    def arrive(self, data: st.DataObject, now: bool) -> None:
        """A new request, often the next turn of an earlier one."""
        self.count += 1
        said = data.draw(st.sampled_from([*BASES, *self.conversations]))
        base = said if total_len(said) < 60 else cut(said, 60)
        trace = data.draw(trace_requests(f"r{self.count}", base))
        self.conversations = [*self.conversations[-3:], trace.prompt + trace.output_parts]
        request = Request(trace, MAX_MODEL_LEN)
        self.model.add(request)
        self.waiting.append(request)
        if now:
            self.admit_one(data, request)

    def allocate(self, request: Request, num_new: int, hit: Any, lookahead: int) -> bool:
        """Allocate in both; whether there were blocks."""
        model_hit = None if hit is None else [list(map(int, blocks)) for blocks in hit.blocks]
        needs_nothing = request.num_computed_tokens + num_new + lookahead <= request.slots_until
        keys_before = self.kv.stats.num_cached_keys
        expected = self.model.allocate_slots(request, num_new, model_hit, lookahead)
        blocks = self.kv.allocate_slots(request, num_new, hit, lookahead)
        if blocks is None:
            assert expected is None
            return False
        assert expected is not None
        if blocks == ():
            assert not any(expected)
        else:
            assert [list(b) for b in blocks] == expected
        if needs_nothing:
            assert blocks == ()
            assert self.kv.stats.num_cached_keys == keys_before
        return True

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.admit_one(data, data.draw(st.sampled_from(self.waiting)))

    def admit_one(self, data: st.DataObject, request: Request) -> None:
        hit = self.kv.get_computed_blocks(request)
        expected = self.model.get_computed_blocks(request)
        assert (hit is None) == (expected is None)
        found = 0
        if hit is not None:
            assert [list(map(int, blocks)) for blocks in hit.blocks] == expected
            assert hit.num_tokens == len(hit.blocks[0]) * self.kv.block_size
            found = hit.num_tokens
        left = request.num_tokens - found
        assert left >= 1
        num_new = data.draw(st.just(left) | st.integers(1, left))
        if self.allocate(request, num_new, hit, 0):
            request.num_computed_tokens = found + num_new
            self.waiting.remove(request)
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), lookahead=st.sampled_from([0, 0, 3]))
    def go_on(self, data: st.DataObject, lookahead: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        left = request.num_tokens - request.num_computed_tokens
        if left == 0:
            if request.num_tokens == request.stop_len:
                return
            request.num_tokens += 1  # the token that the last step yielded
            left = 1
        num_new = data.draw(st.just(left) | st.integers(1, left))
        drafts = 0
        if num_new == left:
            room = request.stop_len - request.num_tokens
            drafts = data.draw(st.integers(0, min(MAX_DRAFTS, room)))
        if not self.allocate(request, num_new + drafts, None, lookahead):
            return
        if drafts:
            self.had_drafts.add(request.request_id)
        accepted = data.draw(st.integers(0, drafts))
        request.num_computed_tokens += num_new + accepted
        request.num_tokens += accepted

    @precondition(lambda self: self.running)
    @rule()
    def decode_together(self) -> None:
        """One known token of each, at once; not used where there are drafts."""
        decoding = [
            r
            for r in self.running
            if r.request_id not in self.had_drafts
            and (
                r.num_tokens - r.num_computed_tokens == 1
                or (r.num_tokens == r.num_computed_tokens and r.num_tokens < r.stop_len)
            )
        ]
        if len(decoding) * self.kv.num_groups > len(self.model.queue):
            return
        for request in decoding:
            request.num_tokens = request.num_computed_tokens + 1
        expected = {}
        for request in decoding:
            blocks = self.model.allocate_slots(request, 1, None, 0)
            assert blocks is not None
            if any(blocks):
                expected[request.request_id] = blocks
        added = self.kv.append_slots(decoding)
        assert {i: [list(b) for b in blocks] for i, blocks in added.items()} == expected
        for request in decoding:
            request.num_computed_tokens += 1

    @precondition(lambda self: self.running and self.kv.num_groups == 1)
    @rule(data=st.data())
    def leap(self, data: st.DataObject) -> None:
        """Steps of one token each, taken at once, are as if taken one by one."""
        steady = [
            r
            for r in self.running
            if r.num_computed_tokens == r.num_tokens and r.num_tokens < r.stop_len
        ]
        if not steady or self.model.windows != [None] or self.model.drop_last:
            return  # steps with drafts are taken one by one
        limit = min(r.stop_len - r.num_tokens for r in steady)
        fit = self.kv.steps_that_fit(steady, limit)
        needed = [
            sum(
                max(
                    0,
                    -(-(r.num_computed_tokens + count) // self.kv.block_size)
                    - len(self.model.tables[r.request_id][0]),
                )
                for r in steady
            )
            for count in range(limit + 1)
        ]
        assert fit == max(k for k in range(limit + 1) if needed[k] <= len(self.model.queue))
        head = data.draw(st.sampled_from([None, *self.waiting]))
        if head is not None:
            fit = self.kv.steps_that_fit(steady, limit, head)
        if fit == 0:
            return
        hit = head and self.model.get_computed_blocks(head)
        count = data.draw(st.integers(1, fit))
        grown = self.kv.grow(steady, count)
        taken, evicted = [], []
        for _ in range(count):
            free, evictions = len(self.model.queue), self.model.evicted
            for request in steady:
                request.num_tokens += 1
                assert self.model.allocate_slots(request, 1, None, 0) is not None
                request.num_computed_tokens += 1
            taken.append(free - len(self.model.queue))
            evicted.append(self.model.evicted - evictions)
            assert not head or self.model.get_computed_blocks(head) == hit
        assert grown.taken.tolist() == taken
        assert grown.evicted.tolist() == evicted

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.kv.free(request)
        self.kv.free(request)
        self.model.free(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running + self.waiting))
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv.forget(request)
        self.model.free(request)

    @precondition(lambda self: self.count > 8)
    @rule()
    def reset(self) -> None:
        assert self.kv.reset_prefix_cache() == self.model.reset()

    @invariant()
    def both_are_in_the_same_state(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv, model = self.kv, self.model
        assert list(kv.pool.free_queue) == model.queue
        assert kv.num_free_blocks == len(model.queue)
        assert kv.pool.ref_counts.tolist() == model.uses
        assert min(model.uses) >= 0
        assert sum(count > 0 for count in model.uses) + len(model.queue) == kv.num_gpu_blocks - 1
        assert kv.stats == (model.evicted, len(model.cached))
        for request in self.running:
            tables = kv.get_block_ids(request)
            assert [list(table) for table in tables] == model.tables[request.request_id]
            common = kv.get_num_common_prefix_blocks(request, len(self.running))
            assert common == model.num_common_prefix_blocks(request, len(self.running))

    def teardown(self) -> None:
        """When all have ended, every block is free, and without cached blocks no identity lives."""
        if not hasattr(self, "kv"):
            return
        for request in self.running + self.waiting:
            self.kv.forget(request)
        assert self.kv.num_free_blocks == self.kv.num_gpu_blocks - 1
        assert self.kv.reset_prefix_cache()
        assert self.kv.stats.num_cached_keys == 0
        assert not any(self.kv._trie.stretches)


class HybridMachine(ManagerMachine):
    """Sliding windows, alone and beside full attention."""

    def draw_windows(self, data: st.DataObject) -> list[int | None]:
        # At least as long as drafts are: a block is committed before it leaves the window.
        window = data.draw(st.integers(1 + MAX_DRAFTS, 40))
        layouts: list[list[int | None]] = [
            [window],
            [None, window],
            [window, None],
            [window, None, window],
            [None, None],
        ]
        return data.draw(st.sampled_from(layouts))


TestFull = ManagerMachine.TestCase
TestFull.settings = settings(max_examples=40, stateful_step_count=35, deadline=None)
TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(max_examples=40, stateful_step_count=35, deadline=None)


def test_a_leap_commits_in_the_order_of_single_steps() -> None:
    """Two requests generate the same tokens, b is two ahead: its block is the older one."""
    for leap in (False, True):
        kv = PagedKVCacheManager(num_gpu_blocks=20, block_size=4, max_model_len=64)
        a, b = (Request(_says_the_same(name), 64) for name in "ab")
        for request, ahead in ((a, 0), (b, 2)):
            request.num_tokens += ahead
            kv.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
        if leap:
            kv.grow([a, b], 4)
        else:
            for _, request in product(range(4), (a, b)):
                request.num_tokens += 1
                kv.allocate_slots(request, 1)
                request.num_computed_tokens += 1
        follow_up = replace(_says_the_same("c"), prompt=(("p", 8), ("o", 12)))
        hit = kv.get_computed_blocks(Request(follow_up, 64))
        assert hit is not None
        assert hit.blocks[0].tolist()[2] == kv.get_block_ids(b)[0][2]


def test_a_leap_ends_when_a_running_request_lengthens_the_hit_of_the_queues_head() -> None:
    """The head repeats what a says, in two parts. a completes its third block in 3 steps."""
    kv = PagedKVCacheManager(num_gpu_blocks=9, block_size=4, max_model_len=64)
    said = (("x", 9), ("y", 11))
    running = Request(replace(_says_the_same("a"), output=said), 64)
    head = Request(replace(_says_the_same("b"), prompt=(("p", 8), *said)), 64)
    for num_tokens in (8, 1):
        kv.allocate_slots(running, num_tokens)
        running.num_computed_tokens += num_tokens
        running.num_tokens = running.num_computed_tokens
    hit = kv.get_computed_blocks(head)
    assert hit is not None
    assert hit.num_tokens == 8
    assert kv.steps_that_fit([running], 10, head) < 3


def _says_the_same(request_id: str) -> TraceRequest:
    return TraceRequest(
        request_id=request_id,
        arrival_s=0.0,
        prompt=(("p", 8),),
        output_len=20,
        output=(("o", 20),),
    )
