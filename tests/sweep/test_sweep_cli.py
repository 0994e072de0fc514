"""`simserve sweep`: what it prints, where it writes, how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.cli.sweep_progress import SweepProgress
from tests.sweep.conftest import BASE


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def test_a_dry_run_lists_points_and_writes_nothing(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(grid, "--dry-run", "-o", "scheduler.max_num_seqs=128")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[-2] == "max_num_batched_tokens=512,long_prefill_token_threshold=32"
    assert lines[-1] == "4 points, 2 of which cannot run"
    assert "threshold=0: fails: " in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_line_a_point_then_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"{BASE}sweep:\n  type: grid\n  parameters: {{scheduler.max_num_batched_tokens: [1, 64]}}\n"
    )
    result = invoke(path)
    assert result.exit_code == 1
    assert "[1/2] max_num_batched_tokens=1: failed: " in result.stderr
    assert "[2/2] max_num_batched_tokens=64: " in result.stderr
    assert "1 of 2 points failed" in result.stderr
    assert "TTFT p99" in result.stdout
    assert "summary: runs/mine/summary.csv" in result.stdout
    path.write_text(path.read_text().replace("[1, 64]", "[8, 64]"))
    again = invoke(path, "--resume", "--quiet")
    assert again.exit_code == 0
    assert again.output == ""
    assert len((tmp_path / "runs/mine/summary.csv").read_text().splitlines()) == 3


def test_where_it_is_not_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE)
    result = invoke(tmp_path / "run.yaml")
    assert result.exit_code == 2
    assert "has no `sweep` section" in result.output


def test_the_live_table_shows_what_runs_and_what_came_of_it() -> None:
    from rich.console import Console

    progress = SweepProgress(3, enabled=False)
    progress.started("a")
    progress.started("b")
    progress.ended("a", {"p50_ttft_ms": 12.34, "p99_ttft_ms": None}, "")
    progress.ended("c", None, "no room\nfor it")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(progress._render())
    text = captured.get()
    assert "2 of 3 points, 1 failed, 1 running" in text
    assert "12.3" in text
    assert "no room" in text
    assert [line.split()[1] for line in text.splitlines() if " …" in line] == ["b"]
