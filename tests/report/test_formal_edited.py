"""The formal report, and its neighbours, of run directories that somebody has edited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import simserve
from simserve.cli.main import app

CONFIG: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200",
    "workload": {
        "synthetic": {
            "num_requests": 40,
            "arrival": {"kind": "poisson", "rate": 10},
            "prompt_len": {"kind": "uniform", "min": 100, "max": 2000},
            "output_len": {"kind": "constant", "value": 20},
        }
    },
    "kv_cache": {"num_gpu_blocks": 700},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simserve.run(CONFIG).save(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def lacks(run: Path, what: str) -> None:
    result = call("report", run, "--formal")
    assert result.exit_code == 1, result.output
    assert what in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("end_s", [1e9, 10**30])
def test_a_window_without_an_end_in_sight_is_not_divided(run: Path, end_s: float) -> None:
    window = {"window.start_s": 0.0, "window.end_s": end_s}
    (summary,) = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps([summary | window]))
    lacks(run, "throughput p50, p95, p99 (the measuring window of 1e+")


def test_a_window_after_the_end_is_none(tmp_path: Path) -> None:
    result = simserve.run(CONFIG, ["metrics.window={start_s: 500}"])
    directory = result.save(tmp_path / "late")
    lacks(directory, "metrics.window begins at 500.000 s, the run ended before")


@pytest.mark.parametrize(
    ("file", "key", "value", "what"),
    [
        ("summary.json", "window.start_s", "x", "measuring window"),
        ("summary.json", "num_repetitions", "x", "repetitions"),
        ("env.json", "packages", "x", "software"),
    ],
)
def test_a_value_of_another_type_is_missing(
    run: Path, file: str, key: str, value: str, what: str
) -> None:
    content = json.loads((run / file).read_text())
    (content[0] if isinstance(content, list) else content)[key] = value
    (run / file).write_text(json.dumps(content))
    lacks(run, what)


def test_a_column_of_text_is_missing(run: Path) -> None:
    table = pq.read_table(run / "requests.parquet")
    place = table.column_names.index("arrival_time_s")
    pq.write_table(
        table.set_column(place, "arrival_time_s", table["request_id"]), run / "requests.parquet"
    )
    lacks(run, "arrival timeline (requests.parquet: arrival_time_s)")


@pytest.mark.parametrize("command", [["report", "--formal"], ["report"], ["timeline"]])
def test_steps_of_another_run_are_refused(run: Path, command: list[str]) -> None:
    steps = pq.read_table(run / "steps.parquet")
    pq.write_table(steps.slice(0, 5), run / "steps.parquet")
    result = call(command[0], run, *command[1:])
    assert result.exit_code == 2, result.output
    assert "steps.parquet, with 5 rows, does not have" in result.stderr
    assert len(result.stderr.splitlines()) == 1
