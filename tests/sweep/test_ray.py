"""Ray, with processes of its own on this machine, comes to the bytes that local processes do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app

Start = Callable[..., subprocess.Popen[str]]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: '.[ray]'")


@needs_ray
def test_same_bytes(
    grid: Path,
    finished: Path,
    tmp_path: Path,
    start: Start,
    same_bytes: Callable[[Path, Path], None],
) -> None:
    """In a process of its own, which Ray fills with threads, and warnings that are not ours."""
    out = tmp_path / "out"
    process = start("sweep", grid, "--out", out, "--backend", "ray", "--jobs", "2")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    same_bytes(finished, out)


@needs_ray
def test_failures_come_back(grid: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    options = ("--backend", "ray", "--jobs", "1", "-o", "sweep.timeout_s=0.01")
    process = start("sweep", grid, "--out", out, *options)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert "4 of 4 points failed" in errors
    assert len(list(out.glob("*.failure.json"))) == 4


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_one_sentence_says_what_to_install(grid: Path, tmp_path: Path) -> None:
    arguments = ["sweep", str(grid), "--out", str(tmp_path / "out"), "--backend", "ray"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "pip install 'simserve[ray]'" in result.output


def test_an_address_goes_with_ray(grid: Path) -> None:
    result = CliRunner().invoke(app, ["sweep", str(grid), "--ray-address", "auto"])
    assert result.exit_code == 2
    assert "--backend ray" in result.output
