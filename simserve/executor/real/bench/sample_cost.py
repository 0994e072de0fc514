"""Calls of the real executor that choose tokens, and no more: what sampling adds to a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from simserve.executor.real.bench.timing import Call
from simserve.executor.real.outcomes import StepOutputs
from simserve.executor.real.request_rows import RequestRows
from simserve.executor.real.rule_rows import Ruled
from simserve.executor.real.sampler import Sampler
from simserve.executor.real.staging import Staging
from simserve.sampling import RequestSampling

__all__ = ["SamplingBench"]

_PROMPT_LEN = 512
_OUTPUT_LEN = 128
"""Tokens of a request so far, which penalties concern."""
_SPREAD = 2.5
"""Standard deviation of logits."""
_MAX_CALLS = 64


class SamplingBench:
    """Logits of one vocabulary, which calls of any batch size take in turns.

    Args:
        vocab_size: tokens of the model.
        num_rows: of logits that there are, bfloat16 like those of a model in this dtype.
        most: requests that run at the same time.
        device: where all of it is.
    """

    def __init__(self, vocab_size: int, num_rows: int, most: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self._logits = torch.empty((num_rows, vocab_size), dtype=torch.bfloat16, device=device)
        self._logits.normal_(std=_SPREAD)
        self._most, self._device = most, device
        self._rows = RequestRows(most, _PROMPT_LEN + _OUTPUT_LEN, 16, Staging(device))
        self._rows.ids.random_(vocab_size)

    def argmax_calls(self, batch: int) -> list[Call]:
        """The likeliest token of each row, as without a sampler."""
        return [partial(torch.argmax, logits, dim=-1) for logits in self._batches(batch)]

    def draw_calls(self, settings: Sequence[RequestSampling], batch: int) -> list[Call]:
        """Tokens of requests that take these settings in turns."""
        vocab_size = self._logits.shape[1]
        sampler = Sampler(settings, self._rows, vocab_size)
        ids = np.random.default_rng(0).integers(
            vocab_size, size=(self._most, _PROMPT_LEN + _OUTPUT_LEN), dtype=np.int32
        )
        sampler.admit(
            {
                row: Ruled(settings[row % len(settings)], frozenset(), _PROMPT_LEN, ids[row])
                for row in range(batch)
            }
        )
        rows = torch.arange(batch, device=self._device)
        positions = torch.full_like(rows, _PROMPT_LEN + _OUTPUT_LEN)
        return [partial(sampler.draw, logits, rows, positions) for logits in self._batches(batch)]

    def store_calls(self, num_logprobs: int | None, batch: int) -> list[Call]:
        """What is kept of chosen tokens: themselves, and log-probabilities unless it is None."""
        outputs = StepOutputs(batch, num_logprobs, self._device)
        outputs.admit(dict.fromkeys(range(batch), num_logprobs))
        rows = torch.arange(batch, device=self._device)
        return [partial(outputs.store, rows, logits, rows) for logits in self._batches(batch)]

    def _batches(self, batch: int) -> Iterator[torch.Tensor]:
        count = max(1, min(_MAX_CALLS, len(self._logits) // batch))
        return (self._logits[i * batch : (i + 1) * batch] for i in range(count))
