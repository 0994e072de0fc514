"""Heat: what steps with prefills leave behind, and what it costs the steps after them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simserve.config.presets import load_gpu, load_model
from simserve.cost.heat import Heat
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import Clock, load_profile
from simserve.types import StepPlan, StepRun


def test_heat_follows_work_and_is_forgotten_under_decodes() -> None:
    heat = Heat()
    assert heat.before(0) == 0.0
    for step in range(50):
        heat.passed(step, 1000, 0.025)
    assert heat.before(50) == pytest.approx(40_000, rel=0.01)
    later = [heat.before(step) for step in range(50, 120)]
    assert all(b < a for a, b in pairwise(later))
    assert later[15] == pytest.approx(10_000, rel=0.01)
    assert heat.before(np.arange(50, 120)).tolist() == later
    assert heat.before(49) == 0.0, "a step that does not come after the last begins anew"


@pytest.fixture
def cost(tmp_path: Path) -> ProfileCost:
    profile = load_profile("h200-llama-3.1-8b-simserve")
    clock = Clock(prefills=0.3, decodes=0.1)
    path = tmp_path / "p.json"
    path.write_text(profile.model_copy(update={"clock": clock}).model_dump_json())
    return ProfileCost(load_model("llama-3.1-8b"), load_gpu("h200"), path=path)


def seconds(cost: ProfileCost, step: int, tokens: int, count: int = 1) -> list[float]:
    plan = StepPlan(step, request_ids=["a"], starts=[512], num_tokens=[tokens], samples=[True])
    return cost.price(StepRun(plan, count)).durations_s


def test_prompts_after_prompts_take_longer_than_after_decodes(cost: ProfileCost) -> None:
    first, second, third = (seconds(cost, step, 1024)[0] for step in range(3))
    assert first < second < third < 1.3 * first
    rested = seconds(cost, 100, 1024)[0]
    assert first < rested < second
    assert seconds(cost, 0, 1024)[0] == first


def test_decodes_priced_at_once_cost_what_each_does(cost: ProfileCost) -> None:
    seconds(cost, 0, 2048)
    at_once = seconds(cost, 1, 1, count=20)
    assert at_once[0] > at_once[-1]
    plan = StepPlan(5, request_ids=["a"], starts=[516], num_tokens=[1], samples=[True])
    assert cost.price(StepRun(plan)).durations_s == [at_once[4]], "after a run that was cut short"
