"""A scheduler of one's own that errs is named, whatever it does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import simserve
from simserve.engine.simulation import simulate
from simserve.errors import PluginError, StalledError
from simserve.executor.real.pace import TimedScheduler
from simserve.sched.base import BaseScheduler
from simserve.sched.checked import checked
from simserve.sched.fcfs_static import FcfsStaticScheduler
from simserve.sched.vllm import VllmScheduler
from simserve.types import StepPlan
from tests.engine import rig

BASE = {
    "model": "llama-3.1-8b",
    "workload": {"synthetic": {"num_requests": 2, "arrival": {"kind": "immediate"}}},
    "scheduler": {"kind": "own_plans:Own"},
}


class Planner(BaseScheduler):
    """Runs everybody one after the other; `spoil` changes a plan."""

    spoil: Callable[[Any, Any], Any] = lambda own, plan: plan

    def schedule(self) -> Any:
        plan = self.new_plan()
        for request in self.running:
            self.run_on(plan, request, request.num_tokens - request.num_computed_tokens)
        while self.waiting:
            self.admit(plan, self.waiting.peek(), self.waiting.peek().num_tokens, None)
        return type(self).spoil(self, plan)

    def update(self, plan: Any, result: Any) -> Any:
        return None if type(self).spoil is no_output else super().update(plan, result)


def many(own: Any, plan: Any) -> Any:
    plan.num_tokens[0] += 99
    return plan


def twice(own: Any, plan: Any) -> Any:
    for column in (plan.request_ids, plan.starts, plan.num_tokens, plan.samples):
        column.append(column[0])
    return plan


def unknown(own: Any, plan: Any) -> Any:
    plan.request_ids[0] = "nobody"
    return plan


def uneven(own: Any, plan: Any) -> Any:
    plan.samples.pop()
    return plan


def no_output(own: Any, plan: Any) -> Any:
    return plan


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> type[Planner]:
    module = ModuleType("own_plans")
    cls: type[Planner] = type("Own", (Planner,), {"__module__": "own_plans"})
    monkeypatch.setattr(module, "Own", cls, raising=False)
    monkeypatch.setitem(sys.modules, "own_plans", module)
    return cls


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (many, r"schedule\(\) \(step 0\) scheduled 1123 tokens of request 'r0', which lacks 1024"),
        (twice, r"schedule\(\) \(step 0\) scheduled request '\S+' twice"),
        (
            unknown,
            r"schedule\(\) \(step 0\) scheduled request 'nobody', which has ended or never arrived",
        ),
        (uneven, r"schedule\(\) \(step 0\) returned columns of different lengths"),
        (lambda own, plan: None, r"schedule\(\) returned None, not a StepPlan"),
        (no_output, r"update\(\) returned None, not a StepOutput"),
    ],
)
def test_a_wrong_plan_is_an_error_that_names_the_class(
    own: type[Planner], spoil: Callable[[Any, Any], Any], said: str
) -> None:
    own.spoil = spoil
    with pytest.raises(PluginError, match="own_plans:Own." + said):
        simserve.run(BASE)


def test_one_that_plans_nothing_is_not_told_to_have_more_blocks(own: type[Planner]) -> None:
    own.schedule = lambda self: self.new_plan()  # type: ignore[method-assign]
    with pytest.raises(StalledError, match="enough for each of them, but own_plans:Own has") as it:
        simserve.run(BASE)
    assert "num_gpu_blocks" not in str(it.value)


def test_it_is_named_behind_the_clock_of_a_real_run_too() -> None:
    world = rig.build([rig.request("a", 0.0, 16, 4)])
    parts, inner = world.engine._parts, world.scheduler
    inner.schedule = inner.new_plan  # type: ignore[method-assign]
    parts.scheduler = TimedScheduler(inner)
    assert "but simserve.sched.vllm:VllmScheduler has planned nothing" in simulate(parts).complaint


class _Keyed(Planner):
    def __init_subclass__(cls, *, tag: str) -> None:
        super().__init_subclass__()


class _OfItsOwn(_Keyed, tag="one"):
    """Its class cannot be subclassed in passing, and what it plans by is the object's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.schedule = lambda: twice(self, type(self).schedule(self))  # type: ignore[method-assign]


class _Closed:
    __slots__ = ()
    schedule = update = add_request = abort = unfinished = lambda self, *args: None
    num_running = num_waiting = 0

    def __init__(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("cls", "said"),
    [(_OfItsOwn, "scheduled request 'r0' twice"), (_Closed, "lets nobody look.*__slots__")],
)
def test_it_is_looked_at_however_it_is_made(cls: Any, said: str, own: Any) -> None:
    sys.modules["own_plans"].Own = cls  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=f"{cls.__qualname__}.*{said}"):
        simserve.run(BASE)


def test_a_right_scheduler_decides_as_without_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, preemptions and blocks that run out included."""
    monkeypatch.setitem(sys.modules, "own_plans", ModuleType("own_plans"))
    sys.modules["own_plans"].Own = VllmScheduler  # type: ignore[attr-defined]
    config = {
        **BASE,
        "kv_cache": {"num_gpu_blocks": 60},
        "workload": {
            "synthetic": {
                "num_requests": 30,
                "prompt_len": {"kind": "constant", "value": 100},
                "output_len": {"kind": "constant", "value": 80},
            }
        },
    }
    drafts = {"method": "eagle", "num_speculative_tokens": 3, "acceptance": 0.6}
    scheduler = {"policy": "priority", "max_model_len": 500, "speculative": drafts}
    own, built_in = (
        simserve.run({**config, "scheduler": {**scheduler, "kind": kind}}).summary_dict
        for kind in ("own_plans:Own", "vllm")
    )
    assert own["num_preemptions"] != 0
    for key in ("duration", "num_steps", "num_preemptions", "p99_itl_ms"):
        assert own[key] == built_in[key]
    looked_at = rig.build().scheduler
    assert checked(looked_at) is looked_at
    assert type(looked_at) is VllmScheduler


class _Resting(FcfsStaticScheduler):
    """In one step of five, nobody decodes but the one admitted first."""

    def decode(self, plan: StepPlan, budget: int) -> int:
        if self._num_steps % 5 or not self.running:
            return super().decode(plan, budget)
        return budget - self.run_or_preempt(plan, self.running[0], 1)


def test_nobody_promises_equal_steps_for_a_class_that_decides_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "own_plans", ModuleType("own_plans"))
    sys.modules["own_plans"].Own = _Resting  # type: ignore[attr-defined]
    lengths = {"prompt_len": 20, "output_len": 40}
    config = {
        **BASE,
        "workload": {"synthetic": {**BASE["workload"]["synthetic"], **lengths}},
        "scheduler": {**BASE["scheduler"], "max_model_len": 1024},
    }
    # Both prompts in step 0. Until the first ends in step 39, the second rests in 8 steps.
    assert simserve.run(config).summary_dict["num_steps"] == 48
