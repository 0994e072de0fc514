from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.kv.batch import (
    PersistentBatch,
    compute_query_start_loc,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from simserve.kv.cascade import common_prefix_len


def test_an_empty_batch_splits_into_nothing() -> None:
    assert compute_query_start_loc([]).tolist() == [0]
    for uniform in (False, True):
        assert tuple(split_decodes_and_prefills([0], 2, uniform)) == (0, 0, 0, 0)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 8))
def test_a_reordered_batch_splits_without_remainder(lengths: list[int], threshold: int) -> None:
    order = reorder_batch_to_split_decodes_and_prefills(lengths, threshold).order
    assert sorted(order) == list(range(len(lengths)))
    split = split_decodes_and_prefills(
        compute_query_start_loc([lengths[row] for row in order]), threshold
    )
    decodes = [n for n in lengths if n <= threshold]
    assert (split.num_decodes, split.num_decode_tokens) == (len(decodes), sum(decodes))
    assert split.num_decode_tokens + split.num_prefill_tokens == sum(lengths)


@given(st.data())
def test_moves_of_the_persistent_batch_carry_a_table_along(data: st.DataObject) -> None:
    """Rows of any table, given the same moves, stay beside their requests."""
    batch = PersistentBatch()
    table: dict[int, str] = {}
    for step in range(6):
        removed = (
            data.draw(st.lists(st.sampled_from(batch.rows), unique=True)) if batch.rows else []
        )
        added = [f"{step}-{i}" for i in range(data.draw(st.integers(0, 4)))]
        stay = [request_id for request_id in batch.rows if request_id not in removed]
        moves = batch.update(removed, added)
        assert sorted(batch.rows) == sorted(stay + added)
        came_from = {target: source for source, target in moves}
        for row, request_id in enumerate(batch.rows):
            if request_id in added:
                table[came_from.get(row, row)] = request_id
        for source, target in moves:
            table[target] = table[source]
        assert [table[row] for row in range(len(batch.rows))] == batch.rows


def test_a_request_that_is_not_in_the_batch_cannot_leave() -> None:
    with pytest.raises(ValueError, match="not in list"):
        PersistentBatch().update(["a"], [])


def test_the_shared_prefix_is_computed_by_everyone_and_ends_with_a_block() -> None:
    assert common_prefix_len(20, 16, [400, 500]) == 320
    assert common_prefix_len(20, 16, [400, 319]) == 304
    assert common_prefix_len(20, 16, [400, 0]) == 0
