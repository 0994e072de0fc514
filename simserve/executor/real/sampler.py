"""Draws the next tokens as each request wants them, from settings that lie beside its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from simserve.executor.real.request_rows import RequestRows
from simserve.executor.real.rule_rows import Ruled, RuleRows
from simserve.sampling import RequestSampling
from simserve_kernels import sampling_reference
from simserve_kernels.sampling_settings import SamplingColumns, SamplingParams

__all__ = ["Sampler", "params_of"]


class Sampler:
    """Keeps the settings of all rows on a device, and draws from logits by them.

    Each token of a request takes random numbers by its position: the same logits give the same
    token, whatever else is in the batch.

    Args:
        possible: all settings that requests may have.
        rows: of the requests; one more pads batches.
        vocab_size: tokens of the model.
        num_eos_ids: tokens that end a sequence.
    """

    def __init__(
        self,
        possible: Sequence[RequestSampling],
        rows: RequestRows,
        vocab_size: int,
        num_eos_ids: int = 0,
    ) -> None:
        self._staging = rows.staging
        settings = [params_of(one) for one in possible]
        # Rows of every kind, so that a column is there if any request may need it.
        columns = SamplingColumns.of(settings, [0] * len(settings), rows.ids.device)
        self._rows = columns._replace(
            **{
                name: one[:1].repeat(len(rows.ids))
                for name, one in columns.tensors.items()
                if one is not None
            }
        )
        most_stops = num_eos_ids + max(len(one.stop_token_ids) for one in possible)
        self._rules = (
            RuleRows(possible, most_stops, rows, vocab_size) if RuleRows.needed(possible) else None
        )

    def admit(self, requests: Mapping[int, Ruled]) -> None:
        """Put the settings of requests into the rows that they have been given."""
        if not requests:
            return
        params = [params_of(one.sampling) for one in requests.values()]
        new = SamplingColumns.of(params, [0] * len(params), "cpu").tensors
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        columns = {name: one for name, one in self._rows.tensors.items() if one is not None}
        # In one copy: whose they are, and a piece for the values of each column.
        sent = self._staging.take((1 + len(columns)) * len(params)).view(-1, len(params))
        sent[0] = torch.tensor(list(requests))
        for piece, (name, column) in zip(sent[1:], columns.items(), strict=True):
            values = new[name]
            piece.view(column.dtype)[: len(params)] = off[name] if values is None else values
        place, *pieces = self._staging.send(sent)
        for piece, column in zip(pieces, columns.values(), strict=True):
            column.scatter_(0, place, piece.view(column.dtype)[: len(params)])
        if self._rules is not None:
            self._rules.admit(requests)

    def draw(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return a token for each row of logits, int64 `[L]`. Nothing waits for a GPU.

        Where a request has rules, they are applied to a copy of the logits first.

        Args:
            logits: `[L, vocab_size]`.
            rows: of their requests, int64 `[L]`; one has several where drafts are verified.
            positions: of the token that each predicts, int64 `[L]`.
        """
        found = {
            name: None if one is None else one.index_select(0, rows)
            for name, one in self._rows.tensors.items()
        }
        columns = self._rows._replace(**{**found, "steps": positions.contiguous()})
        if self._rules is not None:
            logits = self._rules.apply(logits, rows, positions)
        if logits.device.type != "cuda":
            tokens = sampling_reference.sample(logits, columns)
        else:
            from simserve_kernels.sampling import sample

            tokens = sample(logits, columns).tokens
        if self._rules is not None:
            self._rules.count(rows, tokens)
        return tokens


def params_of(sampling: RequestSampling) -> SamplingParams:
    """What the kernels draw by."""
    return SamplingParams(
        seed=sampling.seed or 0,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
