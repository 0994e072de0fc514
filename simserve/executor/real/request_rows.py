"""Token ids and block tables of the running requests, kept on the device from step to step.

A request has one row from its admission until it ends or is preempted. Only what a plan adds is
sent: whole rows for requests that come in, single blocks for those that run.
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
        shape = (num_rows + 1, max_model_len + 2)
        self.ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self.tables: torch.Tensor = torch.full(
            (num_rows + 1, num_blocks), -1, dtype=torch.int32, device=device
        )
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
        rows = []
        for request_id, blocks in tables.items():
            if not self._free:
                raise SimserveError(
                    f"the plan runs more than scheduler.max_num_seqs = {self.spare_row} requests: "
                    "the scheduler does not keep to its limit"
                )
            row = self.of[request_id] = self._free.pop()
            self.names[row] = request_id
            self._num_blocks[row] = len(blocks)
            rows.append(row)
        firsts = [0] * len(rows)
        self._scatter(self.ids, rows, firsts, [one[: self.spare_position] for one in ids])
        self._scatter(self.tables, rows, firsts, list(tables.values()))

    def append_blocks(self, added: Mapping[str, Sequence[int]]) -> None:
        """Put new blocks behind those that the requests have."""
        rows = [self.of[request_id] for request_id in added]
        firsts = [self._num_blocks[row] for row in rows]
        for row, blocks in zip(rows, added.values(), strict=True):
            self._num_blocks[row] += len(blocks)
        self._scatter(self.tables, rows, firsts, list(added.values()))

    def write(self, ids: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Put token ids into the requests' rows, each from a position on."""
        rows = [self.of[request_id] for request_id in ids]
        firsts, values = zip(*ids.values(), strict=True)
        self._scatter(self.ids, rows, firsts, values)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cache slot of each token, shape as `rows`; negative in the spare row."""
        blocks = self.tables[rows, positions // self.block_size]
        return blocks.long() * self.block_size + positions % self.block_size

    def _scatter(
        self,
        target: torch.Tensor,
        rows: Sequence[int],
        columns: Sequence[int],
        values: Sequence[Sequence[int] | NDArray[np.int32]],
    ) -> None:
        """target[rows[i], columns[i] + j] = values[i][j], in one copy and one launch."""
        counts = [len(one) for one in values]
        total = sum(counts)
        if not total:
            return
        firsts = np.array(rows, dtype=np.int64) * target.shape[1] + np.array(columns)
        places = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(total)
        index, flat = self.staging.send(places, np.concatenate(values))
        target.view(-1).index_put_((index,), flat.to(target.dtype))
