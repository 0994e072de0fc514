"""What a draft model computes after a step, as the simulation prices it."""

from __future__ import annotations

import pytest

from simserve.executor.draft_cost import DraftCost
from simserve.protocols import Price
from simserve.types import StepPlan, StepRun


class PerToken:
    """One second a token of a draft model's pass; keeps what it was asked."""

    def __init__(self) -> None:
        self.runs: list[StepRun] = []

    def price(self, run: StepRun) -> Price:
        self.runs.append(run)
        return Price([float(sum(run.plan.num_tokens))] * run.count, {})


@pytest.mark.parametrize(("k", "drafts"), [(3, True), (1, True), (3, False)])
def test_it_keeps_up_and_then_decodes(k: int, drafts: bool) -> None:
    """A chunk, a prompt that ends, and a request of which one of two drafts was right."""
    plan = StepPlan(
        step=5,
        request_ids=["chunk", "ends", "runs"],
        starts=[0, 8, 20],
        num_tokens=[16, 4, 3],
        samples=[False, True, True],
        draft_tokens={"runs": (-1, -1)},
    )
    model = PerToken()
    price_s = DraftCost(0.5, model, k).price_s(plan, [0, 1, 2], drafts)
    first, *others = model.runs
    assert first.plan.starts == [0, 8, 20]
    assert first.plan.num_tokens == ([16, 5, 3] if drafts else [16, 4, 2])
    assert [(run.plan.starts, run.count) for run in others] == (
        [([13, 23], k - 1)] if drafts and k > 1 else []
    )
    assert price_s == 0.5 * drafts + sum(first.plan.num_tokens) + 2 * (k - 1) * drafts
