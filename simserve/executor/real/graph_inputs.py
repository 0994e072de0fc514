"""The inputs of a captured step: a batch, padded, at fixed addresses."""

from __future__ import annotations

import numpy as np
import torch

from simserve.executor.real.attention import BatchOnDevice
from simserve.executor.real.batch import Batch
from simserve.executor.real.forward import TokenInputs
from simserve.executor.real.graph_keys import GraphKey
from simserve.executor.real.request_rows import RequestRows

__all__ = ["GraphInputs"]


class GraphInputs:
    """The inputs of a batch in one piece of memory, int64 `[10, most + 1]`, and its parts by name.

    The first four are one value a token, three that follow one for each token with logits, the last
    ones one a request. The number of columns is even, so that every row is aligned to 16 bytes.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.token_rows, self.positions, self.columns, self.places = memory[:4]
        """Row of its request, position in it, and the position's column and place in the table."""
        self.logit_rows, self.logit_slots, self.logit_ends = memory[4:7]
        self.slots = memory[7]
        self.seq_lens, self.query_start_loc = memory[8:].view(torch.int32)

    @staticmethod
    def size(most: int) -> tuple[int, int]:
        """Of the memory for batches of at most so many tokens and requests."""
        return 10, most // 2 * 2 + 2

    def fill(self, batch: Batch, rows: RequestRows) -> None:
        """Write a batch, and padding behind it. The memory is the host's."""
        positions = batch.positions()
        num_rows, tokens, logits = len(batch.slots), len(positions), len(batch.logit_rows)
        memory = self.memory.numpy()
        memory[0, :tokens] = batch.token_slots()
        memory[1, :tokens] = positions
        np.divmod(positions, rows.block_size, out=(memory[2, :tokens], memory[3, :tokens]))
        memory[4, :logits] = batch.logit_rows
        memory[5, :logits] = batch.logit_slots
        memory[6, :logits] = batch.logit_ends
        memory[7, :num_rows] = batch.slots
        seq_lens, query_start_loc = memory[8:].view(np.int32)
        seq_lens[:num_rows] = batch.seq_lens
        query_start_loc[:num_rows] = batch.query_start_loc[:-1]
        self.pad(num_rows, tokens, logits, rows)

    def pad(self, num_rows: int, tokens: int, logits: int, rows: RequestRows) -> None:
        """Write padding behind so many requests, tokens and tokens with logits.

        It has no slots and no length, and what it predicts is lost.
        """
        memory = self.memory.numpy()
        memory[0, tokens:] = rows.spare_row
        memory[1:4, tokens:] = 0
        memory[4, logits:] = 0
        memory[5, logits:] = rows.spare_row
        memory[6, logits:] = rows.spare_position
        memory[7, num_rows:] = rows.spare_row
        seq_lens, query_start_loc = memory[8:].view(np.int32)
        seq_lens[num_rows:] = 0
        query_start_loc[num_rows:] = tokens

    def derive(self, rows: RequestRows, key: GraphKey) -> tuple[TokenInputs, BatchOnDevice]:
        """What the model reads: views of the memory, and what is gathered by them."""
        tokens, num_rows = key.num_tokens, key.num_rows
        token_rows, positions = self.token_rows[:tokens], self.positions[:tokens]
        blocks = rows.tables[token_rows, self.columns[:tokens]]
        batch = BatchOnDevice(
            positions=positions,
            slot_mapping=torch.add(self.places[:tokens], blocks, alpha=rows.block_size),
            block_table=rows.tables.index_select(0, self.slots[:num_rows]),
            seq_lens=self.seq_lens[:num_rows],
            query_start_loc=self.query_start_loc[: num_rows + 1],
            num_decodes=num_rows if key.query_len == 1 else 0,
            max_query_len=key.query_len or tokens,
            max_seq_len=key.max_seq_len,
        )
        logits = slice(tokens if key.query_len else num_rows)
        wanted = None if key.query_len else self.logit_rows[logits]
        ends = self.logit_ends[logits]
        return TokenInputs(token_rows, positions, wanted, self.logit_slots[logits], ends), batch
