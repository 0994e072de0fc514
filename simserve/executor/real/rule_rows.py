"""What requests want done to their logits, kept on the device beside their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from simserve.executor.real.request_rows import RequestRows
from simserve.sampling import RequestSampling
from simserve_kernels import sampling_reference
from simserve_kernels.sampling_settings import PROMPT_BIT, RuleColumns

__all__ = ["RuleRows", "Ruled"]

_ALWAYS = 2**31 - 1


class Ruled(NamedTuple):
    """A request that comes in."""

    sampling: RequestSampling
    stop_ids: frozenset[int]
    """Tokens that end it."""
    prompt_len: int
    ids: NDArray[np.int32]
    """Its prompt, and what it has put out before a preemption."""


class _Entry(NamedTuple):
    """Something that is added to the logit of one token, as `RuleColumns` has it."""

    token: int
    value: float
    since: int = 0
    until: int = _ALWAYS
    before: tuple[int, ...] = ()


class RuleRows:
    """Rules of all rows. Counts of tokens grow with each step, on the device.

    Args:
        possible: what requests may ask for; what none of them does takes no memory.
        num_stop_ids: most tokens that end a request.
        rows: of the requests.
        vocab_size: tokens of the model.
    """

    def __init__(
        self,
        possible: Iterable[RequestSampling],
        num_stop_ids: int,
        rows: RequestRows,
        vocab_size: int,
    ) -> None:
        possible = list(possible)
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device = rows.ids.device
        count = len(rows.ids)

        def column(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((count, *shape), dtype=dtype, device=device)

        sizes = [_num_entries(one, num_stop_ids) for one in possible]
        num_entries, before = max(sizes, default=0), _most_before(possible)
        columns = RuleColumns(has_entries=column(), has_tokens=column())
        if num_entries:
            columns = columns._replace(
                entry_tokens=column(num_entries) - 1,
                entry_values=column(num_entries, dtype=torch.float32),
                entry_since=column(num_entries),
                entry_until=column(num_entries),
                entry_before=column(num_entries, before) - 1 if before else None,
            )
        if any(one.allowed_token_ids is not None for one in possible):
            columns = columns._replace(allowed=column(-(-vocab_size // 32)) - 1)
        if any(_penalises(one) for one in possible):
            columns = columns._replace(
                counts=column(vocab_size),
                presence=column(dtype=torch.float32),
                frequency=column(dtype=torch.float32),
                repetition=column(dtype=torch.float32) + 1,
            )
        self.columns = columns

    @staticmethod
    def needed(possible: Iterable[RequestSampling]) -> bool:
        """Whether any of these settings is a rule."""
        return any(
            _penalises(one) or one.allowed_token_ids is not None or _num_entries(one, 1)
            for one in possible
        )

    def admit(self, requests: Mapping[int, Ruled]) -> None:
        """Put the rules of requests into the rows that they have been given."""
        rows, ruled = list(requests), list(requests.values())
        found = self.columns
        place = torch.tensor(rows, device=self._device)
        if found.entry_tokens is not None:
            self._admit_entries(place, [_entries(one) for one in ruled])
        if found.allowed is not None:
            bits = [_bits(one.sampling.allowed_token_ids, self._vocab_size) for one in ruled]
            found.allowed[place] = torch.from_numpy(np.stack(bits)).to(self._device)
        if found.counts is not None:
            self._admit_counts(place, ruled)
        has_tokens = [
            _penalises(one.sampling) or one.sampling.allowed_token_ids is not None for one in ruled
        ]
        found.has_tokens[place] = torch.tensor(has_tokens, device=self._device).int()

    def apply(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the next tokens as the rules have them, `[L, V]`; not in half precision.

        Args:
            logits: `[L, V]`, left as they are.
            rows: of their requests, int64 `[L]`.
            positions: of the token that each predicts, int64 `[L]`.
        """
        on_gpu = logits.device.type == "cuda"
        out = logits.float() if logits.element_size() < 4 else logits.clone()
        if on_gpu:
            from simserve_kernels.sampling_rules import apply_rules
        else:
            apply_rules = sampling_reference.apply_rules
        apply_rules(out, self.columns, rows, positions, self._rows.ids)
        return out

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens were put out, one in each of these rows, int64 `[L]`."""
        counts = self.columns.counts
        if counts is not None:
            places = rows * self._vocab_size + tokens
            counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=counts.dtype))

    def _admit_entries(self, place: torch.Tensor, entries: Sequence[Sequence[_Entry]]) -> None:
        found = self.columns
        assert found.entry_tokens is not None
        count = found.entry_tokens.shape[1]
        padded = [(*one, *[_Entry(-1, 0.0)] * (count - len(one))) for one in entries]

        def put(column: torch.Tensor | None, values: list[list[object]]) -> None:
            assert column is not None
            column[place] = torch.tensor(values, dtype=column.dtype, device=self._device)

        put(found.entry_tokens, [[one.token for one in row] for row in padded])
        put(found.entry_values, [[one.value for one in row] for row in padded])
        put(found.entry_since, [[one.since for one in row] for row in padded])
        put(found.entry_until, [[one.until for one in row] for row in padded])
        if found.entry_before is not None:
            depth = found.entry_before.shape[2]
            fill = [-1] * depth
            put(
                found.entry_before,
                [[[*one.before, *fill][:depth] for one in row] for row in padded],
            )
        has = torch.tensor([bool(one) for one in entries], device=self._device)
        found.has_entries[place] = has.int()

    def _admit_counts(self, place: torch.Tensor, ruled: Sequence[Ruled]) -> None:
        found = self.columns
        assert found.counts is not None
        for name in ("presence", "frequency", "repetition"):
            values = [getattr(one.sampling, f"{name}_penalty") for one in ruled]
            found.tensors[name][place] = torch.tensor(  # type: ignore[index]
                values, dtype=torch.float32, device=self._device
            )
        found.counts[place] = 0
        for row, one in zip(place.tolist(), ruled, strict=True):
            if _penalises(one.sampling):
                tokens = torch.from_numpy(one.ids).to(self._device).long()
                counts, said = found.counts[row], tokens[one.prompt_len :]
                counts[tokens[: one.prompt_len]] = PROMPT_BIT
                counts.index_add_(0, said, torch.ones_like(said, dtype=counts.dtype))


def _penalises(one: RequestSampling) -> bool:
    penalties = (one.presence_penalty, one.frequency_penalty, one.repetition_penalty)
    return penalties != (0, 0, 1)


def _num_entries(one: RequestSampling, num_stop_ids: int) -> int:
    stops = num_stop_ids if one.min_tokens else 0
    return len(one.logit_bias) + len(one.bad_words) + stops


def _most_before(possible: Sequence[RequestSampling]) -> int:
    return max((len(word) - 1 for one in possible for word in one.bad_words), default=0)


def _entries(one: Ruled) -> list[_Entry]:
    """The biases of a request, its bad words, and what may not end it too soon."""
    sampling, prompt_len = one.sampling, one.prompt_len
    entries = [_Entry(token, bias) for token, bias in sampling.logit_bias.items()]
    for *before, last in sampling.bad_words:
        since = prompt_len + len(before)
        entries.append(_Entry(last, -np.inf, since, before=tuple(reversed(before))))
    if sampling.min_tokens:
        until = prompt_len + sampling.min_tokens
        entries += [_Entry(token, -np.inf, until=until) for token in sorted(one.stop_ids)]
    return entries


def _bits(allowed: Sequence[int] | None, vocab_size: int) -> NDArray[np.int32]:
    """A bit a token, the lowest first; all of them if none is told."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    flags[slice(None) if allowed is None else list(allowed)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
