"""Ray, with processes of its own on this machine, comes to the bytes that local processes do."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.errors import ConfigError
from simserve.sweep.ray_cluster import _check_reachable
from simserve.sweep.runner import run_sweep
from tests.sweep.conftest import BASE

Start = Callable[..., subprocess.Popen[str]]
SOME_FAIL = """
sweep:
  type: scenarios
  scenarios:
    roomy: {}
    too-small: {kv_cache.num_gpu_blocks: 2, scheduler.on_impossible: as_engine}
  parameters: {scheduler.max_num_batched_tokens: [64, 512]}
"""
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: '.[ray]'")


@needs_ray
def test_same_bytes(tmp_path: Path, start: Start, same_bytes: Callable[[Path, Path], None]) -> None:
    """Points and failures. Ray has a process of its own, which it fills with threads, and with
    warnings that are not ours."""
    path = tmp_path / "some-fail.yaml"
    path.write_text(BASE + SOME_FAIL)
    here, there = tmp_path / "here", tmp_path / "there"
    assert run_sweep(path, out=here).num_failed == 2
    process = start("sweep", path, "--out", there, "--backend", "ray", "--jobs", "2")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert "2 of 4 points failed" in errors
    same_bytes(here, there)
    assert len(list(there.glob("*.failure.json"))) == 2


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_one_sentence_says_what_to_install(grid: Path, tmp_path: Path) -> None:
    arguments = ["sweep", str(grid), "--out", str(tmp_path / "out"), "--backend", "ray"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "pip install 'simserve[ray]'" in result.output


@pytest.mark.parametrize("form", ["{}:{}", "ray://{}:{}"])
def test_where_nobody_listens_is_said_at_once(form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        _check_reachable(form.format(host, port))
    with pytest.raises(ConfigError, match=f"no Ray cluster at .*{port}"):
        _check_reachable(form.format(host, port))
    _check_reachable("auto")


def test_an_address_goes_with_ray(grid: Path) -> None:
    result = CliRunner().invoke(app, ["sweep", str(grid), "--ray-address", "auto"])
    assert result.exit_code == 2
    assert "--backend ray" in result.output
