"""One forward pass and the choice of the next tokens, from inputs that lie on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from simserve.executor.real.attention import BatchOnDevice, PagedAttention
from simserve.executor.real.marks import LayerMarks
from simserve.executor.real.model import Decoder
from simserve.executor.real.outcomes import StepOutputs
from simserve.executor.real.request_rows import RequestRows
from simserve.executor.real.sampler import Sampler

__all__ = ["Forward", "TokenInputs"]


class TokenInputs(NamedTuple):
    """Where the new tokens of a batch stand, and which of them have logits; all int64."""

    rows: torch.Tensor
    """Row of each token's request, `[T]`."""
    positions: torch.Tensor
    """Position in its request, `[T]`."""
    logit_rows: torch.Tensor | None
    """Tokens whose logits are wanted, `[L]`; None: all."""
    logit_request_rows: torch.Tensor
    """Row of their requests, `[L]`."""
    logit_ends: torch.Tensor
    """Position of the token that each predicts, `[L]`."""


class Forward:
    """Reads token ids from the rows on the device, and writes the chosen ones back there.

    Nothing waits for the device, so that both halves may be captured in a CUDA graph.

    Args:
        decoder: the model.
        attention: over its KV cache.
        rows: ids and block tables of the running requests.
        outputs: takes the chosen ids to the host, and requests go on with them; None: they are
            computed and dropped.
        sampler: draws the tokens; None: the likeliest ones are taken.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: PagedAttention,
        rows: RequestRows,
        outputs: StepOutputs | None,
        sampler: Sampler | None = None,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.rows = rows
        self.outputs = outputs
        self._sampler = sampler

    def logits(
        self, inputs: TokenInputs, batch: BatchOnDevice, marks: LayerMarks | None
    ) -> torch.Tensor:
        """Return `[L, vocab_size]`; new keys and values are in the cache afterwards."""
        self.attention.batch, self.attention.marks = batch, marks
        token_ids = self.rows.ids[inputs.rows, inputs.positions]
        hidden = self.decoder.hidden(token_ids, inputs.positions, self.attention, inputs.logit_rows)
        if marks is not None:
            marks.take()
        logits = self.decoder.head(hidden)
        if marks is not None:
            marks.take()
        return logits

    def first_layer(self) -> Forward:
        """The same of one layer: enough to compile and load all kernels."""
        decoder = self.decoder.first_layer()
        return Forward(decoder, self.attention, self.rows, self.outputs, self._sampler)

    def sample(self, inputs: TokenInputs, logits: torch.Tensor) -> None:
        """Choose a token from each row of logits."""
        if self._sampler is None:
            chosen = logits.argmax(dim=-1)
        else:
            chosen = self._sampler.draw(logits, inputs.logit_request_rows, inputs.logit_ends)
        if self.outputs is not None:
            place = (inputs.logit_request_rows, inputs.logit_ends)
            self.rows.ids.index_put_(place, chosen.to(self.rows.ids.dtype))
            self.outputs.store(chosen, logits, inputs.logit_request_rows)
