"""Drafts of real tokens: proposed after each step, verified by the model in the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simserve.executor.drafts import DraftWindow
from simserve.executor.ngram import NgramProposer
from simserve.executor.real.outcomes import Outcomes
from simserve.sampling import RequestSampling
from simserve.types import Kind, StepPlan

__all__ = ["Drafts", "LookupDrafts", "Speculation", "accepts_drafts"]

Drafts = Mapping[str, Sequence[int]]


class Known(Protocol):
    """What the executor knows of the requests that run."""

    outcomes: Outcomes

    def prompt(self, request_id: str) -> NDArray[np.int32]:
        """Its prompt."""
        ...

    def sampling(self, request_id: str) -> RequestSampling:
        """What it wants of its tokens."""
        ...


class Speculation(Protocol):
    """Proposes drafts."""

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Known) -> Drafts | None:
        """New drafts of the requests of a plan, which has run; [] clears them, None keeps all.

        Args:
            plan: what has run.
            emitted: tokens that each of its requests has got.
            known: those tokens, and what came before.
        """
        ...


def accepts_drafts(sampling: RequestSampling) -> bool:
    """Whether vLLM drafts for a request: not with penalties, min-p or log-probabilities."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return penalties == (0, 0, 1) and sampling.min_p == 0 and sampling.logprobs is None


class LookupDrafts:
    """Drafts that a request's own tokens hold (method ngram).

    None for requests that got no token or have no room for one; what `NgramProposer` calls a batch
    row is a request's place in the plan.
    """

    def __init__(self, proposer: NgramProposer) -> None:
        self._proposer = proposer
        self._window = DraftWindow(proposer.k, proposer.max_model_len)
        self._ids: dict[str, NDArray[np.int32]] = {}
        """All tokens of a request, and room for more."""
        self._counts: dict[str, int] = {}

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Known) -> Drafts | None:
        """See `Speculation`."""
        for request_id in plan.finished_ids:
            self._ids.pop(request_id, None)
            self._counts.pop(request_id, None)
        if not self._window.fits(plan):
            return None
        real = [
            (request_id, count)
            for request_id, count in zip(plan.request_ids, emitted, strict=True)
            if plan.kinds.get(request_id) is not Kind.GHOST
        ]
        rows = [self._row(request_id, known) if count else None for request_id, count in real]
        found = self._proposer.propose(rows)
        return dict(zip((request_id for request_id, _ in real), found, strict=True))

    def _row(self, request_id: str, known: Known) -> NDArray[np.int32] | None:
        """The tokens of a request, if it may have drafts."""
        if not accepts_drafts(known.sampling(request_id)):
            return None
        ids = self._all_ids(request_id, known)
        return ids if len(ids) < self._proposer.max_model_len else None

    def _all_ids(self, request_id: str, known: Known) -> NDArray[np.int32]:
        outcome = known.outcomes.of(request_id)
        assert outcome is not None, "a request that has got a token in this step is running"
        if request_id not in self._ids:
            prompt = known.prompt(request_id)
            ids = np.zeros(self._proposer.max_model_len + 1 + self._proposer.k, dtype=np.int32)
            ids[: len(prompt)] = prompt
            self._ids[request_id], self._counts[request_id] = ids, len(prompt)
        ids, first = self._ids[request_id], self._counts[request_id]
        said = outcome.token_ids[first - outcome.prompt_len :]
        self._counts[request_id] = end = first + len(said)
        ids[first:end] = said
        return ids[:end]
