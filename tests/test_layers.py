"""The gates on imports can fail: each contract is shown a module that breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TRESPASSERS = {
    "simserve/kv/trespasser.py": "import simserve.sched",
    "simserve/fidelity/fit/trespasser.py": "import simserve.fidelity.validate",
    "simserve/sched/trespasser.py": "def f():\n    import torch",
    "simserve/cost/trespasser.py": "import simpy",
    "kernels/simserve_kernels/trespasser.py": "import simserve.errors",
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """The contracts of `root`/pyproject.toml, applied to the packages in `root`."""
    path = os.pathsep.join([str(root), str(root / "kernels")])
    code = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_every_contract_catches_its_trespasser(tmp_path: Path, repo_root: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("simserve", "kernels"):
        shutil.copytree(repo_root / name, tmp_path / name, ignore=ignore)
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    for name, code in TRESPASSERS.items():
        (tmp_path / name).write_text(code)

    outcome = lint_imports(tmp_path)

    config = tomllib.loads((repo_root / "pyproject.toml").read_text())
    contracts = [contract["name"] for contract in config["tool"]["importlinter"]["contracts"]]
    kept = [name for name in contracts if f"{name} BROKEN" not in outcome.stdout]
    assert not kept, outcome.stdout + outcome.stderr
    assert outcome.returncode == 1


@pytest.mark.parametrize(
    ("file", "code", "rule"),
    [
        ("simserve/kv/x.py", "import pandas", "TID253"),
        ("simserve/config/x.py", "import torch", "TID253"),
        ("simserve/engine/x.py", "import random", "TID251"),
        ("simserve/engine/x.py", "from time import time", "TID251"),
        ("simserve/metrics/x.py", "print(1)", "T201"),
    ],
)
def test_ruff_keeps_modules_light_and_deterministic(
    repo_root: Path, file: str, code: str, rule: str
) -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", rule, "--stdin-filename", file, "-"],
        cwd=repo_root,
        input=code,
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 1, outcome.stdout
    assert rule in outcome.stdout
