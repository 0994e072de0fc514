"""Run directories: complete or absent, the same bytes every time, and readable."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simserve.errors import RunDirectoryError
from simserve.metrics import rundir
from simserve.metrics.result import RunResult
from simserve.metrics.rundir import read_run, write_run

VLLM_KEYS = [
    *("date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p50", "p90", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
]


def small_run(story: Callable[..., Any], **options: Any) -> RunResult:
    told = story()
    told.arrive("a", class_="x")
    told.reject("no", at=0.0)
    told.step([0.1, 0.2, 0.3], {"a": 1}, parts={"gpu_s": [0.1, 0.2, 0.3]})
    told.step(0.1, {"a": 1}, finished=["a"])
    told.arrive("é", at=told.now)
    result: RunResult = told.result(**options)
    result.env = {"python": "3"}
    result.warnings = ("mind the gap",)
    return result


def test_a_run_is_read_back_as_it_was(story: Callable[..., Any], tmp_path: Path) -> None:
    result = small_run(story)
    result.repetitions = tuple({"num_steps": k, "label": None} for k in range(11))
    path = result.save(tmp_path / "deep" / "run", picture=b"png")
    again = read_run(path)
    assert again.summary_dict == result.summary_dict
    assert again.requests_table.equals(result.requests_table)
    assert again.steps_table.equals(result.steps_table)
    assert (again.config, again.env, again.warnings) == (
        "seed: 0\n",
        {"python": "3"},
        result.warnings,
    )
    assert [r["num_steps"] for r in again.repetitions] == list(range(11))
    names = {"summary.json", "requests.parquet", "steps.parquet", "config.yaml", "env.json"}
    repetitions = {f"run={k}.json" for k in range(11)}
    assert {file.name for file in path.iterdir()} == names | {"run.png"} | repetitions
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_the_summary_is_a_list_of_one_dict_with_vllms_keys(
    story: Callable[..., Any], tmp_path: Path
) -> None:
    path = small_run(story).save(tmp_path / "run")
    text = (path / "summary.json").read_text(encoding="utf-8")
    (summary,) = json.loads(text, parse_constant=pytest.fail)
    assert [key for key in VLLM_KEYS if key not in summary] == []
    assert not any(isinstance(value, list | dict) for value in summary.values())


def test_detailed_lists_are_seconds(story: Callable[..., Any], tmp_path: Path) -> None:
    path = small_run(story, save_detailed=True).save(tmp_path / "run")
    (summary,) = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    assert summary["input_lens"] == [10, 99, 10]
    assert summary["output_lens"] == [4, 0, 0]
    assert summary["ttfts"] == [pytest.approx(0.1), None, None]
    assert summary["itls"] == [pytest.approx([0.2, 0.3, 0.1]), [], []]
    assert summary["latencies"] == [pytest.approx(0.7), None, None]
    assert summary["errors"] == ["", "too long", ""]
    assert read_run(path).summary_dict == small_run(story).summary_dict


def test_equal_runs_write_equal_bytes(story: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("one", "two"):
        small_run(story).save(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_what_exists_is_not_overwritten_unless_asked(
    story: Callable[..., Any], tmp_path: Path
) -> None:
    result, path = small_run(story), tmp_path / "run"
    result.save(path, picture=b"old")
    with pytest.raises(RunDirectoryError, match="exists already"):
        result.save(path)
    result.save(path, overwrite=True)
    assert not (path / "run.png").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_run_directory_is_never_overwritten(
    story: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    path, thesis = tmp_path / "home", tmp_path / "real"
    if kind == "file":
        path.write_text("thesis")
    elif kind == "link":
        thesis.mkdir()
        path.symlink_to(thesis)
    else:
        path.mkdir()
        (path / "thesis.tex").write_text("thesis")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        small_run(story).save(path, overwrite=True)
    assert path.exists()


def test_the_current_folder_is_not_replaced(
    story: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"^\.: is the current folder"):
        small_run(story).save(Path(), overwrite=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), ValueError("nan")])
@pytest.mark.parametrize("before", [False, True], ids=["new", "overwriting"])
def test_an_error_leaves_nothing_behind(
    story: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    before: bool,
) -> None:
    result, path = small_run(story), tmp_path / "run"
    if before:
        result.save(path, picture=b"old")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(rundir, "_write_json", fail)
    expected = RunDirectoryError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_run(path, result, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == (["run"] if before else [])
    if before:
        assert (path / "run.png").read_bytes() == b"old"


def test_nan_is_refused_rather_than_written(story: Callable[..., Any], tmp_path: Path) -> None:
    result = small_run(story)
    result.summary_dict["mean_ttft_ms"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        result.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("summary.json", "[", r"summary.json:1: is not JSON"),
        ("summary.json", "{}", r"summary.json: expected a list of one JSON object"),
        (
            "summary.json",
            None,
            r"summary.json: cannot be read: there is no such file, so .* is no run",
        ),
        ("env.json", "[]", r"env.json: expected a JSON object"),
        ("steps.parquet", "PAR", r"steps.parquet: cannot be read"),
        ("requests.parquet", None, r"requests.parquet: cannot be read: there is no such file$"),
        ("config.yaml", None, r"config.yaml: cannot be read: there is no such file$"),
    ],
)
def test_a_broken_directory_is_named(
    story: Callable[..., Any], tmp_path: Path, file: str, content: str | None, says: str
) -> None:
    path = small_run(story).save(tmp_path / "run")
    (path / file).unlink()
    if content is not None:
        (path / file).write_text(content)
    with pytest.raises(RunDirectoryError, match=says):
        read_run(path)


def test_a_folder_of_runs_is_told_from_a_run(story: Callable[..., Any], tmp_path: Path) -> None:
    path = small_run(story).save(tmp_path / "runs" / "a")
    with pytest.raises(RunDirectoryError, match=rf"so {path.parent} is no run.*; {path} is one$"):
        read_run(path.parent)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        read_run(tmp_path / "nothing")


def test_a_result_pickles(story: Callable[..., Any]) -> None:
    result = pickle.loads(pickle.dumps(small_run(story)))
    assert result.summary.loc[0, "completed"] == 1
    assert result.requests["request_id"].tolist() == ["a", "no", "é"]
    assert result.requests["token_run_num_steps"][0].tolist() == [4]
    assert len(result.steps) == 4


def test_an_empty_run_is_written_and_read(story: Callable[..., Any], tmp_path: Path) -> None:
    again = read_run(story().result(save_detailed=True).save(tmp_path / "run"))
    assert len(again.requests) == len(again.steps) == 0


def test_writing_a_run_needs_no_pandas(tmp_path: Path) -> None:
    code = """
import sys
from simserve.metrics.options import MetricOptions, RunInfo
from simserve.metrics.recorder import RunRecorder
from simserve.metrics.result import RunResult
recorder = RunRecorder(num_gpu_blocks=2, block_size=16)
recorder.ended("completed", 0.0, [])
RunResult.of(recorder.data(), RunInfo(), MetricOptions()).save(sys.argv[1])
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
