"""Token ids and block tables of the running requests, kept on the device from step to step.

A request has one row from its admission until it ends or is preempted. Only what a plan adds is
sent: whole rows for requests that come in, single blocks for those that run; all that a step adds
goes in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from simserve.errors import SimserveError
from simserve.executor.real.staging import Staging

__all__ = ["RequestRows"]


class RequestRows:
    """Rows of token ids and of block numbers, and who has which.

    Args:
        num_rows: requests that run at the same time, at most.
        max_model_len: tokens of a request, at most.
        block_size: tokens per block.
        staging: sends to where the rows live.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, staging: Staging
    ) -> None:
        device = staging.device
        num_blocks = -(-max_model_len // block_size)
        self.spare_row = num_rows
        """Belongs to nobody: padding reads it, and its blocks, all −1, have no slots."""
        self.spare_position = max_model_len + 1
        """Beyond every token of a request, the one that nobody asked for included: what is
        written there is lost."""
        sizes = (num_rows + 1) * (max_model_len + 2), (num_rows + 1) * num_blocks
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ids, tables = self._memory.split(sizes)
        self.ids = ids.view(num_rows + 1, -1)
        self.tables = tables.view(num_rows + 1, -1).fill_(-1)
        self._sent = np.zeros(sum(sizes), dtype=np.int32)
        """What has been written to the memory from here."""
        self._first_entry, self._num_columns = sizes[0], num_blocks
        self._sent_tables = self._sent[sizes[0] :].reshape(num_rows + 1, -1)
        self._runs: list[tuple[int, NDArray[np.int32]]] = []
        """What is to be sent, each from a place of the memory on."""
        self._places: list[int] = []
        self._blocks: list[int] = []
        """Single blocks that are to be sent, and their places."""
        self.staging = staging
        self.of: dict[str, int] = {}
        """Row by request id."""
        self.names = [""] * num_rows
        """Who has, or had, each row."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_blocks = [0] * num_rows
        self.block_size = block_size
        self.longest = num_blocks * block_size
        """Tokens that a block table holds."""

    def clear(self) -> None:
        """All requests are gone."""
        for request_id in list(self.of):
            self.release(request_id)
        self._runs, self._places, self._blocks = [], [], []

    @contextmanager
    def in_block_0(self) -> Iterator[None]:
        """For batches that mean nothing: every row has the null block in all places."""
        self.tables.zero_()
        yield
        self.tables.fill_(-1)

    def release(self, request_id: str) -> int | None:
        """Take a request's row; None if it had none."""
        row = self.of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def admit(self, tables: Mapping[str, Sequence[int]], ids: Sequence[NDArray[np.int32]]) -> None:
        """Give each request a row that holds its block table and its ids, as many as fit.

        Raises:
            SimserveError: more requests run than there are rows.
        """
        for (request_id, blocks), own in zip(tables.items(), ids, strict=True):
            if not self._free:
                raise SimserveError(
                    f"the plan runs more than scheduler.max_num_seqs = {self.spare_row} requests: "
                    "the scheduler does not keep to its limit"
                )
            row = self.of[request_id] = self._free.pop()
            self.names[row] = request_id
            self._num_blocks[row] = len(blocks)
            self._runs.append((row * self.ids.shape[1], own[: self.spare_position]))
            self._runs.append((self._entry(row, 0), np.array(blocks, dtype=np.int32)))

    def num_slots(self, request_id: str) -> int:
        """Tokens that the request's blocks hold."""
        return self._num_blocks[self.of[request_id]] * self.block_size

    def append_blocks(self, added: Mapping[str, Sequence[int]]) -> None:
        """Put new blocks behind those that the requests have."""
        for request_id, blocks in added.items():
            row = self.of[request_id]
            first = self._entry(row, self._num_blocks[row])
            self._num_blocks[row] += len(blocks)
            self._places.extend(range(first, first + len(blocks)))
            self._blocks.extend(blocks)

    def write(self, ids: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Put token ids into the requests' rows, each from a position on."""
        for request_id, (first, values) in ids.items():
            place = self.of[request_id] * self.ids.shape[1] + first
            self._runs.append((place, np.array(values, dtype=np.int32)))

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cache slot of each token of rows that hold a request and have been sent."""
        columns = positions // self.block_size
        blocks: NDArray[np.int64] = self._sent_tables[rows, columns].astype(np.int64)
        return (blocks - columns) * self.block_size + positions

    def send(self) -> None:
        """Send what has changed, in one copy and one launch."""
        if not self._runs and not self._places:
            return
        places, values = self._changes()
        self._sent[places] = values
        total = len(places)
        piece = self.staging.take(total + total // 2 + 1)
        on_host = piece.numpy()
        on_host[:total] = places
        on_host[total:].view(np.int32)[:total] = values
        piece = self.staging.send(piece)
        self._memory.scatter_(0, piece[:total], piece[total:].view(torch.int32)[:total])

    def _entry(self, row: int, column: int) -> int:
        """The place of an entry of a block table."""
        return self._first_entry + row * self._num_columns + column

    def _changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Places of the memory that change, and their values."""
        places = [np.arange(first, first + len(values)) for first, values in self._runs]
        values = [values for _, values in self._runs]
        places.append(np.array(self._places, dtype=np.int64))
        values.append(np.array(self._blocks, dtype=np.int32))
        self._runs, self._places, self._blocks = [], [], []
        return np.concatenate(places), np.concatenate(values)
