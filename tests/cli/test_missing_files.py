"""A file that is not there is said to be missing, whatever it was to be read as."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app


@pytest.mark.parametrize(
    "arguments",
    [
        "run FILE.yaml",
        "fit FILE.json.gz --out x.json",
        "fit FILE.json --out x.json",
        "conform FILE.json",
        "compare FILE.json FILE.json.gz",
        "validate FILE.json.gz --profile h200-llama-3.1-8b-vllm",
        "calibrate --steps FILE.gz --out x.json",
    ],
)
def test_a_missing_file(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, arguments.split())
    assert outcome.exit_code == 2
    assert "FILE" in outcome.stderr
    assert outcome.stderr.endswith(": there is no such file\n")
    assert list(tmp_path.iterdir()) == []
