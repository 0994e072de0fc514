"""Comparisons: what may not be concluded is said first; the three tables of an article."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import simserve
from simserve.cli.main import app
from simserve.errors import RunDirectoryError
from simserve.fidelity.compare.comparison import (
    Number,
    NumberRow,
    compare_results,
    merge_repetitions,
)
from simserve.fidelity.compare.one_variable import differing_settings, missing_facts
from simserve.fidelity.compare.result_source import Result, load_result
from simserve.fidelity.compare.step_shapes import StepShapes, first_difference, shape_rows
from tests.fidelity.conftest import LOGS, write

CONFIG: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {
        "synthetic": {
            "num_requests": 12,
            "arrival": {"kind": "poisson", "rate": 20},
            "prompt_len": {"kind": "lognormal", "mean": 900, "sigma": 1, "max": 4000},
            "output_len": {"kind": "constant", "value": 6},
        }
    },
    "executor": {"cost": {"kind": "formula", "base_s": 0.01, "per_token_s": 2e-5}},
    "metrics": {"plot": False},
}


def save(folder: Path, overrides: Mapping[str, Any] | None = None) -> Path:
    simserve.run(CONFIG, overrides or {}).save(folder)
    return folder


def compare(*paths: Path, options: tuple[str, ...] = ()) -> tuple[int, str]:
    arguments = ["compare", *map(str, paths), *options]
    outcome = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    return outcome.exit_code, outcome.output


def result_file(path: Path, label: str, **content: Any) -> Path:
    path.write_text(json.dumps({"label": label, **content}))
    return path


# -- the article's tables --------------------------------------------------------------------------


def test_chunked_prefill_table_is_confounded(tmp_path: Path) -> None:
    """Section 5.3: the label and the budget differ, and no engine version was recorded."""
    on = result_file(
        tmp_path / "on.json",
        "chunked ON",
        config={
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 2048,
            "long_prefill_token_threshold": 1024,
        },
        short_ttft_median_s=0.415,
        short_ttft_max_s=0.688,
        long_ttft_s=25.895,
        long_latency_s=26.555,
    )
    off = result_file(
        tmp_path / "off.json",
        "chunked OFF",
        config={"enable_chunked_prefill": False, "max_num_batched_tokens": 131072},
        short_ttft_median_s=25.597,
        short_ttft_max_s=26.437,
        long_ttft_s=26.738,
        long_latency_s=27.452,
    )
    status, output = compare(on, off)
    assert status == 0
    lines = output.splitlines()
    assert lines[1].startswith("CONFOUNDED: 2 settings differ")
    assert lines[2:4] == [
        "  enable_chunked_prefill: True / False",
        "  max_num_batched_tokens: 2048 / 131072",
    ]
    assert "UNATTRIBUTABLE: chunked ON does not tell its engine version, effective conf" in output
    assert "recorded by one of them only: long_prefill_token_threshold" in output
    row = next(line for line in lines if "short_ttft_median_s" in line)
    assert "0.41" in row
    assert "25.60" in row
    assert "%" not in output
    assert "61" not in row


CACHE_TABLE = {"OFF": (False, 11.55, 11.53), "ON": (True, 7.83, 7.66)}


def test_prefix_cache_table_is_unattributable(tmp_path: Path) -> None:
    """Section 4.2: neither hit tokens, nor the engine, nor its other settings were recorded."""
    paths = [
        result_file(
            tmp_path / f"{name}.json",
            f"prefix cache {name}",
            config={"enable_prefix_caching": caching},
            first_round_s=first,
            second_round_s=second,
        )
        for name, (caching, first, second) in CACHE_TABLE.items()
    ]
    status, output = compare(*paths)
    assert status == 0
    assert "one setting differs:\n  enable_prefix_caching: False / True" in output
    assert (
        "UNATTRIBUTABLE: prefix cache ON does not tell its engine version, effective configuration "
        "(max_num_batched_tokens, max_num_seqs), hit tokens of the prefix cache" in output
    )
    # Without a cache there are no hits to be told.
    assert "prefix cache OFF does not tell its engine version, effective configuration (max_num_b" \
        "atched_tokens, max_num_seqs)\n" in output  # fmt: skip
    assert "no ratio is given" in output
    assert "11.53" in output
    assert "7.66" in output
    assert "%" not in output


LONG_CONTEXT_TABLE = {
    "Baseline": (False, None, 16.39, 29.69),
    "Chunked, budget 2048": (False, 2048, 16.36, 29.76),
    "Prefix cache": (True, None, 16.44, 13.28),
    "Prefix cache + chunked, budget 2048": (True, 2048, 16.41, 13.35),
    "Prefix cache + chunked, budget 4096": (True, 4096, 16.44, 13.27),
}


def test_long_context_table_is_unattributable(tmp_path: Path) -> None:
    """Section 7.2: five configurations of which hits, engine and settings are not known."""
    paths = []
    for i, (label, (caching, budget, single_s, turns_s)) in enumerate(LONG_CONTEXT_TABLE.items()):
        config: dict[str, Any] = {"enable_prefix_caching": caching}
        if budget is not None:
            config |= {"enable_chunked_prefill": True, "max_num_batched_tokens": budget}
        paths.append(
            result_file(
                tmp_path / f"{i}.json",
                label,
                config=config,
                single_document_s=single_s,
                multi_turn_s=turns_s,
            )
        )
    status, output = compare(*paths, options=("--json", str(tmp_path / "out.json")))
    assert status == 0
    assert "%" not in output
    assert output.count("no ratio is given") == 4
    comparisons = json.loads((tmp_path / "out.json").read_text())
    assert all(not one["attributable"] for one in comparisons)
    assert all(number["change"] is None for one in comparisons for number in one["numbers"])
    assert comparisons[1]["missing"]["Prefix cache"][-1] == "hit tokens of the prefix cache"
    assert [number["values"] for number in comparisons[1]["numbers"]] == [
        [16.39, 16.44],
        [29.69, 13.28],
    ]


# -- run directories -------------------------------------------------------------------------------


def test_one_setting_differs(tmp_path: Path) -> None:
    one = save(tmp_path / "a")
    other = save(tmp_path / "b", {"scheduler.max_num_batched_tokens": 2048})
    status, output = compare(one, other)
    assert status == 0
    assert "one setting differs:\n  max_num_batched_tokens: 8192 / 2048\n" in output
    assert "UNATTRIBUTABLE" not in output
    assert "mean step time (ms) by batch shape" in output
    assert "plans part at step" in output


def test_two_settings_are_confounded(tmp_path: Path) -> None:
    one = save(tmp_path / "a")
    two = {"scheduler.max_num_batched_tokens": 2048, "kv_cache.enable_prefix_caching": False}
    status, output = compare(one, save(tmp_path / "b", two))
    assert output.splitlines()[1].startswith("CONFOUNDED: 2 settings differ")
    assert status == 0


def test_what_follows_from_the_one_that_was_set_is_told(tmp_path: Path) -> None:
    auto = {"kv_cache.num_gpu_blocks": "auto", "scheduler.max_num_seqs": None}
    one = save(tmp_path / "a", auto)
    two = save(tmp_path / "b", {**auto, "scheduler.max_num_batched_tokens": 512})
    lines = compare(one, two)[1].splitlines()
    assert lines[1].startswith("CONFOUNDED: 3 settings differ")
    assert lines[5].startswith(
        "  where a configuration does not give max_num_seqs or num_gpu_blocks, it follows from the"
    )


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"scheduler.compat": "0.20.2"}, ["compat"]),
        ({"executor.cost": {"kind": "roofline"}}, ["executor.cost.kind"]),
        ({"workload.synthetic.prompt_len": {"kind": "constant", "value": 9}},
         ["workload.synthetic.prompt_len.kind"]),
        ({"scheduler.kind": "sarathi", "scheduler.options": {"chunk_size": 512}},
         ["scheduler.kind"]),
        ({"seed": 3, "label": "x", "metrics.percentiles": [12]}, []),
    ],
)  # fmt: skip
def test_what_follows_from_a_setting_is_part_of_it(
    tmp_path: Path, overrides: dict[str, Any], names: list[str]
) -> None:
    one, other = load_result(save(tmp_path / "a")), load_result(save(tmp_path / "b", overrides))
    assert [difference.name for difference in differing_settings(one, other)] == names


def test_a_tolerance_decides_the_exit_status(tmp_path: Path) -> None:
    one = save(tmp_path / "a")
    other = save(tmp_path / "b", {"executor.cost.base_s": 0.02})
    assert compare(one, other, options=("--tolerance", "p50_itl_ms=500"))[0] == 0
    status, output = compare(one, other, options=("--tolerance", "p50_itl_ms=5"))
    assert status == 1
    assert "beyond tolerance, or not to be judged: b: p50_itl_ms" in output
    status, output = compare(one, other, options=("--tolerance", "p50_ttft=5"))
    assert status == 2
    assert output == (
        "--tolerance p50_ttft: no result has such a number (did you mean 'p50_ttft_ms'?)\n"
    )
    status, output = compare(one, other, options=("--tolerance", "p50_itl_ms=often"))
    assert (status, "expected KEY=PERCENT" in output) == (2, True)


CLASSES = [
    {"name": "short.1", "count": 4, "prompt_len": {"kind": "constant", "value": 50}},
    {"name": "long", "count": 8, "prompt_len": {"kind": "constant", "value": 3000}},
]


def test_classes_of_both_have_rows_of_their_own(tmp_path: Path) -> None:
    classes = {"workload.synthetic.classes": CLASSES}
    one = save(tmp_path / "a", classes)
    other = save(tmp_path / "b", classes | {"executor.cost.base_s": 0.02})
    options = ("--json", str(tmp_path / "out.json"), "--tolerance", "class.long.p50_itl_ms=500")
    status, output = compare(one, other, options=options)
    assert status == 0
    (found,) = json.loads((tmp_path / "out.json").read_text())
    values = {number["key"]: number["values"] for number in found["numbers"]}
    keys = [key for key in values if "p99_ttft_ms" in key]
    assert keys == ["p99_ttft_ms", "class.long.p99_ttft_ms", "class.short.1.p99_ttft_ms"]
    summaries = [load_result(path).summaries[0] for path in (one, other)]
    for key in keys:
        assert values[key] == [summary[key] for summary in summaries]
    assert all(f" {key} " in output for key in values)
    assert compare(one, other, options=("--tolerance", "class.long.p50_itl_ms=5"))[0] == 1
    assert "class." not in compare(one, save(tmp_path / "c", {"seed": 2}))[1]


def test_a_class_that_holds_all_requests_is_not_shown_twice(tmp_path: Path) -> None:
    classes = {"workload.synthetic.classes": [{"name": "only"}]}
    one = save(tmp_path / "a", classes)
    other = save(tmp_path / "b", classes | {"executor.cost.base_s": 0.02})
    tolerance = ("--tolerance", "class.only.p50_itl_ms=500")
    status, output = compare(one, other, options=tolerance)
    assert (status, "class.only" in output) == (0, False)


def test_repetitions_give_intervals_and_ties(tmp_path: Path) -> None:
    repeated = {"metrics.repetitions": 3}
    one = save(tmp_path / "a", repeated)
    # Other seeds under the same settings are further repetitions, not another variable.
    more = save(tmp_path / "more", {"seed": 17})
    same = save(tmp_path / "b", repeated | {"scheduler.max_num_seqs": 512})
    slow = save(tmp_path / "c", repeated | {"executor.cost.base_s": 0.03})
    results = merge_repetitions([load_result(path) for path in (one, more, same, slow)])
    assert [len(result.summaries) for result in results] == [4, 3, 3]
    verdicts = {row.key: row.verdict for row in compare_results(results[0], results[1]).rows}
    assert verdicts["mean_ttft_ms"] == "tie"
    verdicts = {row.key: row.verdict for row in compare_results(results[0], results[2]).rows}
    assert verdicts["mean_itl_ms"] == "differs"
    status, output = compare(one, more)
    assert (status, "are one run, or repetitions of one" in output) == (2, True)


def test_intervals_tie_if_they_touch() -> None:
    def row(low: float, high: float) -> NumberRow:
        first, second = Number(1.5, (1.0, 2.0)), Number((low + high) / 2, (low, high))
        return NumberRow(key="x", first=first, second=second, attributable=True)

    assert row(2.0, 3.0).verdict == "tie"
    assert row(2.01, 3.0).verdict == "differs"
    assert row(0.1, 0.9).verdict == "differs"


def test_an_old_run_directory_without_facts_is_unattributable(tmp_path: Path) -> None:
    folder = save(tmp_path / "a")
    (folder / "config.yaml").write_text("model: llama-3.1-8b\n")
    summary = json.loads((folder / "summary.json").read_text())
    del summary[0]["decisions"], summary[0]["total_cached_tokens"], summary[0]["prefix_cache_hits"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert missing_facts(load_result(folder)) == [
        "engine version",
        "effective configuration (max_num_batched_tokens, max_num_seqs, enable_prefix_caching)",
        "hit tokens of the prefix cache",
    ]


def test_equal_runs_are_equal_in_everything(tmp_path: Path) -> None:
    one = save(tmp_path / "a")
    other = save(tmp_path / "b", {"scheduler.max_num_seqs": 512})
    found = compare_results(load_result(one), load_result(other))
    assert found.divergence is None
    assert all(row.change in (0.0, None) for row in found.rows)
    assert all(row.change == 0.0 for row in found.shapes)


# -- step logs -------------------------------------------------------------------------------------


def test_a_log_is_compared_with_a_log(tmp_path: Path, document: dict[str, Any]) -> None:
    slower = {**document, "name": "slower", "steps": [list(step) for step in document["steps"]]}
    slower["config"] = {**document["config"], "budget": 64}
    for step, start_us in zip(slower["steps"], (2000, 40000, 80000), strict=True):
        step[0], step[1] = start_us, 2 * step[1]
    status, output = compare(
        write(tmp_path / "a.json.gz", document), write(tmp_path / "b.json.gz", slower)
    )
    assert status == 0, output
    assert "one setting differs:\n  max_num_batched_tokens: 32 / 64" in output
    assert "plans: the same numbers of requests, tokens and preemptions in every step" in output
    assert "vllm-0.20.2" in output


def test_logs_of_other_requests_are_no_repetitions(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    later = {**document, "name": "later", "requests": [dict(r) for r in document["requests"]]}
    later["requests"][0]["arrival"] = 0.0
    one, other = (
        load_result(write(tmp_path / f"{d['name']}.json.gz", d)) for d in (document, later)
    )
    assert len(merge_repetitions([one, other])) == 2
    (difference,) = differing_settings(one, other)
    assert difference.name == "workload"
    assert difference.values[0] == "2 requests of 60 prompt and 3 output tokens within 0.014 s"
    assert len(merge_repetitions([one, replace(one, name="again")])) == 1


def test_a_simulation_is_compared_with_a_log(tmp_path: Path) -> None:
    status, output = compare(LOGS / "warm.json.gz", save(tmp_path / "a"))
    assert status == 0
    assert "engine: vllm-0.20.2 / simserve" in output
    assert "CONFOUNDED" in output


def shapes(counts: list[tuple[int, int, int]], seconds: list[float]) -> StepShapes:
    import numpy as np

    columns = np.array(counts).T
    return StepShapes(
        num_scheduled=columns[0],
        num_tokens=columns[1],
        num_decode_tokens=columns[2],
        num_preempted=0 * columns[0],
        duration_s=np.array(seconds),
    )


def test_steps_of_one_shape_are_compared() -> None:
    decode, mixed = (3, 3, 3), (4, 300, 3)
    one = shapes([decode] * 4 + [mixed] * 3, [1.0] * 4 + [4.0] * 3)
    other = shapes([(4, 4, 4)] * 4 + [mixed] * 2, [1.5] * 4 + [4.0] * 2)
    (row,) = shape_rows(one, other)  # of mixed steps there are too few
    assert (row.shape, row.num_steps, row.change) == ("decode, 3 to 4 requests", (4, 4), 0.5)
    assert first_difference(one, other) == 0
    assert first_difference(one, shapes([decode] * 4, [1.0] * 4)) == 4
    assert first_difference(one, one) is None


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "expected one JSON object"),
        ('{"config": 3}', "config: expected an object"),
        ('{"engine": ["vllm"]}', "engine: expected text"),
        ('{"x_s": NaN}', "is not JSON: NaN is not a finite number"),
        ('{"config": {"a": 1e999}}', "is not JSON: 1e999 is not a finite number"),
        ('{"x": 1%s}' % ("0" * 400), "is not JSON: 10{19} is not a finite number"),
        ("[" * 100_000, "is not JSON: maximum recursion"),
    ],
)
def test_broken_result_files_are_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(RunDirectoryError, match=rf"x\.json: {says}"):
        load_result(path)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    status, output = compare(tmp_path / "none", tmp_path / "nothing")
    assert status == 2
    assert "none: cannot be read" in output


TOLD = {"max_num_batched_tokens": 2048, "max_num_seqs": 8, "enable_prefix_caching": True}


@pytest.mark.parametrize("hits", [True, -1, "640", None])
def test_hit_tokens_that_are_no_count_are_not_told(tmp_path: Path, hits: Any) -> None:
    path = result_file(tmp_path / "x.json", "x", engine="e", config=TOLD, num_cached_tokens=hits)
    assert missing_facts(load_result(path)) == ["hit tokens of the prefix cache"]


def test_a_file_without_settings_has_none(tmp_path: Path) -> None:
    assert load_result(result_file(tmp_path / "x.json", "x", config={})).settings == {}
    nested = load_result(result_file(tmp_path / "y.json", "y", config={"workload": {}}))
    assert nested.settings == {"workload": {}}


def test_intervals_of_result_files_are_no_rows(tmp_path: Path) -> None:
    results = [
        load_result(
            result_file(
                tmp_path / f"{budget}_{i}.json",
                f"{budget}_{i}",
                engine="vllm-0.11.0",
                config={**TOLD, "max_num_batched_tokens": budget},
                num_cached_tokens=1,
                own_s=value,
            )
        )
        for budget, values in ((2048, (1.0, 1.2)), (4096, (1.1, 1.3)))
        for i, value in enumerate(values)
    ]
    found = compare_results(*merge_repetitions(results))
    assert [row.key for row in found.rows] == ["num_cached_tokens", "own_s"]
    assert [row.verdict for row in found.rows] == ["tie", "tie"]


def test_results_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, other = (
        load_result(result_file(tmp_path / f"{name}.json", "x", config={"a": name}))
        for name in ("p", "q")
    )
    found = compare_results(one, other)
    assert [found.first.name, found.second.name] == ["x (1)", "x (2)"]
    assert list(found.missing) == ["x (1)", "x (2)"]


def test_hit_tokens_of_a_result_file_count(tmp_path: Path) -> None:
    path = result_file(
        tmp_path / "x.json", "x", engine="vllm-0.11.0", config=TOLD, num_cached_tokens=640, x=1.0
    )
    result: Result = load_result(path)
    assert (result.hit_tokens, missing_facts(result)) == (640.0, [])
