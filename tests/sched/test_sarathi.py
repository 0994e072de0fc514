"""Stall-free chunks, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from simserve.errors import ConfigError
from simserve.sched.sarathi import SarathiScheduler
from tests.sched.harness import Row, assert_only, request, simulate

WORKLOAD = [
    request("a", 12, 4),
    request("b", 3, 5),
    request("c", 9, 2, at=1.5),
    request("d", 14, 3, at=2.5),
    request("e", 9, 2, at=4.5),
    request("f", 1, 3, at=5.5),
    request("g", 20, 1, at=7.5),
]
LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "long_prefill_token_threshold": 5,
    "options": {"chunk_size": 8},
}

# 8 tokens a step, at most 5 of one prompt. A step lasts 1 s: step k begins at k.
STEPS: list[Row] = [
    (["a", "b"], [5, 3]),  # b's prompt is complete: its first token
    (["b", "a"], [1, 5]),  # the decode goes before the chunk of a, who was there first
    (["b", "a", "c"], [1, 2, 5]),  # a's first token
    (["a", "b", "c", "d"], [1, 1, 4, 2]),  # c's first; d gets the 2 left
    (["a", "b", "c", "d"], [1, 1, 1, 5]),  # b has its 5 tokens, c its 2
    (["a", "d", "e"], [1, 5, 2]),  # a has its 4
    (["d", "e", "f"], [2, 5, 1]),  # d's and f's first
    (["d", "f", "e"], [1, 1, 2]),  # e's first
    (["d", "e", "f", "g"], [1, 1, 1, 5]),  # d and f have their 3, e its 2
    (["g"], [5]),
    (["g"], [5]),
    (["g"], [5]),
]


def test_record_is_nobody_elses() -> None:
    for budget in (8, 32):
        assert_only("sarathi", STEPS, WORKLOAD, **LIMITS, max_num_batched_tokens=budget)


def test_record_without_threshold_is_nobody_elses() -> None:
    workload = [
        request("a", 12, 4),
        request("b", 10, 3),
        request("c", 3, 5, at=1.5),
        request("d", 20, 2, at=3.5),
        request("e", 9, 2, at=5.5),
    ]
    expected: list[Row] = [
        (["a"], [8]),
        (["a", "b"], [4, 4]),  # a's first token
        (["a", "b", "c"], [1, 6, 1]),  # b's first
        (["a", "b", "c"], [1, 1, 2]),  # c's first
        (["a", "b", "c", "d"], [1, 1, 1, 5]),  # a has its 4, b its 3
        (["c", "d"], [1, 7]),
        (["c", "d"], [1, 7]),
        (["c", "d", "e"], [1, 1, 6]),  # d's last prompt token counts as a decode; c has its 5
        (["d", "e"], [1, 3]),  # d has its 2, e's first
        (["e"], [1]),
    ]
    assert_only("sarathi", expected, workload, max_num_seqs=4, options={"chunk_size": 8})


def test_what_ended_admission() -> None:
    stops = simulate("sarathi", WORKLOAD, **LIMITS | {"max_num_seqs": 3}).stops
    assert stops[3] == "max_num_seqs"
    stops = simulate("sarathi", [request("a", 20, 1), request("b", 9, 1)], **LIMITS).stops
    # 5+3, 5+3, 5+3, 5: b's last token counts as a decode
    assert stops == ["empty"] * 4
    stops = simulate(
        "sarathi", [request("a", 20, 1), request("b", 9, 1)], options={"chunk_size": 8}
    ).stops
    assert stops == ["budget", "budget", "empty", "empty"]


def test_decodes_run_even_beyond_the_chunk_size() -> None:
    run = simulate(
        "sarathi",
        [*(request(name, 1, 4) for name in "abc"), request("p", 2, 1, at=2.5)],
        max_num_seqs=4,
        options={"chunk_size": 2},
    )
    assert run.steps == [
        (["a", "b"], [1, 1]),
        (["a", "b"], [1, 1]),  # two decodes fill the chunk: c waits
        (["a", "b"], [1, 1]),
        (["a", "b"], [1, 1]),
        (["c", "p"], [1, 1]),
        (["c", "p"], [1, 1]),
        (["c"], [1]),
        (["c"], [1]),
    ]
    run = simulate(
        "sarathi",
        [request("a", 2, 5), request("b", 2, 4), request("c", 3, 2)],
        options={"chunk_size": 3},
    )
    assert run.steps[0] == (["a", "b"], [2, 1])
    assert run.steps[1] == (["a", "b", "c"], [1, 1, 1])
    assert run.steps[2] == (["a", "b", "c"], [1, 1, 1])
    assert run.steps[3] == (["a", "b", "c"], [1, 1, 1])


def test_a_prompt_under_way_gives_its_blocks_to_decodes() -> None:
    """4 usable blocks of 4 tokens; 6 tokens a step."""
    run = simulate(
        "sarathi",
        [request("a", 4, 6), request("b", 12, 1)],
        num_gpu_blocks=5,
        options={"chunk_size": 6},
    )
    assert run.steps == [
        (["a", "b"], [4, 2]),
        (["a", "b"], [1, 5]),  # two blocks each
        *[(["a"], [1])] * 3,  # b's last 5 tokens need a third one: it waits
        (["a"], [1]),  # now a needs a third one, and takes it from b; a has its 6 tokens
        (["b"], [6]),
        (["b"], [6]),
    ]
    assert run.preempted == [[], [], [], [], [], ["b"], [], []]


def test_of_prompts_that_block_each_other_the_last_gives_way() -> None:
    """4 usable blocks of 4 tokens; 6 tokens a step, at most 3 of one prompt."""
    run = simulate(
        "sarathi",
        [request("a", 12, 1), request("b", 12, 1)],
        num_gpu_blocks=5,
        long_prefill_token_threshold=3,
        options={"chunk_size": 6},
    )
    assert run.steps == [
        (["a", "b"], [3, 3]),
        (["a", "b"], [3, 3]),  # two blocks each
        ([], []),  # both need a third one
        (["a", "b"], [3, 3]),  # a has three, b begins again
        (["a"], [3]),  # b waits for a second one; a is complete
        (["b"], [3]),
        (["b"], [3]),
        (["b"], [3]),
    ]
    assert run.preempted[2] == ["b"]


def test_wrong_options_are_errors() -> None:
    for value in (0, -1, True, 2.5, "8", None):
        with pytest.raises(
            ConfigError, match=r"options.chunk_size: must be a whole number of at l"
        ):
            simulate("sarathi", [], options={"chunk_size": value})
    with pytest.raises(ConfigError, match=r"no such option \(did you mean 'chunk_size'\?\)"):
        simulate("sarathi", [], options={"chunksize": 8})
    with pytest.raises(ConfigError, match=r"33 is more than scheduler.max_num_batched_tokens \(32"):
        simulate("sarathi", [], options={"chunk_size": 33})
    with pytest.raises(
        ConfigError, match=r"enable_chunked_prefill: sarathi computes prompts in chu"
    ):
        simulate("sarathi", [], enable_chunked_prefill=False)


def test_default_chunk_size() -> None:
    for budget, chunk_size in ((2048, 512), (100, 100)):
        scheduler = simulate("sarathi", [], max_num_batched_tokens=budget).scheduler
        assert isinstance(scheduler, SarathiScheduler)
        assert scheduler.chunk_size == chunk_size
