"""What a recorder must be told, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simserve.errors import SimserveError
from simserve.types import Status

New = Callable[..., Any]


def test_what_is_unfinished_is_running_or_queued(story: New) -> None:
    told = story()
    for name in "abc":
        told.arrive(name)
    told.step(1.0, {"a": 1, "b": 1}, finished=["b"])
    told.requests["a"].status = Status.RUNNING
    summary = told.result().summary_dict
    assert [summary[k] for k in ("num_prompts", "completed", "running", "queued")] == [3, 1, 1, 1]
    assert summary["mean_ttft_ms"] == 1000.0


def test_requests_that_do_not_add_up_are_an_error(story: New) -> None:
    told = story()
    told.arrive("a")
    told.arrive("b")
    del told.requests["b"]
    with pytest.raises(
        SimserveError, match=r"1 request\(s\) neither ended nor are in a queue: 'b'"
    ):
        told.end()
    told = story()
    told.arrive("a")
    twice = list(told.requests.values()) * 2
    with pytest.raises(SimserveError, match="listed twice: 'a'"):
        told.recorder.ended("completed", 0.0, twice)


def test_a_scheduler_that_breaks_the_rules_is_named(story: New) -> None:
    told = story()
    told.arrive("a")
    with pytest.raises(SimserveError, match="'a' arrived again"):
        told.arrive("a")
    told.step(1.0, {"a": 1}, finished=["a"])
    with pytest.raises(SimserveError, match=r"'a' yielded 1 token\(s\) in step 1"):
        told.step(1.0, {"a": 1})


@pytest.mark.parametrize("column", [{"free": [3]}, {"evicted": [0]}, {"free": [3, 3, 3]}])
def test_a_record_without_one_value_a_step_is_refused_at_once(
    story: New, column: dict[str, list[int]]
) -> None:
    told = story()
    told.arrive("a")
    with pytest.raises(SimserveError, match="does not have one value for each of its 2 steps"):
        told.step([1.0, 1.0], {"a": 1}, **column)


def test_a_part_without_one_value_a_step_is_refused(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step([1.0, 1.0], {"a": 1}, parts={"gpu_s": [0.5]})
    with pytest.raises(SimserveError, match="part gpu_s of a step result has 1 values for 2 steps"):
        told.end()


def test_an_id_may_be_used_again_after_it_has_ended(story: New) -> None:
    told = story()
    for _ in range(2):
        told.arrive("a", at=told.now)
        told.decode("a", 1.0, 2)
    table = told.result(save_detailed=True).requests_table.to_pylist()
    assert [r["itl_ms"] for r in table] == [[1000.0], [1000.0]]


def test_data_of_a_simulation_that_still_runs_is_refused(story: New) -> None:
    with pytest.raises(SimserveError, match="has not ended"):
        story().recorder.data()
