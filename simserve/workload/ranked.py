"""Sequences ranked by the log-probabilities of a model: real beams, and the best of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from simserve.protocols import TokenOutcomes
from simserve.segments import Segments
from simserve.types import TraceRequest
from simserve.workload.beams import Beams
from simserve.workload.siblings import Siblings

__all__ = ["BestOf", "Choice", "RankedBeams", "RankedSearch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A sequence that is returned to the user."""

    request_id: str
    """Of the user."""
    index: int
    """Its rank: 0 is the best."""
    token_ids: tuple[int, ...]
    """Of a beam without the end-of-sequence token."""
    cumulative_logprob: float
    """Sum over its tokens, the end-of-sequence token included."""
    score: float
    """What it was ranked by."""
    finish_reason: str
    """`stop`: with an end-of-sequence token; `length`: without."""


class Hypothesis(NamedTuple):
    """A sequence so far."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedBeams:
    """Beam search over what a model finds likely (protocol `Method`).

    A round's candidates are the 2 · `beam_width` likeliest tokens behind each beam. Those that end
    a sequence are put aside, the `beam_width` best of the others go on, ties in the order of beams
    and tokens. A score is the sum of log-probabilities over the number of tokens, the prompt
    included, to the power of `length_penalty`, as vLLM v0.11.0 has it.
    """

    beam_width: int
    outcomes: TokenOutcomes
    chosen: Callable[[Choice], object]
    """Told of the `beam_width` best sequences of each search, the best first."""
    length_penalty: float = 1.0
    eos_token_id: int | None = None
    """None: no token ends a sequence."""
    early_stopping: bool = False

    def open(self, request: TraceRequest) -> Beams:
        """A search of its own."""
        asking = replace(request, logprobs=2 * self.beam_width)
        return Beams(asking, RankedSearch(self, request))


class RankedSearch:
    """One search (protocol `Search`)."""

    def __init__(self, method: RankedBeams, request: TraceRequest) -> None:
        self._method = method
        self._request = request
        self._prompt_len = request.prompt_len
        self._num_rounds = 0
        self._beams = [Hypothesis()]
        self._ended: list[Hypothesis] = []

    def beams(self) -> Sequence[Segments]:
        """The tokens of each beam behind the prompt."""
        return [((b.token_ids, len(b.token_ids)),) if b.token_ids else () for b in self._beams]

    def advance(self, request_ids: Sequence[str]) -> bool:
        """Rank all continuations; after the last round the best are told."""
        method, going_on = self._method, []
        for beam, request_id in zip(self._beams, request_ids, strict=True):
            for token_id, logprob in self._likeliest(request_id):
                total = beam.logprob + logprob
                if token_id == method.eos_token_id:
                    self._ended.append(Hypothesis(beam.token_ids, total, has_ended=True))
                else:
                    going_on.append(Hypothesis((*beam.token_ids, token_id), total))
        going_on.sort(key=self._score, reverse=True)
        self._beams = going_on[: method.beam_width]
        self._num_rounds += 1
        enough = method.early_stopping and len(self._ended) >= method.beam_width
        if self._num_rounds < self._request.output_len and self._beams and not enough:
            return True
        self._tell()
        return False

    def _likeliest(self, request_id: str) -> list[tuple[int, float]]:
        """The likeliest next tokens, and their log-probabilities."""
        outcome = self._method.outcomes.take(request_id)
        ids, logprobs = outcome.ids[0], outcome.logprobs[0]
        # The first is the token that the executor has drawn, whatever it was.
        return list(zip(ids[1:].tolist(), logprobs[1:].tolist(), strict=True))

    def _score(self, one: Hypothesis) -> float:
        length = self._prompt_len + len(one.token_ids)
        return float(one.logprob / length**self._method.length_penalty)

    def _tell(self) -> None:
        ranked = sorted([*self._ended, *self._beams], key=self._score, reverse=True)
        for index, one in enumerate(ranked[: self._method.beam_width]):
            self._method.chosen(
                Choice(
                    request_id=self._request.request_id,
                    index=index,
                    token_ids=one.token_ids,
                    cumulative_logprob=one.logprob,
                    score=self._score(one),
                    finish_reason="stop" if one.has_ended else "length",
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOf:
    """The likeliest of `best_of` sequences (protocol `Method`).

    A score is the sum of log-probabilities over the number of output tokens to the power of
    `length_penalty`; of equal ones the first sibling's.
    """

    best_of: int
    outcomes: TokenOutcomes
    chosen: Callable[[Choice], object]
    """Told of the best sequence of each request."""
    length_penalty: float = 0.0

    def open(self, request: TraceRequest) -> RankedSiblings:
        """Siblings that are compared when all have completed."""
        return RankedSiblings(self, request)


class RankedSiblings:
    """The siblings of one request, and which of them is returned (protocol `Group`)."""

    def __init__(self, method: BestOf, request: TraceRequest) -> None:
        self._method = method
        self._request = request
        self._requests = Siblings(
            replace(request, logprobs=request.logprobs or 0),
            [request.output_len] * method.best_of,
        ).first()
        self._num_waiting = len(self._requests)

    def first(self) -> Sequence[TraceRequest]:
        """All of them."""
        return self._requests

    def further(self, request_id: str, now_s: float) -> Sequence[TraceRequest]:
        """None; after the last has completed the best is told."""
        self._num_waiting -= 1
        if not self._num_waiting:
            best = max(map(self._choice, self._requests), key=lambda choice: choice.score)
            self._method.chosen(best)
        return ()

    def _choice(self, sibling: TraceRequest) -> Choice:
        outcome = self._method.outcomes.take(sibling.request_id)
        logprob, length = outcome.cumulative_logprob, len(outcome.token_ids)
        return Choice(
            request_id=self._request.request_id,
            index=0,
            token_ids=tuple(outcome.token_ids),
            cumulative_logprob=logprob,
            score=float(logprob / length**self._method.length_penalty),
            finish_reason=outcome.finish_reason or "length",
        )
