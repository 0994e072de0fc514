"""A sweep of four small points, and the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simserve.sweep.runner import run_sweep

BASE = """
model: llama-3.1-8b
workload:
  synthetic:
    num_requests: 12
    arrival: {kind: poisson, rate: 20}
    prompt_len: {kind: lognormal, mean: 300, sigma: 1, max: 2000}
    output_len: {kind: constant, value: 8}
scheduler: {max_num_seqs: 4}
kv_cache: {num_gpu_blocks: 500}
executor: {cost: {kind: formula, base_s: 0.01, per_token_s: 0.00001}}
"""
GRID = """
sweep:
  type: grid
  parameters:
    scheduler.max_num_batched_tokens: [64, 512]
    scheduler.long_prefill_token_threshold: [0, 32]
"""


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the sweep."""
    path = tmp_path_factory.mktemp("sweep") / "grid.yaml"
    path.write_text(BASE + GRID)
    return path


@pytest.fixture(scope="session")
def finished(grid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory, from one process after the other."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert run_sweep(grid, out=out, jobs=1).num_failed == 0
    return out


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Starts `simserve` with arguments."""

    def run(*arguments: str | Path) -> subprocess.Popen[str]:
        code = "from simserve.cli.main import main; main()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    return run


@pytest.fixture
def same_bytes() -> Callable[[Path, Path], None]:
    """Two sweep directories hold the same, but for what may differ between equal runs."""

    def contents(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "env.json"
        }

    def check(one: Path, other: Path) -> None:
        left, right = contents(one), contents(other)
        assert left.keys() == right.keys()
        assert [name for name in left if left[name] != right[name]] == []

    return check
