from __future__ import annotations

import numpy as np
import pytest

from simserve.kv.block_table import BlockTable


def test_slots_of_several_rows() -> None:
    table = BlockTable(max_num_reqs=2, max_num_blocks_per_req=4, block_size=16)
    table.add_row(0, [7, 2, 11])
    table.add_row(1, [5])
    assert table.compute_slot_mapping([0, 0, 1], [20, 47, 3]).tolist() == [36, 191, 83]


def test_a_new_row_replaces_the_old_one() -> None:
    table = BlockTable(1, 4, 16)
    table.add_row(0, [7, 2, 11])
    table.add_row(0, [3])
    assert table.row(0).tolist() == [3]
    with pytest.raises(ValueError, match="row 0 has no block for position 16"):
        table.compute_slot_mapping([0], [16])


@pytest.mark.parametrize("garbage", [2**31 - 1, -1])
def test_unused_columns_are_never_read(garbage: int) -> None:
    table = BlockTable(2, 4, 16)
    table.blocks[:] = garbage
    table.add_row(0, [7])
    assert table.compute_slot_mapping([0] * 16, range(16)).tolist() == list(range(112, 128))
    for row, position in ((0, 16), (1, 0), (0, -1)):
        with pytest.raises(ValueError, match=f"row {row} has no block for position {position}"):
            table.compute_slot_mapping([row], [position])


def test_slots_beyond_32_bits_are_exact() -> None:
    table = BlockTable(1, 1, 16)
    table.add_row(0, [2**30])
    assert table.compute_slot_mapping([0], [5]).tolist() == [2**34 + 5]
    assert table.compute_slot_mapping([0], [5]).dtype == np.int64


def test_a_row_that_is_too_long_changes_nothing() -> None:
    table = BlockTable(1, 2, 16)
    table.add_row(0, [7])
    with pytest.raises(ValueError, match="row 0 would have 3 blocks, the table has 2 columns"):
        table.append_row(0, [8, 9])
    assert table.row(0).tolist() == [7]
