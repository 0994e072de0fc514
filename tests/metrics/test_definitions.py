"""What each metric means, one small history at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from simserve.errors import ConfigError, SimserveError
from simserve.metrics.options import MetricOptions, RunInfo
from simserve.metrics.repetitions import summarise_repetitions
from simserve.metrics.summary import summarise
from simserve.types import Kind, Lookups, Status

New = Callable[..., Any]


def decode(told: Any, request_id: str, gap: float, count: int, finish: bool = True) -> None:
    """`count` single steps of one token each."""
    for k in range(count):
        over = [request_id] if finish and k == count - 1 else []
        told.step(gap, {request_id: 1}, finished=over)


def row(told: Any, request_id: str, **options: Any) -> dict[str, Any]:
    table = told.result(**options).requests_table.to_pylist()
    return next(r for r in table if r["request_id"] == request_id)


def test_ttft_is_not_among_the_inter_token_gaps(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(1.0, {"a": 1})
    decode(told, "a", 0.1, 3)
    found = row(told, "a", save_detailed=True)
    assert found["ttft_ms"] == 1000.0
    assert found["itl_ms"] == pytest.approx([100.0] * 3)
    assert len(found["itl_ms"]) == found["output_length"] - 1


def test_mean_itl_pools_gaps_and_mean_tpot_averages_requests(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(0.5, {"a": 1})
    told.step(1.0, {"a": 1}, finished=["a"])
    told.arrive("b", at=told.now)
    told.step(0.5, {"b": 1})
    decode(told, "b", 0.01, 100)
    summary = told.summary()
    assert summary["mean_tpot_ms"] == pytest.approx(505.0)
    assert summary["mean_itl_ms"] == pytest.approx(1000.0 * 2.0 / 101)


def test_several_tokens_of_one_step_are_one_gap(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(0.03, {"a": 1})
    told.step(0.03, {"a": 3})
    told.step(0.03, {"a": 3}, finished=["a"])
    found = row(told, "a", save_detailed=True)
    assert found["output_length"] == 7
    assert found["tpot_ms"] == pytest.approx(10.0)
    assert found["itl_ms"] == pytest.approx([30.0, 30.0])


def test_tpot_divides_by_the_tokens_that_came_not_those_asked_for(story: New) -> None:
    told = story()
    told.arrive("a", output=100)
    decode(told, "a", 0.1, 10)
    found = row(told, "a")
    assert (found["output_length"], found["requested_output_length"]) == (10, 100)
    assert found["tpot_ms"] == pytest.approx(900.0 / 9)


def test_tpot_leaves_the_first_token_out(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(1.0, {"a": 1})
    decode(told, "a", 0.1, 10)
    found = row(told, "a")
    assert found["tpot_ms"] == pytest.approx(100.0)
    assert found["e2el_ms"] == pytest.approx(2000.0)


def test_one_token_has_no_tpot_and_is_counted(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(1.0, {"a": 1}, finished=["a"])
    summary = told.summary(goodput={"tpot": 1.0})
    assert summary["tpot_undefined"] == 1
    assert [summary[f"{name}_tpot_ms"] for name in ("mean", "std", "p99")] == [None] * 3
    assert summary["mean_itl_ms"] is None
    assert summary["slo_attainment"] == 1.0  # as vLLM: its TPOT counts as 0 there


def test_a_request_that_ends_without_a_token_breaks_nothing(story: New) -> None:
    told = story()
    told.arrive("a", output=0)
    told.step(1.0, {"a": 0}, finished=["a"])
    summary = told.summary(goodput={"ttft": 5.0})
    assert (summary["completed"], summary["total_output_tokens"]) == (1, 0)
    assert summary["mean_ttft_ms"] is None
    assert summary["slo_attainment"] == 0.0


def test_an_empty_run_is_null_and_valid_json(story: New) -> None:
    summary = story().summary(goodput={"ttft": 1.0}, window_s=(0.0, None), percentiles=(99.9,))
    json.dumps(summary, allow_nan=False)
    assert summary["num_prompts"] == 0
    for key, value in summary.items():
        if key.endswith(("_ms", "throughput", "goodput", "attainment")):
            assert value is None, key


def test_failed_requests_are_counted_and_in_no_percentile(story: New) -> None:
    told = story()
    for k in range(9):
        told.arrive(str(k), at=k * 1.0)
        told.now = k * 1.0
        told.step(0.1, {str(k): 1}, finished=[str(k)])
    told.reject("x", at=9.0)
    told.arrive("y", at=9.0)
    told.now = 9.0
    told.step(50.0, {"y": 1})
    told.step(50.0, {"y": 1})
    told.abort("y")
    summary = told.summary()
    assert summary["p90_ttft_ms"] == pytest.approx(100.0)
    assert summary["mean_itl_ms"] is None
    assert (summary["failed"], summary["rejected"], summary["aborted"]) == (2, 1, 1)
    assert summary["total_output_tokens"] == 9
    errors = told.result().requests_table.to_pylist()
    assert [r["error"] for r in errors if r["status"] == "rejected"] == ["too long"]


def test_a_preemption_is_one_long_gap(story: New) -> None:
    told = story()
    told.arrive("a", prompt=64, output=6)
    told.step(1.0, {"a": 1}, tokens={"a": 64}, kinds={"a": Kind.NEW})
    decode(told, "a", 0.1, 2, finish=False)
    told.arrive("b", at=told.now)
    told.step(0.5, {"b": 1}, preempted=["a"], kinds={"b": Kind.NEW})
    told.step(0.5, {"b": 1}, finished=["b"])
    told.step(2.0, {"a": 1}, kinds={"a": Kind.RESUMED}, starts={"a": 16}, tokens={"a": 51})
    decode(told, "a", 0.1, 2)
    result = told.result(save_detailed=True)
    found = result.requests_table.to_pylist()[0]
    assert found["ttft_ms"] == 1000.0
    assert found["itl_ms"] == pytest.approx([100, 100, 3000, 100, 100])
    assert found["max_itl_ms"] == pytest.approx(3000.0)
    assert found["num_preemptions"] == 1
    # 66 tokens had been computed (the newest is only sampled), 16 of them were still cached.
    assert found["recomputed_tokens"] == 50
    summary = result.summary_dict
    assert (summary["num_preemptions"], summary["num_resumed"]) == (1, 1)
    assert summary["recomputed_tokens"] == 50


def test_sums_do_not_double_after_a_preemption(story: New) -> None:
    told = story()
    told.arrive("a")
    decode(told, "a", 0.1, 3, finish=False)
    told.step(0.0, {}, preempted=["a"])
    told.step(0.1, {"a": 1}, kinds={"a": Kind.RESUMED})
    decode(told, "a", 0.1, 2)
    table = told.result(save_detailed=True).requests_table.to_pylist()
    assert sum(len(r["itl_ms"]) for r in table) == sum(r["output_length"] - 1 for r in table)


def test_recomputed_chunks_count_until_the_request_is_where_it_was(story: New) -> None:
    told = story()
    told.arrive("a", prompt=100)
    told.step(1.0, {"a": 0}, tokens={"a": 60}, kinds={"a": Kind.NEW})
    told.step(1.0, {}, preempted=["a"])
    told.step(1.0, {"a": 0}, tokens={"a": 40}, kinds={"a": Kind.RESUMED})
    told.step(1.0, {"a": 0}, starts={"a": 40}, tokens={"a": 30})
    told.step(1.0, {"a": 1}, starts={"a": 70}, tokens={"a": 30}, finished=["a"])
    assert row(told, "a")["recomputed_tokens"] == 60


def test_a_ghost_is_counted_and_its_work_done_again(story: New) -> None:
    told = story()
    told.arrive("a", prompt=10)
    told.step(1.0, {"a": 1}, tokens={"a": 10}, kinds={"a": Kind.NEW})
    told.step(1.0, {"a": 1}, starts={"a": 10}, kinds={"a": Kind.GHOST}, preempted=["a"])
    told.step(1.0, {"a": 1}, starts={"a": 1}, tokens={"a": 11}, kinds={"a": Kind.RESUMED})
    summary = told.summary()
    assert (summary["num_ghosts"], summary["num_preemptions"]) == (1, 1)
    assert summary["recomputed_tokens"] == 10


def test_every_ms_field_is_milliseconds_and_every_s_field_seconds(story: New) -> None:
    told = story()
    told.arrive("a", at=2.0)
    told.now = 3.0
    told.step(0.25, {"a": 0}, scheduled_at=3.0, kinds={"a": Kind.NEW})
    told.step(0.75, {"a": 1})
    told.step(0.5, {"a": 1}, finished=["a"])
    found = row(told, "a")
    expected = {
        "arrival_time_s": 2.0,
        "queued_s": 2.0,
        "scheduled_s": 3.0,
        "first_token_s": 4.0,
        "last_token_s": 4.5,
        "ended_s": 4.5,
        "queue_time_ms": 1000.0,
        "ttft_ms": 2000.0,
        "tpot_ms": 500.0,
        "e2el_ms": 2500.0,
        "max_itl_ms": 500.0,
        "prefill_time_ms": 1000.0,
        "decode_time_ms": 500.0,
        "inference_time_ms": 1500.0,
    }
    assert {key: found[key] for key in expected} == expected
    assert {k for k in found if k.endswith(("_ms", "_s"))} == set(expected)


def test_queue_time_begins_when_the_engine_took_the_request_in(story: New) -> None:
    """The wait for the step that ran when it arrived is in TTFT only."""
    told = story()
    told.arrive("a")
    told.step(1.0, {"a": 1}, kinds={"a": Kind.NEW})
    told.arrive("b", at=0.25)
    told.step(1.0, {"a": 1, "b": 1}, kinds={"b": Kind.NEW}, finished=["a", "b"])
    found = row(told, "b")
    assert (found["queue_time_ms"], found["ttft_ms"]) == (0.0, 1750.0)


def test_throughput_is_over_delivered_tokens_and_the_whole_time(story: New) -> None:
    told = story()
    for k in range(10):
        told.arrive(str(k), prompt=7)
    told.step(1.0, {str(k): 1 for k in range(10)})
    for k in range(1, 10):
        told.abort(str(k))
    told.step(9.0, {"0": 1}, finished=["0"])
    summary = told.summary()
    assert summary["duration"] == 10.0
    assert summary["output_throughput"] == 0.2
    assert summary["total_token_throughput"] == 0.9
    assert summary["request_throughput"] == 0.1


def test_a_straddling_request_never_brings_its_warm_up_ttft(story: New) -> None:
    told = story()
    told.arrive("early")
    told.step(2.0, {"early": 1})
    told.arrive("late", at=told.now)
    for _ in range(4):
        told.step(1.0, {"early": 1, "late": 1})
    told.step(1.0, {"early": 1, "late": 1}, finished=["early", "late"])
    summary = told.summary(window_s=(2.5, 6.5))
    assert summary["p50_ttft_ms"] == 1500.0
    assert summary["window.p50_ttft_ms"] == summary["window.p99_ttft_ms"] == 1000.0
    # Gaps that end at 3, 4, 5, 6 for the one, at 4, 5, 6 for the other.
    assert summary["window.total_output_tokens"] == 8
    assert summary["window.mean_itl_ms"] == 1000.0
    assert summary["window.completed"] == 0
    assert summary["window.mean_e2el_ms"] is None
    assert summary["window.duration"] == 4.0
    assert summary["window.mean_concurrency"] == 2.0


def test_a_window_over_the_whole_run_says_what_the_run_says(story: New) -> None:
    told = story()
    told.arrive("a", class_="x")
    decode(told, "a", 0.5, 5)
    summary = told.summary(window_s=(0.0, None), goodput={"ttft": 600.0, "e2el": 100.0})
    inside = {k[7:]: v for k, v in summary.items() if k.startswith("window.")}
    shared = inside.keys() & summary.keys()
    assert {"mean_itl_ms", "class.x.p99_ttft_ms", "slo_attainment_e2el"} <= shared
    assert {key: inside[key] for key in shared} == {key: summary[key] for key in shared}


def test_overload_shows_before_the_trace_drains(story: New) -> None:
    told = story()
    for k in range(8):
        told.arrive(str(k), at=k * 0.25)
    for k in range(8):
        told.step(1.0, {str(k): 1}, finished=[str(k)])
    summary = told.summary()
    assert summary["last_arrival_s"] == 1.75
    assert summary["offered_request_rate"] == pytest.approx(8 / 1.75)
    assert summary["request_throughput_until_last_arrival"] == pytest.approx(1 / 1.75)
    assert summary["request_throughput"] == 1.0


def test_goodput_counts_requests_that_met_all_objectives(story: New) -> None:
    told = story()
    told.arrive("good", prompt=5)
    told.step(0.1, {"good": 1})
    told.step(0.1, {"good": 1}, finished=["good"])
    told.arrive("slow", at=told.now)
    told.step(0.1, {"slow": 1})
    told.step(0.7, {"slow": 1}, finished=["slow"])
    told.reject("no", at=1.0)
    summary = told.summary(goodput={"ttft": 100.1, "tpot": 100.1})
    assert summary["request_goodput"] == pytest.approx(1.0)
    assert summary["output_goodput"] == pytest.approx(2.0)
    assert summary["total_token_goodput"] == pytest.approx(7.0)
    assert summary["slo_attainment"] == pytest.approx(1 / 3)
    assert summary["slo_attainment_ttft"] == pytest.approx(2 / 3)
    assert summary["slo_attainment_tpot"] == pytest.approx(1 / 3)


def test_an_objective_that_is_just_met_is_met(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(0.125, {"a": 1}, finished=["a"])
    assert told.summary(goodput={"ttft": 125.0})["slo_attainment_ttft"] == 1.0
    assert told.summary(goodput={"ttft": 124.9})["slo_attainment_ttft"] == 0.0


def test_a_request_that_still_runs_has_no_tpot_yet_but_its_gaps_count(story: New) -> None:
    told = story()
    told.arrive("a")
    decode(told, "a", 0.5, 4, finish=False)
    summary = told.summary(window_s=(0.0, None))
    assert summary["mean_itl_ms"] is None
    assert summary["window.mean_ttft_ms"] == summary["window.mean_itl_ms"] == 500.0
    assert summary["window.mean_tpot_ms"] is summary["window.mean_e2el_ms"] is None


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


def test_percentiles_asked_for_join_those_always_there(story: New) -> None:
    told = story()
    told.arrive("a", class_="long")
    decode(told, "a", 0.1, 5)
    summary = told.summary(percentiles=(99.9, 25, 50), percentile_metrics=("itl", "inference_time"))
    names = {k.removesuffix("_itl_ms") for k in summary if k.endswith("_itl_ms")}
    assert {"mean", "median", "std", "p25", "p50", "p90", "p95", "p99", "p99.9"} <= names
    assert "class.long.p99.9_itl_ms" in summary
    assert "p99_inference_time_ms" in summary
    assert "mean_ttft_ms" not in summary


def test_means_are_those_of_the_exported_samples(story: New) -> None:
    told = story()
    for k in range(5):
        told.arrive(str(k), at=k * 0.3)
    for k in range(5):
        told.step(0.2 + 0.1 * k, {str(i): 1 for i in range(k + 1)})
    told.step(0.4, {str(i): 1 for i in range(5)}, finished=[str(i) for i in range(5)])
    result = told.result(save_detailed=True, percentile_metrics=("ttft", "tpot", "itl", "e2el"))
    table = result.requests_table.to_pydict()
    exported = {m: [x for x in table[f"{m}_ms"] if x is not None] for m in ("ttft", "tpot", "e2el")}
    exported["itl"] = [gap for gaps in table["itl_ms"] for gap in gaps]
    for metric, values in exported.items():
        assert result.summary_dict[f"mean_{metric}_ms"] == pytest.approx(np.mean(values), rel=1e-12)
        assert result.summary_dict[f"p95_{metric}_ms"] == np.percentile(values, 95)


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


def test_an_id_may_be_used_again_after_it_has_ended(story: New) -> None:
    told = story()
    for _ in range(2):
        told.arrive("a", at=told.now)
        decode(told, "a", 1.0, 2)
    table = told.result(save_detailed=True).requests_table.to_pylist()
    assert [r["itl_ms"] for r in table] == [[1000.0], [1000.0]]


def test_data_of_a_simulation_that_still_runs_is_refused(story: New) -> None:
    with pytest.raises(SimserveError, match="has not ended"):
        story().recorder.data()


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


def test_parts_that_a_step_lacks_are_null(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step([1.0, 1.0], {"a": 1}, parts={"gpu_s": [0.7, 0.8]})
    told.step(0.0, {})
    told.step(1.0, {"a": 1}, parts={"gpu_s": [0.9], "host_s": [0.1]}, finished=["a"])
    table = told.result().steps_table
    assert table["parts.gpu_s"].to_pylist() == [0.7, 0.8, None, 0.9]
    assert table["parts.host_s"].to_pylist() == [None, None, None, 0.1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"goodput": {"tttf": 1.0}}, "unknown goodput metric 'tttf' .did you mean 'ttft'"),
        ({"percentile_metrics": ("ttl",)}, "unknown percentile metric 'ttl'"),
        ({"percentiles": (101.0,)}, "percentile 101 is not between"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MetricOptions(**options)


def test_further_keys_stand_in_the_summary(story: New) -> None:
    info = RunInfo(label="x", request_rate=2.0, extra={"max_num_seqs": 64})
    summary = summarise(story().end(), info, MetricOptions())
    assert (summary["label"], summary["request_rate"], summary["max_num_seqs"]) == ("x", 2.0, 64)


def test_repetitions_become_means_with_intervals() -> None:
    runs = [
        {
            "seed": k,
            "p99_ttft_ms": 100.0 + k,
            "num_steps": 5,
            "label": "x",
            "note": str(k),
            "gone": g,
        }
        for k, g in enumerate([1.0, None, 2.0, 3.0])
    ]
    merged = summarise_repetitions(runs, seed=3)
    assert merged["p99_ttft_ms"] == 101.5
    low, high = merged["p99_ttft_ms_ci95_low"], merged["p99_ttft_ms_ci95_high"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    means = np.mean(list(product([100.0, 101.0, 102.0, 103.0], repeat=4)), axis=1)
    assert [low, high] == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.05)
    assert (merged["num_steps"], merged["label"], merged["num_repetitions"]) == (5, "x", 4)
    assert (merged["seed"], merged["note"], merged["gone"]) == (None, None, None)
    assert "num_steps_ci95_low" not in merged
    assert summarise_repetitions(runs, seed=3) == merged
    with pytest.raises(ValueError, match="no repetitions"):
        summarise_repetitions([])
