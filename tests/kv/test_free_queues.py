"""Free queues against lists: the same blocks in the same order, whatever is done to them."""

from __future__ import annotations

from collections import deque
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from simserve.kv.eviction_fifo import FifoFreeQueue
from simserve.kv.free_queue import FreeQueue
from simserve.kv.manager import PagedKVCacheManager
from simserve.types import Request, TraceRequest


class QueueMachine(RuleBasedStateMachine):
    """Blocks are handed out, freed and rescued; `model` holds those that are free, in order."""

    queue: Any

    def make(self, num_gpu_blocks: int) -> Any:
        raise NotImplementedError

    def put_in(self, blocks: list[int]) -> None:
        raise NotImplementedError

    @initialize(num_gpu_blocks=st.integers(1, 40))
    def start(self, num_gpu_blocks: int) -> None:
        self.queue = self.make(num_gpu_blocks)
        self.model = deque(range(1, num_gpu_blocks))
        self.used: list[int] = []
        self.handed_out = dict.fromkeys(range(1, num_gpu_blocks), 0)
        self.clock = 0

    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.model)))
        expected = [self.model.popleft() for _ in range(count)]
        taken = self.queue.popleft_n(count)
        assert taken.dtype == np.int64
        assert taken.tolist() == expected
        self.take(expected)

    @rule(data=st.data())
    def hand_out_few(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(3, len(self.model))))
        expected = [self.model.popleft() for _ in range(count)]
        assert self.queue.popleft_few(count) == expected
        self.take(expected)

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            self.clock += 1
            self.handed_out[block] = self.clock
        self.used += blocks

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.used), unique=True, min_size=1))
        self.used = [block for block in self.used if block not in blocks]
        self.queue.append_n(np.array(blocks, dtype=np.int64))
        self.put_in(blocks)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rescue(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.model)), unique=True, min_size=1))
        self.queue.remove_n(np.array(blocks, dtype=np.int64))
        for block in blocks:
            self.model.remove(block)
        self.used += blocks

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def count_before(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.model)), unique=True, min_size=1))
        expected = min(self.model.index(block) for block in blocks)
        assert self.queue.num_before(np.array(blocks, dtype=np.int64)) == expected

    @invariant()
    def same_blocks_in_the_same_order(self) -> None:
        if hasattr(self, "model"):
            assert list(self.queue) == list(self.model)
            assert len(self.queue) == len(self.model)


class LruMachine(QueueMachine):
    def make(self, num_gpu_blocks: int) -> Any:
        return FreeQueue(num_gpu_blocks)

    def put_in(self, blocks: list[int]) -> None:
        self.model.extend(blocks)


class FifoMachine(QueueMachine):
    def make(self, num_gpu_blocks: int) -> Any:
        return FifoFreeQueue(num_gpu_blocks)

    def put_in(self, blocks: list[int]) -> None:
        in_order = sorted([*self.model, *blocks], key=lambda b: (self.handed_out[b], b))
        self.model = deque(in_order)


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFifo = FifoMachine.TestCase
TestFifo.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_the_log_is_compacted_without_losing_the_order() -> None:
    """Far more appends than the log has room for, most of them rescued again."""
    queue, model = FreeQueue(10), deque(range(1, 10))
    rng = np.random.default_rng(0)
    for _ in range(2000):
        blocks = rng.permutation(np.array(model, dtype=np.int64))[: int(rng.integers(0, 9))]
        queue.remove_n(blocks)
        for block in blocks.tolist():
            model.remove(block)
        taken = queue.popleft_n(int(rng.integers(0, len(model) + 1)))
        assert taken.tolist() == [model.popleft() for _ in taken]
        back = rng.permutation(np.concatenate([blocks, taken]))
        queue.append_n(back)
        model.extend(back.tolist())
        assert list(queue) == list(model)


@pytest.mark.parametrize(("free_queue", "first_hit"), [(FreeQueue, 8), (FifoFreeQueue, 0)])
def test_fifo_evicts_a_template_that_lru_keeps(free_queue: Any, first_hit: int) -> None:
    """5 usable blocks of 4 tokens. The template's blocks are older than those of x, but used since.

    x, y and z take one new block each. z evicts: the block of x (LRU), or the template's first.
    """
    kv = PagedKVCacheManager(
        num_gpu_blocks=6, block_size=4, max_model_len=64, free_queue=free_queue
    )

    def serve(request_id: str, *parts: tuple[str, int]) -> int:
        trace = TraceRequest(request_id=request_id, arrival_s=0.0, prompt=parts, output_len=1)
        request = Request(trace, 64)
        hit = kv.get_computed_blocks(request)
        assert hit is not None
        assert kv.allocate_slots(request, request.num_tokens - hit.num_tokens, hit) is not None
        kv.forget(request)
        return hit.num_tokens

    assert serve("t", ("template", 8), ("a", 1)) == 0
    assert serve("x", ("x", 4)) == 0
    assert serve("y", ("template", 8), ("y", 4)) == 8
    assert serve("z", ("z", 8)) == 0
    assert serve("u", ("template", 8), ("b", 1)) == first_hit
