"""Draws the next tokens as each request wants them, from settings that lie beside its row."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from simserve_kernels import sampling_reference
from simserve_kernels.sampling_settings import SamplingColumns, SamplingParams

__all__ = ["Sampler", "SamplingChoice"]


class SamplingChoice(NamedTuple):
    """Settings of some of the requests."""

    weight: float
    """Their share, relative to the other choices' weights."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Sampler:
    """Keeps the settings of all rows on a device, and draws from logits by them.

    A request's choice and seed follow from its id and the run's seed: they are the same after a
    preemption and under every schedule. Each of its tokens takes random numbers by its position.

    Args:
        choices: what requests take one of, by weight.
        seed: of the run.
        num_rows: rows of requests; one more pads batches.
        device: where they are.
    """

    def __init__(
        self, choices: Sequence[SamplingChoice], seed: int, num_rows: int, device: torch.device
    ) -> None:
        self._choices = choices
        self._seed = seed
        shares = np.array([choice.weight for choice in choices], dtype=np.float64)
        self._bounds = np.cumsum(shares / shares.sum())
        settings = [self._params(choice, 0) for choice in choices]
        # Rows of every choice, so that a column is there if any request may need it.
        columns = SamplingColumns.of(settings, [0] * len(settings), device)
        self._rows = columns._replace(
            **{
                name: one[:1].repeat(num_rows + 1)
                for name, one in columns.tensors.items()
                if one is not None
            }
        )

    def params(self, request_id: str) -> SamplingParams:
        """The settings of a request."""
        generator = np.random.default_rng([self._seed, zlib.crc32(request_id.encode())])
        number = int(np.searchsorted(self._bounds[:-1], generator.random(), side="right"))
        return self._params(self._choices[number], int(generator.integers(2**63)))

    def admit(self, rows: Mapping[str, int]) -> None:
        """Put the settings of requests beside the rows that they have been given."""
        if not rows:
            return
        device = self._rows.temperature.device
        place = torch.tensor(list(rows.values()), device=device)
        new = SamplingColumns.of([self.params(name) for name in rows], [0] * len(rows), device)
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for name, column in self._rows.tensors.items():
            if column is not None:
                values = new.tensors[name]
                column[place] = column.new_full((), off[name]) if values is None else values

    def draw(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return a token for each row of logits. Nothing waits for a GPU.

        Args:
            logits: `[L, vocab_size]`.
            rows: of their requests, int64 `[L]`.
            positions: of the token that each predicts, int64 `[L]`.
        """
        found = {
            name: None if one is None else one.index_select(0, rows)
            for name, one in self._rows.tensors.items()
        }
        columns = self._rows._replace(**{**found, "steps": positions.contiguous()})
        if logits.device.type != "cuda":
            return sampling_reference.sample(logits, columns)
        from simserve_kernels.sampling import sample

        return sample(logits, columns).tokens

    @staticmethod
    def _params(choice: SamplingChoice, seed: int) -> SamplingParams:
        return SamplingParams(
            seed=seed,
            temperature=choice.temperature,
            top_k=choice.top_k,
            top_p=choice.top_p,
            min_p=choice.min_p,
        )
