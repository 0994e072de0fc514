"""What the real executor keeps of each request: its tokens, and what they were chosen from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from simserve_kernels import sampling_reference
from simserve_kernels.sampling_settings import TokenLogprobs

__all__ = ["ChosenTokens", "Outcome", "Outcomes", "StepOutputs"]


class ChosenTokens:
    """The tokens that a step has chosen, one a row of logits, on the host.

    Args:
        memory: int32 `[L, width]`: the token; with logprobs also its rank, the ids of itself and
            of the n likeliest, and their log-probabilities as float32.
    """

    def __init__(self, memory: NDArray[np.int32]) -> None:
        self.tokens: NDArray[np.int32] = memory[:, 0]
        """`[L]`."""
        n = max(0, memory.shape[1] // 2 - 1)
        self.ranks: NDArray[np.int32] = memory[:, 1:2]
        """How many tokens are at least as likely, itself included; `[L, 1]`, or `[L, 0]`."""
        self.ids: NDArray[np.int32] = memory[:, 2 : 2 + n]
        """The chosen token, then the likeliest, the likeliest first; `[L, 1 + n]`, or empty."""
        self.logprobs: NDArray[np.float32] = memory[:, 2 + n :].view(np.float32)
        """Natural logarithms of their probabilities, shape as `ids`."""


class StepOutputs:
    """Takes the chosen tokens of a step to the host, in copies that nobody waits for.

    Args:
        most: rows of logits of a step, at most; there are not more requests.
        num_logprobs: of how many of the likeliest tokens log-probabilities are taken, beside that
            of the chosen one; None: no log-probabilities.
        device: where they are chosen.
        num_passes: how often tokens are sent in a step, at most.
    """

    def __init__(
        self, most: int, num_logprobs: int | None, device: torch.device, num_passes: int = 1
    ) -> None:
        width = 1 if num_logprobs is None else 2 * (2 + num_logprobs)
        self.num_logprobs = num_logprobs
        self._memory = torch.zeros((most, width), dtype=torch.int32, device=device)
        self._wanted = torch.full((most + 1,), -1, dtype=torch.int32, device=device)
        """By row of requests, the one that pads included; -1: no log-probabilities."""
        on_gpu = device.type == "cuda"
        size = (num_passes * most, width)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._count = 0

    def admit(self, wanted: Mapping[int, int | None]) -> None:
        """Requests have been given these rows, and want so many log-probabilities a token."""
        if wanted and self.num_logprobs is not None:
            numbers = [-1 if one is None else one for one in wanted.values()]
            place = torch.tensor(list(wanted), device=self._wanted.device)
            self._wanted[place] = torch.tensor(numbers, dtype=torch.int32).to(place.device)

    def store(self, tokens: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the tokens chosen from raw logits, and what requests want beside them.

        Log-probabilities are those of the raw logits: before masks, penalties and temperature. A
        graph may capture it.

        Args:
            tokens: int64 `[L]`.
            logits: `[L, vocab_size]`.
            rows: of their requests, int64 `[L]`.
        """
        memory = self._memory[: len(tokens)]
        memory[:, 0] = tokens
        if self.num_logprobs is None:
            return
        behind_ids = 3 + self.num_logprobs
        out = TokenLogprobs(
            ids=memory[:, 2:behind_ids],
            logprobs=memory[:, behind_ids:].view(torch.float32),
            ranks=memory[:, 1],
        )
        if logits.device.type != "cuda":
            store_logprobs = sampling_reference.store_logprobs
        else:
            from simserve_kernels.sampling_logprobs import store_logprobs
        store_logprobs(out, logits, tokens, self._wanted.index_select(0, rows))

    def restart(self) -> None:
        """Begin a step."""
        self._count = 0

    def send(self, count: int) -> None:
        """Start to copy the first `count` rows, behind those that were sent in this step.

        They have arrived when the device is done.
        """
        first, self._count = self._count, self._count + count
        self._host[first : self._count].copy_(self._memory[:count], non_blocking=True)

    def arrived(self) -> ChosenTokens:
        """What was sent. It changes with the next step."""
        return ChosenTokens(self._host[: self._count].numpy())


@dataclass(slots=True)
class Outcome:
    """What one request has got. Lists run in parallel, one item a token.

    `ranks`, `ids` and `logprobs` are empty unless log-probabilities were asked for.
    """

    request_id: str
    prompt_len: int
    num_logprobs: int | None
    """How many of the likeliest tokens were asked for beside each chosen one; None: nothing."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the request."""
    token_ids: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """How many tokens were at least as likely as the chosen one, itself included."""
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    """`[1 + num_logprobs]` each: the chosen token, then the likeliest ones in order."""
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    """Of `ids`, by the model alone: before masks, penalties and temperature."""
    finish_reason: str | None = None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the chosen tokens' log-probabilities."""
        return float(sum(float(one[0]) for one in self.logprobs))

    def put(self, position: int, chosen: ChosenTokens, row: int) -> bool:
        """Take in the token at a position of the request; what was there before is replaced.

        Returns whether it ends the request.
        """
        self.cut(position - self.prompt_len)
        token = int(chosen.tokens[row])
        self.token_ids.append(token)
        if self.num_logprobs is not None:
            width = 1 + self.num_logprobs
            self.ranks.append(int(chosen.ranks[row, 0]))
            self.ids.append(chosen.ids[row, :width].copy())
            self.logprobs.append(chosen.logprobs[row, :width].copy())
        return token in self.stop_ids

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens."""
        if count < len(self.token_ids):
            for column in (self.token_ids, self.ranks, self.ids, self.logprobs):
                del column[count:]


class Outcomes:
    """What all requests have got so far; an outcome is complete when its request has ended.

    Args:
        ended: called with each complete outcome, in the order in which requests end.
    """

    def __init__(self, ended: Callable[[Outcome], None] | None = None) -> None:
        self.keeps = False
        """Whether complete outcomes wait here until they are taken. Else they are dropped."""
        self._ended = ended
        self._live: dict[str, Outcome] = {}
        self._complete: dict[str, Outcome] = {}

    def add(self, empty: Outcome) -> None:
        """A request was taken in."""
        self._live[empty.request_id] = empty

    def of(self, request_id: str) -> Outcome | None:
        """What a request has got so far; None: it has ended."""
        return self._live.get(request_id)

    def end(self, request_id: str, num_tokens: int, finish_reason: str | None) -> Outcome | None:
        """A request has ended, with so many tokens; what was chosen beyond them is dropped.

        Returns its outcome; None: it is not known.
        """
        one = self._live.pop(request_id, None)
        if one is None:
            return None
        one.cut(num_tokens)
        one.finish_reason = finish_reason
        if self.keeps:
            self._complete[request_id] = one
        if self._ended is not None:
            self._ended(one)
        return one

    def take(self, request_id: str) -> Outcome:
        """Hand over the outcome of a request that has ended; `keeps` must have been set before.

        Raises:
            KeyError: there is none, or it was taken.
        """
        return self._complete.pop(request_id)
