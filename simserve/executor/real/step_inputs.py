"""The inputs of a step: one piece of memory with a batch and the padding behind it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from simserve.executor.real.attention import BatchOnDevice
from simserve.executor.real.batch import Batch
from simserve.executor.real.forward import TokenInputs
from simserve.executor.real.request_rows import RequestRows

__all__ = ["StepInputs", "StepShape"]


class StepShape(NamedTuple):
    """What a step is launched for; a captured one, for so many at most."""

    num_rows: int
    """Requests."""
    num_tokens: int
    num_logits: int | None
    """Tokens with logits; None: all, in their order."""
    num_decodes: int
    """Leading requests for the decode kernel, which takes one token each."""
    max_query_len: int
    max_seq_len: int


class StepInputs:
    """Where a step of some shape has its inputs, in memory of int64 `[size]` on either side.

    Three arrays of one value a token, three of one for each token with logits, and three of one a
    request, the last two int32. Each is aligned to 16 bytes: Triton compiles a kernel anew for
    pointers that are not.
    """

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        tokens, rows = shape.num_tokens, shape.num_rows
        logits = tokens if shape.num_logits is None else shape.num_logits
        self._pieces, end = [], 0
        for count in (*[tokens] * 3, *[logits] * 3, rows, rows // 2 + 1, rows // 2 + 1):
            self._pieces.append(slice(end, end + count))
            end += count + count % 2
        self.size = end

    def write(self, memory: NDArray[np.int64], batch: Batch, rows: RequestRows) -> None:
        """Lay out a batch. Padding has no slots and no length, and what it predicts is lost."""
        if self.shape.max_query_len < batch.num_wanted_each:
            batch = batch.one_by_one()
        token_rows, positions = batch.token_slots(), batch.positions()
        inputs = (
            (token_rows, rows.spare_row),
            (positions, 0),
            (rows.slots(token_rows, positions), -1),
            (batch.logit_rows, 0),
            (batch.logit_slots, rows.spare_row),
            (batch.logit_ends, rows.spare_position),
            (batch.slots, rows.spare_row),
            (batch.seq_lens, 0),
            (batch.query_start_loc, len(positions)),
        )
        parts = [memory[piece] for piece in self._pieces]
        parts[7:] = [part.view(np.int32) for part in parts[7:]]
        for part, (values, padding) in zip(parts, inputs, strict=True):
            part[: len(values)] = values
            part[len(values) :] = padding

    def read(self, memory: torch.Tensor, rows: RequestRows) -> tuple[TokenInputs, BatchOnDevice]:
        """What the model reads on the device: views of the memory, and the requests' tables."""
        shape, num_rows = self.shape, self.shape.num_rows
        parts = [memory[piece] for piece in self._pieces]
        token_rows, positions, slot_mapping, logit_rows, *logits, slots = parts[:7]
        seq_lens, query_start_loc = (part.view(torch.int32) for part in parts[7:])
        wanted = None if shape.num_logits is None else logit_rows
        batch = BatchOnDevice(
            positions=positions,
            slot_mapping=slot_mapping,
            # All columns: kernels are compiled for the distance of two rows.
            block_table=rows.tables.index_select(0, slots),
            seq_lens=seq_lens[:num_rows],
            query_start_loc=query_start_loc[: num_rows + 1],
            num_decodes=shape.num_decodes,
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
        )
        return TokenInputs(token_rows, positions, wanted, *logits), batch
