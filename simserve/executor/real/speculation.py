"""Drafts of real tokens: proposed after each step, verified by the model in the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from simserve.executor.drafts import DraftWindow
from simserve.executor.ngram import NgramProposer
from simserve.executor.real.draft_model import DraftModel, DraftRequest
from simserve.executor.real.outcomes import Outcomes
from simserve.executor.real.request_rows import RequestRows
from simserve.executor.real.runner import StepTimes
from simserve.sampling import RequestSampling
from simserve.types import Kind, StepPlan

__all__ = ["Drafted", "LookupDrafts", "ModelDrafts", "Speculation"]


class Drafted(NamedTuple):
    """What was proposed after a step."""

    tokens: Mapping[str, Sequence[int]] | None
    """New drafts of requests; [] clears them, None keeps all."""
    passes: StepTimes | None = None
    """Times of a draft model's passes."""


class Known(Protocol):
    """What the executor knows of the requests that run."""

    outcomes: Outcomes
    rows: RequestRows

    def prompt(self, request_id: str) -> NDArray[np.int32]:
        """Its prompt."""
        ...

    def sampling(self, request_id: str) -> RequestSampling:
        """What it wants of its tokens."""
        ...


class Speculation(Protocol):
    """Proposes drafts."""

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Known) -> Drafted:
        """New drafts of the requests of a plan, which has run.

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

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Known) -> Drafted:
        """See `Speculation`."""
        for request_id in plan.finished_ids:
            self._ids.pop(request_id, None)
            self._counts.pop(request_id, None)
        if not self._window.fits(plan):
            return Drafted(None)
        real = [
            (request_id, count)
            for request_id, count in zip(plan.request_ids, emitted, strict=True)
            if plan.kinds.get(request_id) is not Kind.GHOST
        ]
        rows = [self._row(request_id, known) if count else None for request_id, count in real]
        found = self._proposer.propose(rows)
        return Drafted(dict(zip((request_id for request_id, _ in real), found, strict=True)))

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


class ModelDrafts:
    """Drafts of a smaller model (method draft_model): at each place the token it finds likeliest.

    Such a draft is certain, as one that was looked up is: drawing from the model and keeping the
    draft where it is what was drawn leaves the distribution as it is. The draft model keeps up with
    every step, also when nobody gets drafts.

    Args:
        model: the draft model.
        num_speculative_tokens: k.
        max_model_len: tokens of a request, at most.
    """

    def __init__(self, model: DraftModel, num_speculative_tokens: int, max_model_len: int) -> None:
        self._model = model
        self._k = num_speculative_tokens
        self._window = DraftWindow(num_speculative_tokens, max_model_len)

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Known) -> Drafted:
        """See `Speculation`."""
        k = self._k if self._window.fits(plan) else 0
        requests = {}
        columns = zip(plan.request_ids, plan.starts, plan.num_tokens, emitted, strict=True)
        for request_id, start, num_tokens, count in columns:
            if plan.kinds.get(request_id) is not Kind.GHOST:
                num_wrong = len(plan.draft_tokens.get(request_id, ())) - max(0, count - 1)
                end = start + num_tokens - num_wrong
                room = min(k, known.rows.num_slots(request_id) - end) if count else 0
                requests[request_id] = DraftRequest(
                    known.rows.of[request_id], start, end - start, max(0, room)
                )
        drafts, passes = self._model.run(list(requests.values()))
        return Drafted(dict(zip(requests, drafts, strict=True)) if k else None, passes)
