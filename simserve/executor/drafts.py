"""Made-up drafts: speculative decoding in simulation, where no model accepts or rejects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from simserve.types import Kind, StepPlan, TraceRequest

__all__ = ["DraftWindow", "MadeUpDrafter"]


class DraftWindow:
    """Whether a drafter is run after a step: as in vLLM, for nobody if one comes near the end.

    Args:
        num_speculative_tokens: k, the longest draft.
        max_model_len: tokens of a request, at most.
    """

    def __init__(self, num_speculative_tokens: int, max_model_len: int) -> None:
        self._most = max_model_len - num_speculative_tokens
        self._starts: dict[str, int] = {}
        """Where each request stood in its last step, as a model runner knows it."""

    def fits(self, plan: StepPlan) -> bool:
        """Whether k drafts of every request of the plan end within `max_model_len`."""
        for request_id in plan.finished_ids:
            self._starts.pop(request_id, None)
        known, ends = self._starts, []
        for request_id, start, count in zip(
            plan.request_ids, plan.starts, plan.num_tokens, strict=True
        ):
            if plan.kinds.get(request_id) is not Kind.GHOST:  # the runner is not told of ghosts
                known[request_id] = start
            ends.append(known.get(request_id, 0) + count)
        return max(ends) <= self._most


class MadeUpDrafter:
    """Drafts whose length and acceptance are functions of (request id, tokens generated so far).

    Args:
        method: `eagle` (also eagle3, mtp) drafts for every request of a step, partial prefills
            included; any other method only for requests that yielded a token.
        num_speculative_tokens: k, the longest draft.
        accepted: how many of k drafts are right, given (request id, tokens so far); cut to the
            drafts scheduled.
        draft_len: how long the next draft is, likewise.
        max_model_len: near it the drafter is not run for anybody, and old drafts stay.
    """

    def __init__(
        self,
        *,
        method: str,
        num_speculative_tokens: int,
        accepted: Callable[[str, int], int],
        draft_len: Callable[[str, int], int],
        max_model_len: int,
    ) -> None:
        self._is_eagle = method == "eagle"
        self._k = num_speculative_tokens
        self._accepted = accepted
        self._draft_len = draft_len
        self._window = DraftWindow(num_speculative_tokens, max_model_len)
        self._num_output_tokens: dict[str, int] = {}

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        self._num_output_tokens[request.request_id] = 0

    def emit(self, plan: StepPlan) -> Sequence[int]:
        """Tokens each request of the plan yields: accepted drafts and one more."""
        for request_id in plan.finished_ids:
            self._num_output_tokens.pop(request_id, None)
        emitted = []
        for request_id, samples in zip(plan.request_ids, plan.samples, strict=True):
            count = 0
            if samples:
                so_far = self._num_output_tokens[request_id]
                drafts = len(plan.draft_tokens.get(request_id, ()))
                count = 1 + (min(drafts, self._accepted(request_id, so_far)) if drafts else 0)
                self._num_output_tokens[request_id] = so_far + count
            emitted.append(count)
        return emitted

    def draft(self, plan: StepPlan, emitted: Sequence[int]) -> Mapping[str, Sequence[int]] | None:
        """New drafts per request, or None if the drafter is not run after this step."""
        if not self._window.fits(plan):
            return None
        drafts: dict[str, Sequence[int]] = {}
        for request_id, count in zip(plan.request_ids, emitted, strict=True):
            if self._is_eagle:
                length = self._k
            else:
                so_far = self._num_output_tokens[request_id]
                length = self._draft_len(request_id, so_far) if count else 0
            drafts[request_id] = (-1,) * length
        return drafts
