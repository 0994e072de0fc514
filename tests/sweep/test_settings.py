"""The search over settings: what it calls best is what no other point beats."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.errors import ConfigError
from simserve.sweep.runner import run_sweep
from simserve.sweep.settings import search_settings

needs_optuna = pytest.mark.skipif(
    find_spec("optuna") is None, reason="Optuna is not installed: '.[optuna]'"
)
OBJECTIVES = ["output_throughput", "p99_ttft_ms"]


@needs_optuna
def test_the_pareto_set(grid: Path, finished: Path, tmp_path: Path) -> None:
    found = search_settings(grid, OBJECTIVES, out=tmp_path / "out", num_trials=12, jobs=2)
    by_name = {row["point"]: row for row in run_sweep(grid, out=finished, resume=True).rows}
    assert len(found.rows) > 1
    assert found.pareto
    for row in found.rows:
        point = str(row["point"])
        assert {key: row[key] for key in by_name[point]} == by_name[point]
        beaten = any(
            (-other["output_throughput"], other["p99_ttft_ms"])
            != (-row["output_throughput"], row["p99_ttft_ms"])
            and other["output_throughput"] >= row["output_throughput"]
            and other["p99_ttft_ms"] <= row["p99_ttft_ms"]
            for other in found.rows
        )
        assert row["pareto"] is not beaten
    again = search_settings(grid, OBJECTIVES, out=tmp_path / "again", num_trials=12, jobs=2)
    assert again.rows == found.rows
    written = (tmp_path / "out" / "summary.csv").read_bytes()
    assert (tmp_path / "again" / "summary.csv").read_bytes() == written


@needs_optuna
def test_a_point_that_is_chosen_again_is_not_run_again(grid: Path, tmp_path: Path) -> None:
    one = "sweep.parameters={scheduler.max_num_batched_tokens: [512]}"
    command = ["search", str(grid), "--trials", "3", "-o", one, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "points tried: 1 (the other trials" in result.stdout


@needs_optuna
@pytest.mark.parametrize(
    ("objective", "message"),
    [("p99_tft_ms", "number .did you mean 'p99_ttft_ms'"), ("scheduler", "no such number$")],
)
def test_an_objective_that_is_none(
    grid: Path, tmp_path: Path, objective: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        search_settings(grid, [objective], out=tmp_path / "out", num_trials=1)


@needs_optuna
def test_a_wrong_seed_is_said_to_be_so(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed: must be a whole number, not the text 'one'"):
        search_settings(grid, OBJECTIVES, ["seed=one"], out=tmp_path / "out", num_trials=1)
    assert not (tmp_path / "out").exists()


@needs_optuna
def test_real_runs_are_not_measured_side_by_side(grid: Path, tmp_path: Path) -> None:
    real = ["executor={kind: real, device: cpu}"]
    with pytest.raises(ConfigError, match="its points run one after another"):
        search_settings(grid, OBJECTIVES, real, out=tmp_path / "out", num_trials=4, jobs=2)


def test_it_chooses_from_a_grid(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chooses from type grid, not one_at_a_time"):
        search_settings(
            grid, OBJECTIVES, ["sweep.type=one_at_a_time"], out=tmp_path / "out", num_trials=1
        )


@pytest.mark.skipif(find_spec("optuna") is not None, reason="Optuna is installed")
def test_without_optuna_one_sentence_says_what_to_install(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install 'simserve\\[optuna\\]'"):
        search_settings(grid, OBJECTIVES, out=tmp_path / "out", num_trials=1)
