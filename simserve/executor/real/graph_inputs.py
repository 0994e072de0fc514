"""The inputs of a captured step: a batch of one query length, padded, at fixed addresses."""

from __future__ import annotations

import numpy as np
import torch

from simserve.executor.real.attention import BatchOnDevice
from simserve.executor.real.batch import Batch
from simserve.executor.real.forward import TokenInputs
from simserve.executor.real.request_rows import RequestRows

__all__ = ["GraphInputs"]


class GraphInputs:
    """The inputs of a batch in one piece of memory, int64 `[8, tokens + 1]`, and its parts by name.

    The first four are one value a token, those that follow one a request. The number of columns is
    even, so that every row is aligned to 16 bytes.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.token_rows, self.positions, self.columns, self.places = memory[:4]
        """Row of its request, position in it, and the position's column and place in the table."""
        self.slots, self.logit_ends = memory[4:6]
        self.seq_lens, self.query_start_loc = memory[6:].view(torch.int32)

    @staticmethod
    def size(most_tokens: int) -> tuple[int, int]:
        """Of the memory for batches of at most so many tokens."""
        return 8, most_tokens // 2 * 2 + 2

    def fill(self, batch: Batch, rows: RequestRows) -> None:
        """Write a batch, and padding behind it. The memory is the host's."""
        positions = batch.positions()
        num_rows, tokens = len(batch.slots), len(positions)
        memory = self.memory.numpy()
        memory[0, :tokens] = batch.token_slots()
        memory[1, :tokens] = positions
        np.divmod(positions, rows.block_size, out=(memory[2, :tokens], memory[3, :tokens]))
        memory[4, :num_rows] = batch.slots
        memory[5, :tokens] = batch.logit_ends
        seq_lens, query_start_loc = memory[6:].view(np.int32)
        seq_lens[:num_rows] = batch.seq_lens
        query_start_loc[:num_rows] = batch.query_start_loc[:-1]
        self.pad(num_rows, tokens, rows)

    def pad(self, num_rows: int, tokens: int, rows: RequestRows) -> None:
        """Write padding behind so many requests and tokens: it has no slots and no length."""
        memory = self.memory.numpy()
        memory[0, tokens:] = rows.spare_row
        memory[1:4, tokens:] = 0
        memory[4, num_rows:] = rows.spare_row
        memory[5, tokens:] = rows.spare_position
        seq_lens, query_start_loc = memory[6:].view(np.int32)
        seq_lens[num_rows:] = 0
        query_start_loc[num_rows:] = tokens

    def derive(
        self, rows: RequestRows, num_rows: int, query_len: int, max_seq_len: int
    ) -> tuple[TokenInputs, BatchOnDevice]:
        """What the model reads: views of the memory, and what is gathered by them."""
        tokens = num_rows * query_len
        token_rows, slots = self.token_rows[:tokens], self.slots[:num_rows]
        blocks = rows.tables[token_rows, self.columns[:tokens]]
        positions, ends = self.positions[:tokens], self.logit_ends[:tokens]
        batch = BatchOnDevice(
            positions=positions,
            slot_mapping=torch.add(self.places[:tokens], blocks, alpha=rows.block_size),
            block_table=rows.tables.index_select(0, slots),
            seq_lens=self.seq_lens[:num_rows],
            query_start_loc=self.query_start_loc[: num_rows + 1],
            num_decodes=num_rows if query_len == 1 else 0,
            max_query_len=query_len,
            max_seq_len=max_seq_len,
        )
        return TokenInputs(token_rows, positions, None, token_rows, ends), batch
