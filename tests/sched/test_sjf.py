"""Shortest remaining prompt first with ageing, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from simserve.errors import ConfigError
from tests.sched.harness import Row, assert_only, request, simulate

WORKLOAD = [
    request("a", 20, 2),
    request("b", 6, 3),
    request("c", 10, 2),
    request("d", 3, 2, at=1.5),
    request("e", 4, 1, at=2.5),
    request("f", 16, 2, at=3.5),
    request("g", 5, 2, at=4.5),
    request("h", 2, 1, at=7.5),
]
LIMITS = {"max_num_batched_tokens": 8}

# 8 tokens a step, at most 3 running, one token of ageing a step. A step lasts 1 s: step k begins
# at k. The rank is the tokens left plus the step of arrival.
STEPS: list[Row] = [
    (["b", "c"], [6, 2]),  # 6, then 10, then a's 20
    (["b", "c"], [1, 7]),
    (["b", "c", "d"], [1, 1, 3]),  # d came (3+2); c's last token counts as a decode; b has its 3
    (["c", "d", "e"], [1, 1, 4]),  # e came (4+3); c and d have their 2
    (["a"], [8]),  # f came (16+4): as good as a, who was there first
    (["g", "a"], [5, 3]),  # g came (5+5) and overtakes a (12+0)
    (["g", "a"], [1, 7]),  # g has its 2
    (["a", "f"], [2, 6]),
    (["a", "h", "f"], [1, 2, 5]),  # h came (2+8) and overtakes f (10+4)
    (["f"], [5]),
    (["f"], [1]),
]


def test_record_is_nobody_elses() -> None:
    assert_only("sjf", STEPS, WORKLOAD, **LIMITS)


def test_record_of_whole_prompts_is_nobody_elses() -> None:
    """32 tokens a step, no ageing: every kind can run this one."""
    workload = [
        request("a", 25, 3),
        request("b", 9, 2),
        request("c", 20, 4),
        request("d", 24, 2, at=1.5),
        request("e", 28, 2, at=1.5),
        request("f", 2, 3, at=4.5),
        request("g", 1, 2, at=7.5),
    ]
    expected: list[Row] = [
        (["b", "c"], [9, 20]),  # 29; a's 25 do not fit
        (["b", "c", "a"], [1, 1, 25]),  # b has its 2
        (["c", "a", "d"], [1, 1, 24]),
        (["c", "a", "d"], [1, 1, 1]),  # c has its 4, a its 3, d its 2
        (["e"], [28]),
        (["e", "f"], [1, 2]),  # e has its 2
        (["f"], [1]),
        (["f"], [1]),  # f has its 3
        (["g"], [1]),
        (["g"], [1]),
    ]
    run: dict[str, Any] = {"options": {"ageing_tokens_per_step": 0}}
    assert_only("sjf", expected, workload, enable_chunked_prefill=False, **run)


def test_ageing_lets_the_long_one_go_first() -> None:
    """Without it f (16) goes before a (20) in step 4, although it came four steps later."""
    run = simulate("sjf", WORKLOAD, **LIMITS, options={"ageing_tokens_per_step": 0})
    assert run.steps[:4] == STEPS[:4]
    assert run.steps[4] == (["f"], [8])


def test_what_ended_admission() -> None:
    stops = simulate("sjf", WORKLOAD, **LIMITS).stops
    full = "max_num_seqs"
    assert stops == ["budget", "budget", full, full, "budget", "budget", "budget", *["empty"] * 4]


def flood(num_steps: int) -> list[Any]:
    """A prompt of 20 tokens, and as many of 4 as the budget of 8 can take: two in each step."""
    shorts = [request(f"s{i}", 4, 1, at=max(0.0, i // 2 - 0.5)) for i in range(2 * num_steps)]
    return [request("long", 20, 1), *shorts]


def test_nobody_starves() -> None:
    """A short one of step s ranks 4 + s: from step 16 on it does not overtake the long one's 20."""
    run = simulate("sjf", flood(60), **LIMITS)
    first = next(step for step, (ids, _) in enumerate(run.steps) if "long" in ids)
    assert first == 16
    assert run.first_token["long"] == 18


def test_without_ageing_the_long_one_waits_for_the_end_of_the_flood() -> None:
    for num_steps in (30, 60):
        options = {"ageing_tokens_per_step": 0}
        run = simulate("sjf", flood(num_steps), **LIMITS, options=options)
        first = next(step for step, (ids, _) in enumerate(run.steps) if "long" in ids)
        assert first == num_steps


def test_of_prompts_that_block_each_other_the_longer_gives_way() -> None:
    """4 usable blocks of 4 tokens; 3 tokens a step."""
    run = simulate(
        "sjf",
        [request("a", 16, 1), request("b", 9, 1, at=1.5)],
        num_gpu_blocks=5,
        max_num_batched_tokens=3,
        options={"ageing_tokens_per_step": 0},
    )
    assert run.steps == [
        (["a"], [3]),
        (["a"], [3]),  # 10 left
        (["b"], [3]),  # b has come with 9
        (["b"], [3]),  # two blocks each
        ([], []),  # b needs a third one
        (["b"], [3]),  # a gave its back, although it was admitted first
        *[(["a"], [3])] * 5,
        (["a"], [1]),
    ]
    assert run.preempted[4] == ["a"]


def test_a_single_prompt_under_way_makes_room_for_a_shorter_one() -> None:
    """3 usable blocks of 4 tokens; b's 5 tokens need two at once, a holds two and 6 are left."""
    run = simulate(
        "sjf",
        [request("a", 12, 1), request("b", 5, 1, at=0.5)],
        num_gpu_blocks=4,
        max_num_batched_tokens=6,
        options={"ageing_tokens_per_step": 0},
    )
    assert run.steps == [
        (["a"], [6]),
        ([], []),
        (["b", "a"], [5, 1]),
        (["a"], [6]),
        (["a"], [5]),
    ]
    assert run.preempted[1] == ["a"]


def test_wrong_options_are_errors() -> None:
    for value in (-1, True, 0.5, "1"):
        with pytest.raises(ConfigError, match=r"must be a whole number of at least 0"):
            simulate("sjf", [], options={"ageing_tokens_per_step": value})
    with pytest.raises(ConfigError, match=r"did you mean 'ageing_tokens_per_step'"):
        simulate("sjf", [], options={"aging_tokens_per_step": 1})
    with pytest.raises(ConfigError, match=r"scheduler.policy: sjf orders the queue itself"):
        simulate("sjf", [], policy="priority")
    with pytest.raises(
        ConfigError, match=r"sjf without chunked prefill computes each prompt in one"
    ):
        simulate("sjf", [], enable_chunked_prefill=False, max_model_len=33)
