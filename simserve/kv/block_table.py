"""Block tables as one array, and the slots of a batch's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["BlockTable"]


class BlockTable:
    """Which physical block holds each logical block of every row of a batch.

    >>> table = BlockTable(max_num_reqs=1, max_num_blocks_per_req=4, block_size=16)
    >>> table.add_row(0, [7, 2, 11])
    >>> table.compute_slot_mapping([0], [20]).tolist()
    [36]

    Args:
        max_num_reqs: rows.
        max_num_blocks_per_req: columns.
        block_size: tokens per block.
    """

    def __init__(self, max_num_reqs: int, max_num_blocks_per_req: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: NDArray[np.int32] = np.zeros(
            (max_num_reqs, max_num_blocks_per_req), dtype=np.int32
        )
        """Shape [rows, columns]; what lies beyond `num_blocks_per_row` means nothing."""
        self.num_blocks_per_row: NDArray[np.int32] = np.zeros(max_num_reqs, dtype=np.int32)

    def add_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Give a row its whole table. Raises ValueError if there are more blocks than columns."""
        self.num_blocks_per_row[row] = 0
        self.append_row(row, block_ids)

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks behind a row's. Raises ValueError if there are more blocks than columns."""
        start = int(self.num_blocks_per_row[row])
        end = start + len(block_ids)
        if end > self.blocks.shape[1]:
            raise ValueError(
                f"row {row} would have {end} blocks, the table has {self.blocks.shape[1]} columns"
            )
        self.blocks[row, start:end] = block_ids
        self.num_blocks_per_row[row] = end

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another one."""
        self.blocks[target] = self.blocks[source]
        self.num_blocks_per_row[target] = self.num_blocks_per_row[source]

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows."""
        self.blocks[[first, second]] = self.blocks[[second, first]]
        self.num_blocks_per_row[[first, second]] = self.num_blocks_per_row[[second, first]]

    def row(self, row: int) -> NDArray[np.int32]:
        """The blocks of a row, shape [its number of blocks]."""
        return self.blocks[row, : self.num_blocks_per_row[row]]

    def compute_slot_mapping(
        self, req_indices: ArrayLike, positions: ArrayLike
    ) -> NDArray[np.int64]:
        """Slot of each token: block of its position times the block size, plus the offset in it.

        Args:
            req_indices: row of each token, shape [tokens].
            positions: position of each token in its request, shape [tokens].

        Raises:
            ValueError: a position lies beyond its row's blocks.
        """
        rows = np.asarray(req_indices, dtype=np.int64)
        at = np.asarray(positions, dtype=np.int64)
        logical, offsets = np.divmod(at, self.block_size)
        beyond = (logical >= self.num_blocks_per_row[rows]) | (at < 0)
        if beyond.any():
            first = int(np.argmax(beyond))
            raise ValueError(f"row {rows[first]} has no block for position {at[first]}")
        blocks = self.blocks.ravel()[rows * self.blocks.shape[1] + logical]
        slots: NDArray[np.int64] = blocks.astype(np.int64) * self.block_size + offsets
        return slots
