"""How busy the engine was, and what it did, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

New = Callable[..., Any]


def test_evictions_stand_at_their_steps(story: New) -> None:
    told = story(enable_prefix_caching=True)
    told.arrive("a")
    told.step([0.1, 0.1], {"a": 1}, evicted=[0, 3])
    told.step(0.1, {"a": 1}, evicted=[1], finished=["a"])
    result = told.result()
    assert result.steps_table["evicted_cached_blocks"].to_pylist() == [0, 3, 1]
    assert result.summary_dict["evicted_cached_blocks"] == 4


def test_peaks_are_of_one_second(story: New) -> None:
    told = story()
    told.arrive("a", at=100.0)
    told.now = 100.0
    told.step([0.25] * 8, {"a": 1}, finished=["a"])
    told.arrive("b", at=102.0)
    told.step([0.1] * 5, {"b": 1}, finished=["b"])
    summary = told.summary()
    # b, and its tokens at 102.1 to 102.5, share a second with a's last token, at 102.0.
    assert summary["max_output_tokens_per_s"] == 6.0
    assert summary["max_concurrent_requests"] == 2


def test_time_weighted_means_count_idle_time(story: New) -> None:
    told = story(num_gpu_blocks=11)
    told.arrive("a")
    told.step(1.0, {"a": 1}, free=[5], waiting=3, finished=["a"])
    told.arrive("b", at=3.0)
    told.now = 3.0
    told.step(1.0, {"b": 1}, free=[0], finished=["b"])
    summary = told.summary()
    assert summary["mean_kv_cache_usage"] == pytest.approx((0.5 + 1.0) / 4)
    assert summary["mean_num_running"] == 0.5
    assert summary["mean_num_waiting"] == 0.75
    assert summary["mean_concurrency"] == 0.5
    assert (summary["max_kv_cache_usage"], summary["min_free_blocks"]) == (1.0, 0)


def test_admission_stops_are_shares_of_steps(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step([1.0] * 3, {"a": 1}, stop="max_num_seqs")
    told.step(1.0, {"a": 1}, stop="mine", finished=["a"])
    result = told.result()
    stops = {k: v for k, v in result.summary_dict.items() if k.startswith("admission_stop_")}
    assert stops == {
        "admission_stop_budget": 0.0,
        "admission_stop_max_num_seqs": 0.75,
        "admission_stop_blocks": 0.0,
        "admission_stop_preemption": 0.0,
        "admission_stop_empty": 0.0,
        "admission_stop_mine": 0.25,
    }
    named = result.steps_table["admission_stop"].to_pylist()
    assert named == ["max_num_seqs"] * 3 + ["mine"]


def test_tokens_are_split_by_query_length(story: New) -> None:
    def split(threshold: int) -> tuple[int, int]:
        told = story(decode_threshold=threshold)
        told.arrive("a")
        told.arrive("b")
        told.step(1.0, {"a": 1, "b": 0}, tokens={"a": 3, "b": 40})
        told.step(1.0, {"a": 1, "b": 1}, finished=["a", "b"])
        summary = told.summary()
        return summary["num_decode_tokens"], summary["num_prefill_tokens"]

    assert split(1) == (2, 43)
    assert split(3) == (5, 40)


def test_parts_that_a_step_lacks_are_null(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step([1.0, 1.0], {"a": 1}, parts={"gpu_s": [0.7, 0.8]})
    told.step(0.0, {})
    told.step(1.0, {"a": 1}, parts={"gpu_s": [0.9], "host_s": [0.1]}, finished=["a"])
    table = told.result().steps_table
    assert table["parts.gpu_s"].to_pylist() == [0.7, 0.8, None, 0.9]
    assert table["parts.host_s"].to_pylist() == [None, None, None, 0.1]


def test_a_part_that_is_a_number_holds_for_every_step_of_its_run(story: New) -> None:
    """Whether a part comes as a number or as an array, and where it does not come at all."""
    told = story()
    told.arrive("a")
    told.step([1.0, 1.0, 2.0], {"a": 1}, parts={"gpu_s": 0.5, "host_s": [0.1, 0.2, 0.3]})
    told.step(1.0, {"a": 1}, parts={"gpu_s": [0.25]})
    told.step([1.0, 1.0], {"a": 1}, parts={"host_s": 1})
    parts = told.end().steps.parts
    nan = float("nan")
    assert np.array_equal(parts["gpu_s"], [0.5, 0.5, 0.5, 0.25, nan, nan], equal_nan=True)
    assert np.array_equal(parts["host_s"], [0.1, 0.2, 0.3, nan, 1, 1], equal_nan=True)
