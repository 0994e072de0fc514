"""Prefill first, step by step."""

from __future__ import annotations

import pytest

from simserve.errors import ConfigError
from tests.sched.harness import assert_only, request, simulate

WORKLOAD = [
    request("a", 10, 4),
    request("b", 12, 5),
    request("c", 15, 3),
    request("d", 5, 3, at=1.5),
    request("e", 20, 2, at=2.5),
    request("f", 9, 3, at=7.5),
    request("g", 9, 2, at=8.5),
]

# Budget 32, at most 3 running. A step lasts 1 s: step k begins at k.
STEPS = [
    (["a", "b"], [10, 12]),  # c's 15 do not fit into the 10 left
    (["c"], [15]),  # before a and b get their second token
    (["a", "b", "c"], [1, 1, 1]),  # d has come, but 3 are running
    (["a", "b", "c"], [1, 1, 1]),  # c has its 3 tokens; e has come
    (["d"], [5]),  # in c's place; e waits for another one
    (["a", "b", "d"], [1, 1, 1]),  # a has its 4
    (["e"], [20]),
    (["b", "d", "e"], [1, 1, 1]),  # b has its 5, d its 3, e its 2
    (["f"], [9]),
    (["g"], [9]),  # f waits for its second token
    (["f", "g"], [1, 1]),  # g has its 2
    (["f"], [1]),
]


def test_record_is_nobody_elses() -> None:
    assert_only("prefill_first", STEPS, WORKLOAD)


def test_what_ended_admission() -> None:
    full = "max_num_seqs"
    assert simulate("prefill_first", WORKLOAD).stops == [
        *["budget", "empty", full, full, full, full],
        *["empty"] * 6,
    ]


def test_the_request_admitted_last_is_preempted_and_recomputed() -> None:
    """4 usable blocks of 4 tokens: a and b need a third one each for their 9th computed token."""
    run = simulate(
        "prefill_first",
        [request("a", 4, 6), request("b", 4, 6), request("c", 8, 1, at=4.5)],
        num_gpu_blocks=5,
    )
    assert run.steps == [
        (["a", "b"], [4, 4]),
        *[(["a", "b"], [1, 1])] * 4,
        (["a"], [1]),  # c finds no blocks; a takes one of b's, and has its 6 tokens
        (["b"], [9]),  # prompt and 5 tokens again, the 6th comes out
        (["c"], [8]),
    ]
    assert run.preempted[5] == ["b"]
    assert run.stops[5:] == ["blocks", "blocks", "empty"]


def test_a_step_holds_whole_prompts_or_decodes() -> None:
    run = simulate("prefill_first", WORKLOAD, enable_chunked_prefill=False)
    assert run.steps == STEPS


def test_a_budget_that_a_prompt_may_exceed_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens: .* 32 must be at least max_model_"
    ):
        simulate("prefill_first", [], max_model_len=33)


def test_thresholds_and_options_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold: .* leave it 0"):
        simulate("prefill_first", [], long_prefill_token_threshold=8)
    with pytest.raises(ConfigError, match=r"scheduler.options.chunk_size: .* it has none"):
        simulate("prefill_first", [], options={"chunk_size": 8})
