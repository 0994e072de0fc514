"""Static batching, step by step."""

from __future__ import annotations

import pytest

from simserve.errors import ConfigError
from tests.sched.harness import assert_only, request, simulate

WORKLOAD = [
    request("a", 10, 3),
    request("b", 12, 6),
    request("c", 15, 2),
    request("d", 5, 4),
    request("e", 8, 2, at=2.5),
    request("f", 30, 2, at=7.2),
]

# Budget 32, at most 3 running. A step lasts 1 s: step k begins at k.
STEPS = [
    (["a", "b"], [10, 12]),  # c's 15 do not fit into the 10 left; d, which would, is behind it
    (["a", "b"], [1, 1]),
    (["a", "b"], [1, 1]),  # a has its 3 tokens
    (["b"], [1]),  # e has come; nobody joins
    (["b"], [1]),
    (["b"], [1]),  # b has its 6
    (["c", "d", "e"], [15, 5, 8]),  # the next batch: 28 tokens, 3 requests
    (["c", "d", "e"], [1, 1, 1]),  # c and e have their 2
    (["d"], [1]),  # f has come
    (["d"], [1]),  # d has its 4
    (["f"], [30]),
    (["f"], [1]),
]


def test_record_is_nobody_elses() -> None:
    assert_only("fcfs_static", STEPS, WORKLOAD)


def test_what_ended_admission() -> None:
    stops = simulate("fcfs_static", WORKLOAD).stops
    assert stops == ["budget", *["batch"] * 5, "empty", "empty", "batch", "batch", "empty", "empty"]


def test_a_preempted_request_waits_for_the_next_batch() -> None:
    """3 usable blocks of 4 tokens. Both prompts take one; a's 5th token takes the last one."""
    run = simulate(
        "fcfs_static",
        [request("a", 4, 6), request("b", 4, 3), request("c", 4, 1, at=0.5)],
        num_gpu_blocks=4,
    )
    assert run.steps == [
        (["a", "b"], [4, 4]),
        (["a"], [1]),  # b finds no block for its 5th token: it is preempted, with 1 token out
        (["a"], [1]),
        (["a"], [1]),
        (["a"], [1]),
        (["a"], [1]),  # a has its 6
        (["b", "c"], [5, 4]),  # b computes its prompt and its first token again
        (["b"], [1]),
    ]
    assert run.preempted[1] == ["b"]
    assert run.finished == [("a", 5), ("c", 6), ("b", 7)]


def test_priority_orders_the_queue() -> None:
    run = simulate(
        "fcfs_static",
        [request("a", 20, 1, priority=1), request("b", 20, 1, priority=0)],
        policy="priority",
    )
    assert run.steps == [(["b"], [20]), (["a"], [20])]


def test_a_cached_prefix_is_not_computed_again() -> None:
    shared = (("template", 10),)
    run = simulate(
        "fcfs_static",
        [request("a", shared, 1), request("b", shared, 1, at=0.5)],
        enable_prefix_caching=True,
    )
    assert run.steps == [(["a"], [10]), (["b"], [2])]
    assert [plan.lookups for plan in run.plans] == [(1, 10, 0), (1, 10, 8)]


def test_a_budget_that_a_prompt_may_exceed_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens: .* 32 must be at least max_model_"
    ):
        simulate("fcfs_static", [], max_model_len=33)


def test_thresholds_and_options_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold: .* leave it 0"):
        simulate("fcfs_static", [], long_prefill_token_threshold=8)
    with pytest.raises(ConfigError, match=r"scheduler.options.chunk_size: .* it has none"):
        simulate("fcfs_static", [], options={"chunk_size": 8})
