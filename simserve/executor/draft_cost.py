"""What making drafts costs in simulation: time that a step with drafting takes longer."""

from __future__ import annotations

from collections.abc import Sequence

from simserve.protocols import CostModel
from simserve.types import StepPlan, StepRun

__all__ = ["DraftCost"]


class DraftCost:
    """Host time, and the passes of a draft model.

    A draft model computes the step's right tokens too, for their keys and values, together with the
    token that each request has got, which gives the first draft; then it decodes k − 1 times.

    Args:
        host_s: time of the host (seconds).
        model: prices steps of the draft model; None: there is none.
        num_speculative_tokens: k.
    """

    def __init__(
        self, host_s: float, model: CostModel | None = None, num_speculative_tokens: int = 0
    ) -> None:
        self._host_s = host_s
        self._model = model
        self._k = num_speculative_tokens

    def price_s(self, plan: StepPlan, emitted: Sequence[int], drafts: bool) -> float:
        """Seconds after a step.

        Args:
            plan: what has run.
            emitted: tokens that its requests got.
            drafts: whether drafts are made; if not, a draft model still keeps up with the tokens.
        """
        seconds = self._host_s if drafts else 0.0
        if self._model is not None:
            first, decodes = self._passes(plan, emitted, drafts)
            seconds += sum(self._model.price(StepRun(first)).durations_s)
            if decodes.request_ids and self._k > 1:
                seconds += sum(self._model.price(StepRun(decodes, self._k - 1)).durations_s)
        return float(seconds)

    def _passes(
        self, plan: StepPlan, emitted: Sequence[int], drafts: bool
    ) -> tuple[StepPlan, StepPlan]:
        """The pass over the step's tokens, and the first of those of one token."""
        shared = plan.num_shared_kv_tokens
        first, decodes = (StepPlan(step=plan.step, num_shared_kv_tokens=shared) for _ in range(2))
        rows = zip(plan.request_ids, plan.starts, plan.num_tokens, emitted, strict=True)
        for request_id, start, num_tokens, count in rows:
            wrong = len(plan.draft_tokens.get(request_id, ())) - max(0, count - 1)
            known = num_tokens - wrong + (drafts and count > 0)
            _add(first, request_id, start, known, count > 0)
            if drafts and count:
                _add(decodes, request_id, start + known, 1, True)
        return first, decodes


def _add(plan: StepPlan, request_id: str, start: int, num_tokens: int, samples: bool) -> None:
    plan.request_ids.append(request_id)
    plan.starts.append(start)
    plan.num_tokens.append(num_tokens)
    plan.samples.append(samples)
