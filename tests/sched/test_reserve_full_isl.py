"""`scheduler_reserve_full_isl`: a request is admitted only if all its tokens would find blocks.

Blocks of 16 tokens, 9 usable ones. `first` has 64 prompt tokens; 32 tokens a step.
"""

from __future__ import annotations

from typing import Any

import pytest

import simserve
from simserve.errors import ConfigError
from tests.sched.harness import Trail, request, simulate

FIRST = request("first", 64, 60)


def walk(*requests: Any, reserve: bool = True, **more: Any) -> Trail:
    options = {"num_gpu_blocks": 10, "max_model_len": 256, "enable_prefix_caching": True} | more
    return simulate("vllm", requests, block_size=16, scheduler_reserve_full_isl=reserve, **options)


def step_of(trail: Trail, request_id: str) -> int:
    """The step in which a request was first scheduled."""
    return next(i for i, (ids, _) in enumerate(trail.steps) if request_id in ids)


def test_the_first_chunk_is_not_enough() -> None:
    # At step 2 `first` has 5 blocks: 4 are free, the second needs 6, its chunk of 31 tokens 2.
    second = request("second", 96, 4, at=1.5)
    assert step_of(walk(FIRST, second, reserve=False), "second") == 2
    reserved = walk(FIRST, second)
    assert reserved.stops[2] == "blocks"
    finished = dict(reserved.finished)
    assert step_of(reserved, "second") == finished["first"] + 1


def test_exactly_enough_is_enough() -> None:
    assert step_of(walk(FIRST, request("second", 64, 4, at=1.5)), "second") == 2
    assert step_of(walk(FIRST, request("second", 65, 4, at=1.5)), "second") > 2


def test_it_prevents_the_preemptions_that_later_chunks_would_cause() -> None:
    requests = [FIRST, request("second", 96, 4, at=1.5)]
    assert any(walk(*requests, reserve=False).preempted)
    assert not any(walk(*requests).preempted)


def test_hits_in_use_need_no_free_block() -> None:
    # 64 tokens are those of `first`: 4 blocks are shared, and of 6 only 2 are needed.
    second = request("second", ((("first/prompt"), 64), ("own", 32)), 4, at=1.5)
    assert step_of(walk(FIRST, second), "second") == 2


def test_hits_that_nobody_uses_are_taken_out_of_the_free_blocks() -> None:
    # `gone` leaves 4 cached blocks; `first` then holds 5 of 9, which leaves just these 4 free.
    gone = request("gone", 64, 1)
    first = request("first", 64, 60, at=4.0)
    fits = request("fits", ((("gone/prompt"), 48), ("own", 16)), 4, at=6.5)
    lacks = request("lacks", ((("gone/prompt"), 48), ("own", 17)), 4, at=6.5)
    assert step_of(walk(gone, first, fits), "fits") == 5
    assert step_of(walk(gone, first, lacks), "lacks") > 5


def test_a_resumed_request_needs_blocks_for_its_outputs_too() -> None:
    # Both decode until the pool is full; the later one is preempted with outputs of its own and
    # waits until the other has ended, although its prompt alone would have fitted before.
    requests = [request("a", 48, 70), request("b", 32, 60)]
    trail = walk(*requests, enable_prefix_caching=False)
    (step,) = [i for i, ids in enumerate(trail.preempted) if ids == ["b"]]
    resumed = next(i for i in range(step + 1, len(trail.steps)) if "b" in trail.steps[i][0])
    assert resumed == dict(trail.finished)["a"] + 1
    plain = walk(*requests, enable_prefix_caching=False, reserve=False)
    assert plain.preempted != trail.preempted


@pytest.mark.parametrize(
    ("scheduler", "reserves"),
    [
        ({}, False),
        ({"compat": "0.20.2"}, True),
        ({"compat": "0.20.2", "scheduler_reserve_full_isl": False}, False),
        ({"scheduler_reserve_full_isl": True}, True),
        ({"compat": "0.20.2", "kind": "sarathi"}, False),
    ],
)
def test_compat_decides_unless_the_key_is_given(scheduler: dict[str, Any], reserves: bool) -> None:
    from simserve.config.loader import load_config

    loaded = load_config(
        {"model": "llama-3.1-8b", "workload": {"synthetic": {}}, "scheduler": scheduler}
    )
    assert loaded.config.scheduler.scheduler_reserve_full_isl is reserves


def test_other_kinds_do_not_have_it() -> None:
    config = {
        "model": "llama-3.1-8b",
        "workload": {"synthetic": {}},
        "scheduler": {"kind": "sarathi", "scheduler_reserve_full_isl": True},
    }
    with pytest.raises(ConfigError, match="kind vllm has it, not 'sarathi'"):
        simserve.run(config)
