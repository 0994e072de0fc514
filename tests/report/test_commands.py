"""`simserve report`, `timeline` and `explain` on a run that `simserve run` made."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from simserve.cli.main import app
from simserve.cli.timeline import timeline
from simserve.metrics.rundir import read_run

CONFIG = """
model: llama-3.1-8b
gpu: h200
workload:
  synthetic:
    num_requests: 12
    arrival: {kind: poisson, rate: 40}
    prompt_len: {kind: uniform, min: 100, max: 5000}
    output_len: {kind: constant, value: 20}
kv_cache: {num_gpu_blocks: 700}
metrics: {plot: false}
"""


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "small.yaml").write_text(CONFIG)
    result = call("run", folder / "small.yaml", "--out", folder / "small", "--quiet")
    assert result.exit_code == 0, result.output
    return folder / "small"


def test_report(run: Path, tmp_path: Path) -> None:
    result = call("report", run, "--out", tmp_path / "new" / "page.html")
    assert result.exit_code == 0
    assert result.output == f"page: {tmp_path / 'new' / 'page.html'}\n"
    assert "<h1>small</h1>" in (tmp_path / "new" / "page.html").read_text()


def test_timeline(run: Path, tmp_path: Path) -> None:
    result = call("timeline", run)
    assert result.exit_code == 0
    assert str(run / "timeline.json") in result.output
    content = json.loads((run / "timeline.json").read_text())
    assert {event["ph"] for event in content["traceEvents"]} >= {"X", "C", "M"}


def test_a_timeline_shows_how_far_it_is_on_a_terminal_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    timeline(run, tmp_path / "quiet.json")
    assert capfd.readouterr().err == ""
    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(master, "rb") as screen, os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        timeline(run, tmp_path / "shown.json")
        terminal.flush()
        shown = os.read(screen.fileno(), 1 << 16).decode()
    assert "writing requests" in shown
    assert (tmp_path / "shown.json").read_bytes() == (tmp_path / "quiet.json").read_bytes()


def test_explain(run: Path) -> None:
    result = call("explain", run, "r3")
    assert result.exit_code == 0
    assert result.output.startswith("r3 brought a prompt of ")
    assert "decode" in result.output


def test_explain_the_slowest(run: Path) -> None:
    requests = read_run(run).requests.set_index("request_id")
    for metric in ("ttft", "e2el"):
        name = requests[f"{metric}_ms"].idxmax()
        result = call("explain", run, "--slowest", metric)
        assert result.output.startswith(f"{name} brought a prompt of ")
    assert "either a request's id or --slowest" in call("explain", run).output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "nowhere"], "nowhere: there is no run directory of this name"),
        (["timeline", "nowhere"], "nowhere: there is no run directory of this name"),
        (["explain", "nowhere", "r3"], "nowhere: there is no run directory of this name"),
        (["explain", "RUN", "r33"], "has no request 'r33' (did you mean 'r3'?)"),
        (["report", "RUN", "--out", "RUN"], "cannot be written: Is a directory"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, run: Path) -> None:
    result = call(*(run if word == "RUN" else word for word in words))
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.splitlines()) == 1


def test_a_request_of_several_sequences(tmp_path: Path) -> None:
    (tmp_path / "n.yaml").write_text(
        CONFIG.replace("kv_cache", "  decoding: {kind: parallel, n: 3}\nkv_cache")
    )
    assert call("run", tmp_path / "n.yaml", "--out", tmp_path / "n", "--quiet").exit_code == 0
    assert call("report", tmp_path / "n").exit_code == 0
    page = (tmp_path / "n" / "report.html").read_text()
    assert "Requests of several sequences" in page
    assert call("timeline", tmp_path / "n").exit_code == 0
    result = call("explain", tmp_path / "n", "2_r3")
    assert result.output.startswith("2_r3 brought a prompt of ")
