"""The paged manager against a plain one: the same hits, blocks, tables, queue and statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simserve.kv.groups import FullAttention, SlidingWindow
from simserve.kv.manager import PagedKVCacheManager
from simserve.protocols import PrefixHit
from simserve.segments import Segments, total_len
from simserve.types import Pace, Request, TraceRequest
from tests.kv.naive import BASES, Key, NaiveManager, cut, trace_requests

MAX_MODEL_LEN = 96
MAX_DRAFTS = 3


class ManagerMachine(RuleBasedStateMachine):
    """Requests wait, run in chunks, decode with and without drafts, are preempted, and end.

    Those that decode join a common pace at any time and leave it again. The model commits what they
    complete at once, one by one.
    """

    kv: PagedKVCacheManager

    def draw_windows(self, data: st.DataObject) -> list[int | None]:
        return [None]

    @initialize(
        data=st.data(),
        pool_tokens=st.integers(20, 200) | st.integers(100, 300),
        block_size=st.integers(1, 4) | st.integers(1, 32),
        caching=st.sampled_from([True] * 5 + [False]),
        drop_last=st.sampled_from([False, False, True]),
        is_used=st.booleans(),
    )
    def start(
        self,
        data: st.DataObject,
        pool_tokens: int,
        block_size: int,
        caching: bool,
        drop_last: bool,
        is_used: bool,
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
        assert (self.kv.decodes is None) == (windows != [None])
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pace = Pace()
        self.paced: list[Request] = []
        """Those of `running` that decode in step, in the order in which they joined."""
        self.is_scheduled = False
        """Whether the tokens of the pace's last step are still to come."""
        self.had_drafts: set[str] = set()
        self.conversations: list[Segments] = []
        self.count = 0
        if is_used:
            self.fill()
        for _ in range(data.draw(st.integers(1, 4))):
            self.arrive(data, True)

    def fill(self) -> None:
        """Cache something in every block, so that whatever is allocated evicts."""
        size = self.kv.block_size
        gone: list[Request] = []
        while num_blocks := min(
            self.kv.num_free_blocks // self.kv.num_groups, MAX_MODEL_LEN // size
        ):
            name = f"gone{len(gone)}"
            prompt = ((name, num_blocks * size),)
            trace = TraceRequest(request_id=name, arrival_s=0.0, prompt=prompt, output_len=1)
            gone.append(Request(trace, MAX_MODEL_LEN))
            self.model.add(gone[-1])
            assert self.allocate(gone[-1], num_blocks * size, None, 0)
        for request in gone:
            self.kv.forget(request)
            self.model.free(request)

    @rule(data=st.data(), now=st.booleans())
    def arrive(self, data: st.DataObject, now: bool) -> None:
        """A new request, often the next turn of an earlier one."""
        self.count += 1
        trace = replace(data.draw(self.traces()), request_id=f"r{self.count}")
        self.conversations = [*self.conversations[-3:], trace.prompt + trace.output_parts]
        request = Request(trace, MAX_MODEL_LEN)
        self.model.add(request)
        self.waiting.append(request)
        if now:
            self.admit_one(data, request)

    def traces(self) -> st.SearchStrategy[TraceRequest]:
        """What nobody has said, the next turn of somebody, or the same again."""
        bases = [base if total_len(base) < 60 else cut(base, 60) for base in self.conversations]
        new = st.sampled_from([*BASES, *bases]).flatmap(lambda base: trace_requests(base=base))
        said = new.map(lambda trace: replace(trace, output=(("said", 20),), output_len=20))
        if not self.running:
            return new | said
        return new | said | st.sampled_from([request.trace for request in self.running])

    def allocate(self, request: Request, num_new: int, hit: Any, lookahead: int) -> bool:
        """Allocate in both; whether there were blocks."""
        model_hit = None if hit is None else [list(map(int, blocks)) for blocks in hit.blocks]
        needs_nothing = request.num_computed_tokens + num_new + lookahead <= request.slots_until
        keys_before = dict(self.model.key_of)
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
            assert self.model.key_of == keys_before
        return True

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.admit_one(data, data.draw(st.sampled_from(self.waiting)))

    def admit_one(self, data: st.DataObject, request: Request) -> None:
        hit = self.find(request)
        found = hit.num_tokens if hit else 0
        left = request.num_tokens - found
        assert left >= 1
        num_new = data.draw(st.just(left) | st.integers(1, left))
        if self.allocate(request, num_new, hit, 0):
            request.num_computed_tokens = found + num_new
            self.waiting.remove(request)
            self.running.append(request)

    def find(self, request: Request) -> PrefixHit | None:
        """The same hit in both."""
        hit = self.kv.get_computed_blocks(request)
        expected = self.model.get_computed_blocks(request)
        assert (hit is None) == (expected is None)
        if hit is not None:
            assert [list(map(int, blocks)) for blocks in hit.blocks] == expected
            assert hit.num_tokens == len(hit.blocks[0]) * self.kv.block_size
        return hit

    @precondition(lambda self: len(self.running) > len(self.paced))
    @rule(data=st.data(), lookahead=st.sampled_from([0, 0, 3]))
    def go_on(self, data: st.DataObject, lookahead: int) -> None:
        single = [r for r in self.running if r not in self.paced]
        request = data.draw(st.sampled_from(single))
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

    # -- the common pace -----------------------------------------------------------------------

    @precondition(lambda self: self.kv.decodes and self.running)
    @rule(data=st.data(), num_calls=st.integers(1, 9), all_join=st.booleans())
    def decode_together(self, data: st.DataObject, num_calls: int, all_join: bool) -> None:
        """Schedule and update in turn; all that decode join before, if they may."""
        if all_join and not self.is_scheduled:
            self.join(self.running)
        for _ in range(num_calls):
            if self.is_scheduled:
                if data.draw(st.booleans()):
                    self.leap(data)
                else:
                    self.update_pace()
            elif self.paced and not self.take_slots():
                return

    @precondition(lambda self: self.kv.decodes and self.running and not self.is_scheduled)
    @rule(data=st.data())
    def join_some(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.running), unique_by=id))
        self.join(some)

    def join(self, requests: list[Request]) -> None:
        """Of these, those that decode join; not one that would complete the same blocks."""
        for request in requests:
            if request in self.paced or request.request_id in self.had_drafts:
                continue
            if request.num_tokens == request.num_computed_tokens < request.stop_len:
                request.num_tokens += 1
            if request.num_tokens - request.num_computed_tokens == 1 and not self.ends_now(request):
                self.join_one(request)

    def join_one(self, request: Request) -> None:
        assert self.kv.decodes is not None
        size, request_id = self.kv.block_size, request.request_id
        spare = size * len(self.model.tables[request_id][0]) - request.num_computed_tokens
        shares_any = self.model.caching and any(
            self.model.keys[request_id][:1] == self.model.keys[other.request_id][:1]
            for other in self.paced
        )
        shares_uncommitted = self.model.caching and any(
            not self.uncommitted(request).isdisjoint(self.uncommitted(other))
            for other in self.paced
        )
        if self.kv.decodes.add(request):
            assert 0 <= spare < size
            assert not shares_uncommitted
            request.join(self.pace)
            self.paced.append(request)
        else:
            assert shares_any or not 0 <= spare < size

    def uncommitted(self, request: Request) -> set[Key]:
        request_id = request.request_id
        return set(self.model.keys[request_id][self.model.committed[request_id] :])

    def ends_now(self, request: Request) -> bool:
        return request.num_tokens >= request.stop_len

    def take_slots(self) -> bool:
        """One token of each, all at once; with too few blocks nothing happens."""
        assert self.kv.decodes is not None
        size = self.kv.block_size
        is_full = [r.num_computed_tokens == size * len(self.table(r)) for r in self.paced]
        added = self.kv.decodes.take_slots()
        if sum(is_full) > len(self.model.queue):
            assert added is None
            return False
        expected = {r.request_id: b for r, b in self.step_model() if any(b)}
        assert added is not None
        assert {i: tuple(map(list, b)) for i, b in added.items()} == expected
        self.is_scheduled = True
        return True

    def table(self, request: Request) -> list[int]:
        return self.model.tables[request.request_id][0]

    def step_model(self) -> list[tuple[Request, tuple[list[int], ...]]]:
        """Schedule the pace in the model, one request at a time."""
        new_blocks = []
        for request in self.paced:
            blocks = self.model.allocate_slots(request, 1, None, 0)
            assert blocks is not None
            new_blocks.append((request, tuple(blocks)))
        self.pace.scheduled += 1
        return new_blocks

    def update_pace(self) -> None:
        """Each got its token; those that have all they wanted end."""
        self.pace.updated += 1
        self.is_scheduled = False
        for request in [r for r in self.paced if self.ends_now(r)]:
            self.end(request)

    def leap(self, data: st.DataObject) -> None:
        """Steps of one token each, taken at once, are as if taken one by one."""
        decodes, paced = self.kv.decodes, self.paced
        assert decodes is not None
        limit = min(r.stop_len - r.num_tokens for r in paced) - 1
        if limit < 1:
            return
        limit = data.draw(st.just(limit) | st.integers(1, limit))
        fit = decodes.steps_that_fit(limit)
        needed = [sum(self.num_lacking(r, count) for r in paced) for count in range(limit + 1)]
        assert fit == max(k for k in range(limit + 1) if needed[k] <= len(self.model.queue))
        # A hit that loses its last block goes with drafts, and these never join.
        heads = [None] if self.model.drop_last else [None, *self.waiting]
        head = data.draw(st.sampled_from(heads))
        hit = None
        if head is not None:
            hit = self.model.get_computed_blocks(head)
            fits_without, fit = fit, decodes.steps_that_fit(limit, head)
            assert fit <= fits_without
            assert fit == fits_without or hit is not None
        if fit == 0:
            return
        count = data.draw(st.just(fit) | st.integers(1, fit))
        grown = decodes.grow(count)
        taken, evicted = [], []
        for _ in range(count):
            free, evictions = len(self.model.queue), self.model.evicted
            self.pace.updated += 1
            self.step_model()
            taken.append(free - len(self.model.queue))
            evicted.append(self.model.evicted - evictions)
            assert not head or self.model.get_computed_blocks(head) == hit
        assert list(grown.taken) == taken
        assert list(grown.evicted) == evicted

    def num_lacking(self, request: Request, count: int) -> int:
        """Blocks that it lacks for `count` further tokens."""
        num_blocks = -(-(request.num_computed_tokens + count) // self.kv.block_size)
        return max(0, num_blocks - len(self.table(request)))

    @precondition(lambda self: self.paced)
    @rule(data=st.data(), all_of_them=st.booleans())
    def leave(self, data: st.DataObject, all_of_them: bool) -> None:
        """Some, or all, go on by themselves."""
        some = self.paced.copy() if all_of_them else [data.draw(st.sampled_from(self.paced))]
        for request in some:
            self.take_out(request)

    def take_out(self, request: Request) -> None:
        if request in self.paced:
            assert self.kv.decodes is not None
            self.kv.decodes.remove(request)
            request.leave()
            self.paced.remove(request)
            if not self.paced and self.is_scheduled:
                self.pace.updated += 1
                self.is_scheduled = False

    def end(self, request: Request) -> None:
        self.take_out(request)
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv.forget(request)
        self.model.free(request)

    # -- whoever looks sees what eager commits would have left -------------------------------------

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), where=st.sampled_from(["said", "said", "waiting", "all"]))
    def look(self, data: st.DataObject, where: str) -> None:
        """At any time: lookups of those that wait, lookups of what somebody says, all keys."""
        if where == "all":
            self.count_keys()
        elif where == "waiting" and self.waiting:
            self.find(data.draw(st.sampled_from(self.waiting)))
        else:
            self.look_up_what_was_said(data.draw(st.sampled_from(self.waiting + self.running)))

    def look_up_what_was_said(self, by: Request) -> None:
        """Another request comes with the prompt and output of one that is here."""
        parts = by.trace.prompt + by.trace.output_parts
        follow_up = replace(
            by.trace, request_id="follow-up", prompt=parts, output=None, prompt_logprobs=False
        )
        request = Request(follow_up, MAX_MODEL_LEN)
        self.model.add(request)
        self.find(request)
        self.kv.forget(request)
        self.model.free(request)

    def count_keys(self) -> None:
        assert self.kv.num_cached_keys == len(self.model.cached)

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data(), for_good=st.booleans())
    def stop(self, data: st.DataObject, for_good: bool) -> None:
        """A running request is preempted, or any one ends early."""
        if for_good:
            self.end(data.draw(st.sampled_from(self.running + self.waiting)))
        elif self.running:
            self.preempt(data.draw(st.sampled_from(self.running)))

    def preempt(self, request: Request) -> None:
        self.take_out(request)
        self.running.remove(request)
        self.kv.free(request)
        self.kv.free(request)
        self.model.free(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)

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
        assert kv.evicted_cached_blocks == model.evicted
        repeated = sum(count - 1 for count in model.uses if count > 1)
        assert kv.num_shared_tokens == repeated * kv.block_size // kv.num_groups
        for request in self.running:
            tables = kv.get_block_ids(request)
            assert [list(table) for table in tables] == model.tables[request.request_id]
            common = kv.get_num_common_prefix_blocks(request, len(self.running))
            assert common == model.num_common_prefix_blocks(request, len(self.running))

    def teardown(self) -> None:
        """When all have ended, every block is free, and without cached blocks no identity lives."""
        if not hasattr(self, "kv"):
            return
        self.count_keys()
        for request in self.running + self.waiting:
            self.take_out(request)
            self.kv.forget(request)
        assert self.kv.num_free_blocks == self.kv.num_gpu_blocks - 1
        assert self.kv.reset_prefix_cache()
        assert self.kv.num_cached_keys == 0
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
TestFull.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
