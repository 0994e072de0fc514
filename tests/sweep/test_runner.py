"""Points run apart from each other: equal bytes in any order, failures that stay alone."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import simserve
from simserve.config.loader import load_config
from simserve.config.sweep_loader import load_points, load_sweep
from simserve.errors import ConfigError, RunDirectoryError
from simserve.metrics.rundir import read_run
from simserve.sweep.runner import run_sweep
from simserve.sweep.summary import write_summary
from simserve.sweep.task import Task
from tests.sweep.conftest import BASE

Check = Callable[[Path, Path], None]
BUDGET = "scheduler.max_num_batched_tokens"

# A cost model that a point's `executor.cost.options` makes fail.
PLUGIN = """
import os, signal, time
from simserve.cost.formula import FormulaCost

class Fragile(FormulaCost):
    def __init__(self, model, gpu, deed="none"):
        super().__init__(base_s=0.01)
        print("noise that is no answer")
        if deed == "raise":
            raise RuntimeError("no such luck")
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "hang":
            time.sleep(60)
"""


def write(folder: Path, sweep: str, base: str = BASE) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(f"{base}sweep:\n{sweep}")
    return path


def test_what_was_not_given_is_not_sent(tmp_path: Path) -> None:
    """Keys of real tokens say that they have no effect in a simulation, if they are there."""
    base = BASE.replace("workload:", "workload:\n  decoding: {kind: beam_search, beam_width: 2}", 1)
    (point,) = load_points(
        load_sweep(write(tmp_path, "  {type: grid, parameters: {seed: [1]}}\n", base))
    )
    assert point.loaded is not None
    assert load_config(Task.of(point).config).config == point.loaded.config


def test_any_number_of_processes_gives_the_same_bytes(
    grid: Path, finished: Path, tmp_path: Path, same_bytes: Check
) -> None:
    run_sweep(grid, out=tmp_path / "out", jobs=3)
    same_bytes(finished, tmp_path / "out")


def test_a_point_is_a_run_directory(grid: Path, finished: Path) -> None:
    name = "max_num_batched_tokens=64,long_prefill_token_threshold=32"
    run = read_run(finished / name)
    assert json.loads((finished / name / "overrides.json").read_text()) == {
        BUDGET: 64,
        "scheduler.long_prefill_token_threshold": 32,
    }
    assert run.summary_dict[BUDGET] == 64  # by name, as plots of summaries want it
    config = {**_plain(grid), "metrics": {"plot": False}}
    alone = simserve.run(config, [f"{BUDGET}=64", "scheduler.long_prefill_token_threshold=32"])
    assert run.config == alone.config
    assert run.requests_table.equals(alone.requests_table)
    assert {key: run.summary_dict[key] for key in alone.summary_dict} == alone.summary_dict


def test_every_point_has_the_same_workload_and_a_cold_cache(finished: Path) -> None:
    tables = [read_run(path.parent).requests for path in sorted(finished.rglob("summary.json"))]
    assert len(tables) == 4
    for table in tables:
        for column in ("arrival_time_s", "input_length", "output_length"):
            assert table[column].equals(tables[0][column])
        assert table["cached_tokens"].iloc[0] == 0


def test_the_summary_has_a_row_a_point(finished: Path) -> None:
    with (finished / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row[BUDGET] for row in rows] == ["64", "64", "512", "512"]
    assert [row["status"] for row in rows] == ["completed"] * 4
    table = pq.read_table(finished / "summary.parquet").to_pydict()
    assert list(table) == list(rows[0])
    assert [float(row["p99_ttft_ms"]) for row in rows] == table["p99_ttft_ms"]
    assert sorted(path.name for path in finished.iterdir() if path.is_file()) == [
        "summary.csv", "summary.parquet", "sweep.yaml",
    ]  # fmt: skip


def test_failures_stay_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fragile.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = BASE.replace(
        "{cost: {kind: formula, base_s: 0.01, per_token_s: 0.00001}}",
        "{cost: {kind: 'fragile:Fragile'}}",
    )
    path = write(
        tmp_path,
        "  type: scenarios\n  scenarios:\n    good: {}\n"
        "    raises: {executor.cost.options: {deed: raise}}\n"
        "    dies: {executor.cost.options: {deed: die}}\n"
        "    too-small: {kv_cache.num_gpu_blocks: 2, scheduler.on_impossible: as_engine}\n"
        "    does-not-fit: {scheduler.max_num_batched_tokens: 1}\n",
        base,
    )
    result = run_sweep(path, out=tmp_path / "out", jobs=2)
    failures = {
        name: json.loads((tmp_path / "out" / f"{name}.failure.json").read_text())
        for name in ("raises", "dies", "too-small", "does-not-fit")
    }
    assert [row["status"] for row in result.rows] == ["completed"] + ["failed"] * 4
    assert failures["raises"]["message"].startswith(
        "the process ended with exit status 1: RuntimeError: no such luck\n"
    )
    assert failures["dies"]["error"] == "Died"
    assert "ended by SIGKILL" in failures["dies"]["message"]
    assert failures["too-small"]["error"] == "StalledError"
    assert failures["does-not-fit"]["error"] == "ConfigError"
    rows = result.rows
    assert rows[4]["failure"].endswith("must be at least max_num_seqs (4), not 1")
    assert result.num_failed == 4
    assert (tmp_path / "out" / "good" / "summary.json").is_file()


def test_a_point_that_took_too_long_runs_again(tmp_path: Path) -> None:
    text = "  type: grid\n  timeout_s: 0.1\n  parameters: {seed: [1]}\n"
    path, out = write(tmp_path, text), tmp_path / "out"
    (row,) = run_sweep(path, out=out).rows
    assert row["failure"] == "not done after 0.1 s (sweep.timeout_s)"
    write(tmp_path, text.replace("0.1", "60").replace("[1]", "[1, 2]"))  # and one point more
    result = run_sweep(path, out=out, resume=True)
    assert [row["status"] for row in result.rows] == ["completed"] * 2
    assert not list(out.glob("*.failure.json"))


def test_a_directory_is_not_mixed_up(grid: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not empty"):
        run_sweep(grid, out=finished)
    with pytest.raises(RunDirectoryError, match="was begun with another seed"):
        run_sweep(grid, ["seed=3"], out=finished, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(RunDirectoryError, match="is no sweep to resume"):
        run_sweep(grid, out=tmp_path / "other", resume=True)
    with pytest.raises(RunDirectoryError, match="cannot write there"):
        run_sweep(grid, out=tmp_path / "other" / "file")


def test_real_points_without_torch_are_refused_once(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simserve.sweep.runner.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^executor\.kind: real needs torch,"):
        run_sweep(grid, ["executor={kind: real, device: cpu}"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_real_runs_go_one_after_another(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simserve.sweep.runner.find_spec", lambda name: name)
    real = ["executor={kind: real, device: cpu}"]
    for options in ({"jobs": 2}, {"backend": "ray"}):
        with pytest.raises(ConfigError, match="one after another"):
            run_sweep(grid, real, out=tmp_path / "out", **options)  # type: ignore[arg-type]


def test_columns_of_mixed_values_are_text(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"point": "a", "x": 1, "y": "auto", "z": {"k": [1]}},
        {"point": "b", "x": 0.5, "y": 3000, "z": None, "w": True},
    ]
    write_summary(tmp_path, rows)
    table = pq.read_table(tmp_path / "summary.parquet").to_pydict()
    assert table == {
        "point": ["a", "b"], "x": [1.0, 0.5], "y": ["auto", "3000"], "z": ['{"k": [1]}', None],
        "w": [None, True],
    }  # fmt: skip


def _plain(grid: Path) -> dict[str, Any]:
    import yaml

    plain: dict[str, Any] = yaml.safe_load(grid.read_text())
    del plain["sweep"]
    return plain
