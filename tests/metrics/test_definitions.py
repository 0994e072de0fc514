"""What each metric means, one small history at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simserve.errors import ConfigError
from simserve.metrics.options import MetricOptions, RunInfo
from simserve.metrics.summary import summarise
from simserve.types import Kind

New = Callable[..., Any]


def test_ttft_is_not_among_the_inter_token_gaps(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(1.0, {"a": 1})
    told.decode("a", 0.1, 3)
    found = told.row("a", save_detailed=True)
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
    told.decode("b", 0.01, 100)
    summary = told.summary()
    assert summary["mean_tpot_ms"] == pytest.approx(505.0)
    assert summary["mean_itl_ms"] == pytest.approx(1000.0 * 2.0 / 101)


def test_several_tokens_of_one_step_are_one_gap(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(0.03, {"a": 1})
    told.step(0.03, {"a": 3})
    told.step(0.03, {"a": 3}, finished=["a"])
    found = told.row("a", save_detailed=True)
    assert found["output_length"] == 7
    assert found["tpot_ms"] == pytest.approx(10.0)
    assert found["itl_ms"] == pytest.approx([30.0, 30.0])


def test_tpot_divides_by_the_tokens_that_came_not_those_asked_for(story: New) -> None:
    told = story()
    told.arrive("a", output=100)
    told.decode("a", 0.1, 10)
    found = told.row("a")
    assert (found["output_length"], found["requested_output_length"]) == (10, 100)
    assert found["tpot_ms"] == pytest.approx(900.0 / 9)


def test_tpot_leaves_the_first_token_out(story: New) -> None:
    told = story()
    told.arrive("a")
    told.step(1.0, {"a": 1})
    told.decode("a", 0.1, 10)
    found = told.row("a")
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
    told.decode("a", 0.1, 2, finish=False)
    told.arrive("b", at=told.now)
    told.step(0.5, {"b": 1}, preempted=["a"], kinds={"b": Kind.NEW})
    told.step(0.5, {"b": 1}, finished=["b"])
    told.step(2.0, {"a": 1}, kinds={"a": Kind.RESUMED}, starts={"a": 16}, tokens={"a": 51})
    told.decode("a", 0.1, 2)
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


def test_one_in_a_step_that_is_told_of_after_the_end_counts(story: New) -> None:
    """Asynchronously: preempted while the step of its last token was under way."""
    told = story()
    told.arrive("a", prompt=64)
    told.arrive("b", prompt=64)
    told.requests["a"].num_preemptions = 1
    told.step(1.0, {"a": 1, "b": 1}, finished=["a"])
    told.step(1.0, {"b": 1}, preempted=["a"], finished=["b"])
    result = told.result()
    assert [row["num_preemptions"] for row in result.requests_table.to_pylist()] == [1, 0]
    assert result.summary_dict["num_preemptions"] == 1


def test_sums_do_not_double_after_a_preemption(story: New) -> None:
    told = story()
    told.arrive("a")
    told.decode("a", 0.1, 3, finish=False)
    told.step(0.0, {}, preempted=["a"])
    told.step(0.1, {"a": 1}, kinds={"a": Kind.RESUMED})
    told.decode("a", 0.1, 2)
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
    assert told.row("a")["recomputed_tokens"] == 60


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
    found = told.row("a")
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
    found = told.row("b")
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


def test_a_window_behind_the_run_has_no_time_and_no_rates(story: New) -> None:
    told = story()
    told.arrive("a")
    told.decode("a", 0.5, 5)
    inside = told.summary(window_s=(100.0, None))
    assert inside["window.duration"] == 0.0
    assert inside["window.output_throughput"] is None
    assert inside["window.mean_concurrency"] is None


def test_a_window_over_the_whole_run_says_what_the_run_says(story: New) -> None:
    told = story()
    told.arrive("a", class_="x")
    told.decode("a", 0.5, 5)
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
    told.decode("a", 0.5, 4, finish=False)
    summary = told.summary(window_s=(0.0, None))
    assert summary["mean_itl_ms"] is None
    assert summary["window.mean_ttft_ms"] == summary["window.mean_itl_ms"] == 500.0
    assert summary["window.mean_tpot_ms"] is summary["window.mean_e2el_ms"] is None


def test_percentiles_asked_for_join_those_always_there(story: New) -> None:
    told = story()
    told.arrive("a", class_="long")
    told.decode("a", 0.1, 5)
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
