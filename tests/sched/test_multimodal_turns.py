"""A conversation goes on behind a multimodal item that ended with a block: what of it is found.

Blocks of 4 tokens. The first turn's prompt is 8 tokens up to the item's end and 2 of text; its
outputs fill the third block, which the engine therefore keys with the item, too. As part of a
prompt the same block is keyed without.
"""

from __future__ import annotations

from simserve.types import MmItem
from tests.sched.harness import request, simulate

ITEMS = (MmItem("cat", 2, 6),)
OPENING = ("opening", 10)
REPLY = (OPENING, ("first/output", 3))


def test_the_block_that_outputs_filled_behind_an_item_is_not_found_by_the_next_turn() -> None:
    trail = simulate(
        "vllm",
        [
            request("first", (OPENING,), 4, mm_items=ITEMS),
            request("second", REPLY, 1, at=10.0, mm_items=ITEMS),
            request("third", REPLY, 1, at=20.0, mm_items=ITEMS),
        ],
        enable_prefix_caching=True,
    )
    assert trail.steps == [
        (["first"], [10]),
        (["first"], [1]),
        (["first"], [1]),
        (["first"], [1]),
        (["second"], [5]),
        (["third"], [1]),
    ]
    blocks = [list(table) for plan in trail.plans for (table,) in plan.new_blocks.values()]
    assert blocks == [[1, 2, 3], [4], [1, 2, 5, 6], [1, 2, 5, 7]]


def test_without_items_the_next_turn_finds_it() -> None:
    turns = [request("first", (OPENING,), 4), request("second", REPLY, 1, at=10.0)]
    assert simulate("vllm", turns, enable_prefix_caching=True).steps[-1] == (["second"], [1])
