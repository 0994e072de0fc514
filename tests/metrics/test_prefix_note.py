"""Why a prefix cache never hit is said where it never did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simserve.types import Lookups

New = Callable[..., Any]


@pytest.mark.parametrize(
    ("prompts", "evicted", "says"),
    [
        ([{"prompt": (("s", 16),)}, {"prompt": (("s", 16),)}], 0, "longer than one block"),
        ([{"prompt": 40}, {"prompt": 40}], 0, "common full block of 16"),
        ([{"prompt": (((1,) * 40, 40),)}, {"prompt": (((1,) * 30, 30),)}], 0, "not in the cache"),
        ([{"prompt": (("s", 40),), "cache_salt": c} for c in "xy"], 0, "differ in cache salt"),
        ([{"prompt": (("s", 40),), "lora_id": i} for i in (1, 2)], 0, "differ in cache salt"),
        ([{"prompt": (("s", 40),)}, {"prompt": (("s", 90),)}], 7, "7 cached blocks were evicted"),
    ],
)
def test_a_cache_without_hits_says_why(
    story: New, prompts: list[dict[str, Any]], evicted: int, says: str
) -> None:
    told = story(enable_prefix_caching=True)
    for k, prompt in enumerate(prompts):
        told.arrive(str(k), **prompt)
        told.step(
            1.0,
            {str(k): 1},
            lookups=Lookups(1, 40, 0),
            finished=[str(k)],
            evicted=[0 if k else evicted],
        )
    summary = told.summary()
    assert says in summary["prefix_cache_note"]
    assert (summary["prefix_cache_queries"], summary["prefix_cache_hits"]) == (80, 0)
    assert summary["prefix_cache_hit_rate"] == 0.0
    assert summary["evicted_cached_blocks"] == evicted


def test_a_cache_with_hits_needs_no_note_and_one_that_is_off_is_null(story: New) -> None:
    told = story(enable_prefix_caching=True)
    told.arrive("a")
    told.requests["a"].num_cached_tokens = 32
    told.step(1.0, {"a": 1}, lookups=Lookups(1, 40, 32), finished=["a"])
    summary = told.summary()
    assert summary["prefix_cache_note"] is None
    assert summary["prefix_cache_hit_rate"] == 0.8
    assert summary["total_cached_tokens"] == 32
    told = story(enable_prefix_caching=False)
    told.arrive("a")
    told.step(1.0, {"a": 1}, finished=["a"])
    result = told.result()
    assert [v for k, v in result.summary_dict.items() if k.startswith("prefix_cache")] == [None] * 4
    assert result.steps_table["prefix_cache_hits"].to_pylist() == [None]
