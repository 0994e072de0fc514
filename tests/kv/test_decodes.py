"""Decodes in step: who may join, whose block is the older one, and when a leap has to end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simserve.kv.eviction_fifo import FifoFreeQueue
from simserve.kv.free_queue import FreeQueue
from simserve.kv.groups import FullAttention, SlidingWindow
from simserve.kv.manager import PagedKVCacheManager
from simserve.registry import check_protocol
from simserve.types import Pace, Request, TraceRequest


def manager(num_gpu_blocks: int, free_queue: type = FreeQueue) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        num_gpu_blocks=num_gpu_blocks, block_size=4, max_model_len=64, free_queue=free_queue
    )


def says_the_same(request_id: str) -> TraceRequest:
    """Eight tokens of a prompt that all have, and twenty of an output that all have."""
    return TraceRequest(
        request_id=request_id,
        arrival_s=0.0,
        prompt=(("p", 8),),
        output_len=20,
        output=(("o", 20),),
    )


def says_its_own(request_id: str, prompt: str = "p") -> TraceRequest:
    return TraceRequest(request_id=request_id, arrival_s=0.0, prompt=((prompt, 8),), output_len=20)


def decoding(kv: PagedKVCacheManager, trace: TraceRequest, num_tokens: int = 8) -> Request:
    """A request that has computed so many tokens, and knows one more."""
    request = Request(trace, 64)
    request.num_tokens = num_tokens
    assert kv.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    request.num_tokens += 1
    return request


class InStep:
    """Requests that have joined a pace."""

    def __init__(self, kv: PagedKVCacheManager, *requests: Request) -> None:
        assert kv.decodes is not None
        self.decodes, self.pace = kv.decodes, Pace()
        for request in requests:
            assert self.decodes.add(request)
            request.join(self.pace)

    def step(self) -> dict[str, list[list[int]]]:
        new_blocks = self.decodes.take_slots()
        assert new_blocks is not None
        self.pace.scheduled += 1
        self.pace.updated += 1
        return {i: [list(group) for group in blocks] for i, blocks in new_blocks.items()}

    def leap(self, count: int) -> None:
        self.step()
        self.decodes.grow(count - 1)
        self.pace.scheduled += count - 1
        self.pace.updated += count - 1


def third_block_found(kv: PagedKVCacheManager) -> int:
    """Which block a request that repeats what all have said finds behind the prompt."""
    follow_up = replace(says_the_same("c"), prompt=(("p", 8), ("o", 12)))
    hit = kv.get_computed_blocks(Request(follow_up, 64))
    assert hit is not None
    return hit.blocks[0].item(2)


@pytest.mark.parametrize(
    ("ahead", "counts"),
    [
        ("in step", (1, 1, 1, 1)),
        ("in step", (1, 3)),
        ("alone", (1, 1, 1, 1)),
        ("alone", (1, 2, 1)),
    ],
)
def test_the_one_ahead_has_the_older_block(ahead: str, counts: tuple[int, ...]) -> None:
    """Two generate the same tokens, one is two tokens ahead; only one of them is in step."""
    kv = manager(20)
    paced = decoding(kv, says_the_same("a"), 10 if ahead == "in step" else 8)
    alone = decoding(kv, says_the_same("b"), 8 if ahead == "in step" else 10)
    together = InStep(kv, paced)
    assert kv.decodes is not None
    assert not kv.decodes.add(alone), "which of the two is first would be lost"
    for count in counts:
        together.leap(count)
        for _ in range(count):
            assert kv.allocate_slots(alone, 1) is not None
            alone.num_computed_tokens += 1
            alone.num_tokens += 1
    first = paced if ahead == "in step" else alone
    assert third_block_found(kv) == kv.get_block_ids(first)[0][2]
    # The other one's lies under the same identity: it is found when the older one is gone.
    assert kv.num_cached_keys == 3


def test_a_block_is_found_as_soon_as_it_is_scheduled_and_not_before() -> None:
    kv = manager(20)
    one = decoding(kv, says_the_same("a"))
    together = InStep(kv, one)
    follow_up = Request(replace(says_the_same("c"), prompt=(("p", 8), ("o", 12))), 64)
    found = []
    for _ in range(9):
        together.step()
        hit = kv.get_computed_blocks(follow_up)
        assert hit is not None
        found.append(hit.num_tokens)
    assert found == [8] * 3 + [12] * 4 + [16] * 2


def test_one_that_leaves_commits_what_it_has_completed() -> None:
    kv = manager(20)
    one = decoding(kv, says_its_own("a"))
    together = InStep(kv, one)
    for _ in range(5):
        together.step()
    together.decodes.remove(one)
    one.leave()
    assert (one.num_computed_tokens, one.num_tokens) == (13, 14)
    assert kv.pool.num_cached_keys == 3
    # It has four blocks: the next thing to do is the commit of the fourth, with token 16.
    assert one.slots_until == 15
    assert kv.allocate_slots(one, 1) == ()


def test_one_that_leaves_makes_way_for_another_that_says_the_same() -> None:
    kv = manager(20)
    a, b = (decoding(kv, says_the_same(name)) for name in "ab")
    together = InStep(kv, a)
    assert not together.decodes.add(b)
    together.decodes.remove(a)
    a.leave()
    assert together.decodes.add(b)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_prompt_that_all_have_keeps_nobody_out(enable_prefix_caching: bool) -> None:
    """Outputs of their own make blocks of their own, also where a block has some of each."""
    kv = PagedKVCacheManager(
        num_gpu_blocks=50,
        block_size=4,
        max_model_len=64,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = [decoding(kv, replace(says_its_own(n), prompt=(("p", 7),)), 7) for n in "abc"]
    together = InStep(kv, *requests)
    if not enable_prefix_caching:
        assert together.decodes.add(decoding(kv, says_the_same("d")))
        assert together.decodes.add(decoding(kv, says_the_same("e")))


def test_blocks_are_handed_out_in_the_order_of_joining() -> None:
    kv = manager(30)
    requests = [decoding(kv, says_its_own(n, n), 7 + i % 2) for i, n in enumerate("abcd")]
    together = InStep(kv, *requests)
    # Two blocks each so far: 1 ... 8. b and d need one now, a and c (a slot left) next.
    assert together.step() == {"b": [[9]], "d": [[10]]}
    assert together.step() == {"a": [[11]], "c": [[12]]}
    assert together.step() == together.step() == {}
    together.decodes.remove(requests[1])
    requests[1].leave()
    assert together.step() == {"d": [[13]]}


def test_too_few_blocks_for_all_leave_everything_as_it_was() -> None:
    kv = manager(6)
    requests = [decoding(kv, says_its_own(n, n)) for n in "ab"]
    together = InStep(kv, *requests)
    assert kv.num_free_blocks == 1
    assert together.decodes.steps_that_fit(10) == 0
    assert together.decodes.take_slots() is None
    assert kv.num_free_blocks == 1
    assert [len(kv.get_block_ids(r)[0]) for r in requests] == [2, 2]


@pytest.mark.parametrize(
    ("num_free_blocks", "expected"),
    [(0, 0), (1, 0), (2, 1), (3, 4), (4, 4), (5, 5), (6, 8), (9, 10)],
)
def test_steps_that_fit_by_hand(num_free_blocks: int, expected: int) -> None:
    """Blocks of four: two requests need one at steps 1, 5, 9; a third at steps 2, 6, 10."""
    kv = manager(1 + 6 + num_free_blocks)
    three = [decoding(kv, says_its_own(n, n), 7 if n == "c" else 8) for n in "abc"]
    assert InStep(kv, *three).decodes.steps_that_fit(10) == expected


def test_a_slot_more_than_the_next_token_needs_keeps_it_out() -> None:
    """Lookahead has given it a block already: it is asked for singly until that is used."""
    kv = manager(20)
    one = Request(says_its_own("a"), 64)
    kv.allocate_slots(one, 8, None, 4)
    one.num_computed_tokens, one.num_tokens = 8, 9
    assert kv.decodes is not None
    assert not kv.decodes.add(one)
    one.num_computed_tokens, one.num_tokens = 9, 10
    assert kv.decodes.add(one)


def test_a_leap_ends_when_a_running_request_lengthens_the_hit_of_the_queues_head() -> None:
    """The head repeats what a says, in two parts. a completes its third block in 3 steps."""
    kv = manager(9)
    said = (("x", 9), ("y", 11))
    running = decoding(kv, replace(says_the_same("a"), output=said), 8)
    head = Request(replace(says_the_same("b"), prompt=(("p", 8), *said)), 64)
    together = InStep(kv, running)
    together.step()
    hit = kv.get_computed_blocks(head)
    assert hit is not None
    assert hit.num_tokens == 8
    assert together.decodes.steps_that_fit(10) == 10
    assert together.decodes.steps_that_fit(10, head) < 3


@pytest.mark.parametrize("free_queue", [FreeQueue, FifoFreeQueue])
def test_a_leap_ends_before_a_block_of_the_heads_hit_is_evicted(free_queue: type) -> None:
    """Nine blocks. a holds 2; gone, of which 2 are cached, held 4; the head's hit is those 2."""
    kv = manager(10, free_queue)
    gone = decoding(kv, says_its_own("gone", "said"), 8)
    running = decoding(kv, says_its_own("a", "a"))
    kv.forget(gone)
    head = Request(says_its_own("b", "said"), 64)
    head.num_tokens = 9
    together = InStep(kv, running)
    together.step()
    hit = kv.get_computed_blocks(head)
    assert hit is not None
    assert hit.num_tokens == 8
    # Three steps with the block it has, then one block every four; the hit is among the last.
    order = list(kv.pool.free_queue)
    before = min(order.index(block) for block in hit.blocks[0].tolist())
    assert together.decodes.steps_that_fit(60) == 3 + 4 * len(order)
    assert together.decodes.steps_that_fit(60, head) == 3 + 4 * before


def test_a_leap_tells_step_by_step_what_it_took_and_evicted() -> None:
    """In the queue are: one block never used, two that are cached, one that never was full."""
    kv = manager(11)
    gone = decoding(kv, says_its_own("gone", "said"), 8)
    running = [decoding(kv, says_its_own(n, n), 7 if n == "c" else 8) for n in "abc"]
    kv.free(gone)
    not_full = Request(says_its_own("d", "d"), 64)
    kv.allocate_slots(not_full, 3)
    kv.free(not_full)
    together = InStep(kv, *running)
    order = list(kv.pool.free_queue)
    cached = [block in (1, 2) for block in order]
    assert cached == [False, True, True, False]
    # a and b take the first two at once, c its one a step later; then nobody needs one.
    before = kv.evicted_cached_blocks
    grown = together.decodes.grow(4)
    assert list(grown.taken) == [2, 1, 0, 0]
    assert list(grown.evicted) == [1, 1, 0, 0]
    assert kv.evicted_cached_blocks - before == 2


@pytest.mark.parametrize(
    "groups",
    [[SlidingWindow(8)], [FullAttention(), SlidingWindow(8)], [FullAttention(), FullAttention()]],
)
def test_groups_for_which_nothing_can_be_promised_have_none(
    groups: list[FullAttention | SlidingWindow],
) -> None:
    kv = PagedKVCacheManager(num_gpu_blocks=20, block_size=4, max_model_len=64, groups=groups)
    assert kv.decodes is None


def test_it_is_an_allocator() -> None:
    check_protocol(PagedKVCacheManager, "allocators")
