"""Time of the loop between steps: tokens come out before it, requests are taken in within it."""

from __future__ import annotations

import pytest

from tests.engine.rig import GappedCost, request, run

COST = GappedCost(1.0, after_request_s=0.25, take_in_s=0.125)


def test_tokens_come_out_before_the_gap() -> None:
    world = run([request("a", 1.0, 16, 3)], cost=COST)
    # Taken in at 1.125, then steps of 1 s with gaps of 0.25 s.
    assert world.log.arrived_s["a"] == 1.125
    assert world.log.token_s["a"] == [2.125, 3.375, 4.625]
    assert [step.start_s for step in world.log.steps] == [1.125, 2.375, 3.625]


@pytest.mark.parametrize("leap", [False, True])
def test_an_arrival_in_the_gap_joins_the_next_step(leap: bool) -> None:
    late = request("late", 3.25, 16, 2)  # the step before ended at 3.0, the next starts at 3.5
    world = run([request("a", 0.0, 16, 9), late], cost=GappedCost(1.0, 0.5, 0.0), leap=leap)
    assert world.log.token_s["a"][:3] == [1.0, 2.5, 4.0]
    assert world.log.steps[2].start_s == 3.0
    assert world.log.token_s["late"][0] == 6.0 - 0.5


def test_each_request_taken_in_delays_the_step_and_lets_further_ones_in() -> None:
    requests = [request("a", 0.0, 16, 1), request("b", 0.125, 16, 1), request("c", 0.2, 16, 1)]
    world = run(requests, cost=COST)
    # a is taken in until 0.125, b (due just then) until 0.25, and c until 0.375.
    assert world.log.arrived_s == {"a": 0.125, "b": 0.25, "c": 0.375}
    assert world.log.steps[0].shares == {"a": 16, "b": 16, "c": 16}
    assert world.log.steps[0].start_s == 0.375


def test_the_first_request_since_a_step_takes_longer_to_take_in() -> None:
    requests = [request(name, due, 16, 1) for name, due in (("a", 0.0), ("b", 0.0), ("c", 0.75))]
    world = run(requests, cost=GappedCost(1.0, 0.0, take_in_s=0.125, first_s=0.25))
    # The step takes from 0.5 to 1.5; c is the first after it.
    assert world.log.arrived_s == {"a": 0.375, "b": 0.5, "c": 1.875}


def test_without_a_loop_cost_steps_follow_at_once() -> None:
    world = run([request("a", 0.0, 16, 3)])
    assert world.log.token_s["a"] == [1.0, 2.0, 3.0]


def test_planning_ahead_hides_the_gap_after_steps() -> None:
    world = run([request("a", 0.0, 16, 3)], cost=COST, async_scheduling=True)
    assert world.log.token_s["a"] == [1.125, 2.125, 3.125]
