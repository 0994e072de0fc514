"""`simserve sweep`: what it prints, where it writes, how it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from simserve.cli.main import _end_as_ctrl_c_does, app
from simserve.cli.sweep import _print_result
from simserve.cli.sweep_progress import SHOWN, SweepProgress
from simserve.config.sweep import Sweep
from simserve.report.contents import page_of
from simserve.sweep.runner import SweepResult
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
    path.write_text(path.read_text().replace("[1, 64]", "[64]"))
    again = invoke(path, "--resume", "--quiet")
    assert again.exit_code == 0
    assert again.output == ""
    assert len((tmp_path / "runs/mine/summary.csv").read_text().splitlines()) == 2


def test_rejected_requests_and_warnings_of_points_are_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"{BASE}sweep:\n  type: zip\n  parameters:\n    kv_cache.num_gpu_blocks: [2, 3, 1000]\n"
        "    scheduler.long_prefill_token_threshold: [0, 0, 64]\n"
    )
    budget = "scheduler.max_num_batched_tokens=64"
    result = invoke(path, "-o", budget, "--out", tmp_path / "out")
    assert result.exit_code == 0
    rejected = "rejected requests are in no latency: see the column `rejected` (2 of 3 points)"
    assert f"warning: {rejected}\n" in result.stderr
    assert "warning: scheduler.long_prefill_token_threshold: 64 does nothing" in result.stderr
    page = page_of(tmp_path / "out")
    assert f'<p class="note">{rejected}</p>' in page
    assert ">rejected</button>" in page
    assert invoke(path, "--out", tmp_path / "quiet", "--quiet").output == ""


@pytest.mark.parametrize(
    ("section", "heads"),
    [
        ({"type": "one_at_a_time"}, ["point"]),
        ({"type": "scenarios", "scenarios": {"base": {"seed": 1}}}, ["scenario", "one", "two"]),
        ({"type": "grid"}, ["one", "two"]),
    ],
)
def test_the_table_names_points_and_cuts_no_number(
    section: dict[str, Any],
    heads: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sweep: Sweep = TypeAdapter(Sweep).validate_python(
        section | {"parameters": {"scheduler.one": [1], "kv_cache.two": [2]}}
    )
    row = {"point": "base", "scheduler.one": 1, "kv_cache.two": 2, "status": "completed"}
    row |= dict.fromkeys(SHOWN, 12345.6)
    named = {**row, "scenario": "base"}
    rows = {"one_at_a_time": [named, row], "scenarios": [named]}.get(sweep.type, [row])
    _print_result(SweepResult(tmp_path, rows), sweep)
    text, _, _ = capsys.readouterr().out.partition("summary: ")
    assert all(head in text for head in heads)
    assert ("point" in text) == (heads == ["point"])
    assert text.count("12,345.6") == 4 * len(rows)
    assert max(map(len, text.splitlines())) <= 80


def test_a_value_in_a_name_is_not_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    settings = ["long_prefill_token_threshold=10240", "max_num_batched_tokens=16384"]
    sweep: Sweep = TypeAdapter(Sweep).validate_python(
        {"type": "one_at_a_time", "parameters": {"seed": [1]}}
    )
    shown = dict.fromkeys(SHOWN, 12345.6)
    rows = [{"point": point, "status": "completed", **shown} for point in settings]
    _print_result(SweepResult(tmp_path, rows), sweep)
    out = capsys.readouterr().out
    assert "│ max_num_batched_tokens=16384 " in out
    assert "│ threshold=10240 " in out


def test_a_signal_is_heard_where_ctrl_c_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell ignores Ctrl-C for what it starts in the background."""
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        _end_as_ctrl_c_does(signal.SIGTERM, None)


def test_stopped_behind_the_last_point_only_the_summary_is_missing(
    grid: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simserve.sweep.runner.write_summary", stop)
    result = invoke(grid, "--resume", "--out", finished)
    assert result.exit_code == 130
    assert f"4 of 4 points are done; --resume --out {finished} writes the summary" in result.output


def test_a_sweep_that_is_there_may_be_resumed(grid: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "summary.csv").touch()
    result = invoke(grid, "--out", tmp_path / "there")
    assert result.exit_code == 2
    assert result.stderr.endswith("for --out, or --resume the sweep in it\n")


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
