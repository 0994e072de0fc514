"""Beam search as vLLM v0.11.0's front end does it: rounds of one-token requests.

Each round asks for one token of every beam, with the log-probabilities of the 2W likeliest ones,
keeps the W best of all continuations, and sends them as prompts of the next round. What beams have
in common is shared through the prefix cache alone, in full blocks. Continuations that end are put
aside; they make no room: a round has W requests until the last, `output_len` rounds in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from simserve.segments import Part, Segments
from simserve.types import TraceRequest
from simserve.workload.siblings import draws_of

__all__ = ["Beams", "DrawnForks", "DrawnSearch", "Search"]


class Search(Protocol):
    """What is kept from round to round."""

    def beams(self) -> Sequence[Segments]:
        """The tokens of each beam behind the prompt; one beam without tokens at first."""
        ...

    def advance(self, request_ids: Sequence[str]) -> bool:
        """Choose the next beams; whether the search goes on. `request_ids`: of the last round."""
        ...


class Beams:
    """The rounds of one search (protocol `Group`). Request i of round r of `a` is `a/r-i`.

    Args:
        request: of the user; its `output_len` is the number of rounds.
        search: chooses the beams.
    """

    def __init__(self, request: TraceRequest, search: Search) -> None:
        self._request = request
        self._search = search
        self._num_rounds = 0
        self._round: list[TraceRequest] = []
        self._num_waiting = 0
        """Requests of the round that have not completed."""

    def first(self) -> Sequence[TraceRequest]:
        """One request: the prompt."""
        return self._next_round(self._request.arrival_s)

    def further(self, request_id: str, now_s: float) -> Sequence[TraceRequest]:
        """The next round when the last of a round has completed; none after the last round."""
        self._num_waiting -= 1
        if self._num_waiting:
            return ()
        goes_on = self._search.advance([request.request_id for request in self._round])
        if not goes_on or self._num_rounds == self._request.output_len:
            return ()
        return self._next_round(now_s)

    def _next_round(self, now_s: float) -> Sequence[TraceRequest]:
        whole = self._request
        self._round = [
            replace(
                whole,
                request_id=f"{whole.request_id}/{self._num_rounds}-{i}",
                arrival_s=now_s,
                prompt=whole.prompt + tokens,
                output_len=1,
                output=None,
                group=whole.request_id,
            )
            for i, tokens in enumerate(self._search.beams())
        ]
        self._num_waiting = len(self._round)
        self._num_rounds += 1
        return self._round


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnForks:
    """Beam search without log-probabilities: who survives is drawn (protocol `Method`).

    After the first round all `beam_width` beams continue the prompt. After each later one, beam i
    of the next round continues beam i of this one with probability 1 - `fork_probability`, else
    one of the others, all alike. Besides, each beam of a round finds a finished continuation with
    probability `end_probability`; with `early_stopping` the search ends when there are
    `beam_width` of them. The draws depend on the request's id and `seed`.
    """

    beam_width: int
    fork_probability: float = 0.0
    end_probability: float = 0.0
    early_stopping: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.beam_width < 1:
            raise ValueError(f"beam_width must be at least 1, got {self.beam_width}")
        for name in ("fork_probability", "end_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    def open(self, request: TraceRequest) -> Beams:
        """A search of its own."""
        search = DrawnSearch(self, request.request_id, draws_of(request, self.seed))
        # Nobody looks at them here, but they take time where the choice of tokens is priced.
        return Beams(replace(request, logprobs=2 * self.beam_width), search)


class DrawnSearch:
    """A search whose forks are drawn (protocol `Search`).

    Tokens are named by lineages: of the beams that continue one beam, the first lengthens the
    segment it ends in, each other one begins a segment of its own. So beams have equal segments as
    far as they have equal tokens, and no longer.
    """

    def __init__(self, method: DrawnForks, name: str, rng: np.random.Generator) -> None:
        self._method = method
        self._name = name
        self._rng = rng
        self._beams: list[Segments] = [()]
        self._num_lineages = 0
        self._num_finished = 0

    def beams(self) -> Sequence[Segments]:
        """The tokens of each beam behind the prompt."""
        return self._beams

    def advance(self, request_ids: Sequence[str]) -> bool:
        """Draw who is continued."""
        method, rng = self._method, self._rng
        self._num_finished += int(rng.binomial(len(self._beams), method.end_probability))
        origins = self._origins()
        first = {origin: i for i, origin in reversed(list(enumerate(origins)))}
        self._beams = [
            self._continued(self._beams[origin], first[origin] == i)
            for i, origin in enumerate(origins)
        ]
        return not (method.early_stopping and self._num_finished >= method.beam_width)

    def _origins(self) -> list[int]:
        """Which beam each of the next ones continues."""
        width, count = self._method.beam_width, len(self._beams)
        if count == 1:
            return [0] * width
        forks = self._rng.random(width) < self._method.fork_probability
        shifts = self._rng.integers(1, count, size=width)
        own = np.arange(width)
        return list(map(int, np.where(forks, (own + shifts) % count, own)))

    def _continued(self, beam: Segments, is_first: bool) -> Segments:
        if beam and is_first:
            *before, (segment, length) = beam
            return (*before, (segment, length + 1))
        lineage: Part = (f"{self._name}/beam{self._num_lineages}", 1)
        self._num_lineages += 1
        return (*beam, lineage)
