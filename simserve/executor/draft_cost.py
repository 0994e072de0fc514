"""What making drafts costs in simulation: time that a step with drafting takes longer."""

from __future__ import annotations

from collections.abc import Sequence

from simserve.protocols import CostModel
from simserve.types import StepPlan, StepRun

__all__ = ["DraftCost"]


class DraftCost:
    """Host time, and the passes of a draft model.

    A draft model computes the step's tokens too, for their keys and values, and then decodes k
    tokens one after the other for every request that got a token.

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
            seconds += sum(self._model.price(StepRun(plan)).durations_s)
            decodes = self._decodes(plan, emitted)
            if drafts and decodes.request_ids:
                seconds += sum(self._model.price(StepRun(decodes, self._k)).durations_s)
        return float(seconds)

    def _decodes(self, plan: StepPlan, emitted: Sequence[int]) -> StepPlan:
        """The first of the draft model's own steps."""
        decodes = StepPlan(step=plan.step)
        rows = zip(plan.request_ids, plan.starts, plan.num_tokens, emitted, strict=True)
        for request_id, start, num_tokens, count in rows:
            if count:
                verified = len(plan.draft_tokens.get(request_id, ()))
                decodes.request_ids.append(request_id)
                decodes.starts.append(start + num_tokens - verified + count - 1)
                decodes.num_tokens.append(1)
                decodes.samples.append(True)
        return decodes
