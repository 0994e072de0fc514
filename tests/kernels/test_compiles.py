"""Every kernel compiles for a GPU. The interpreter also runs code that the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.kernels.compiled import Report


def test_every_branch_of_every_kernel_compiles(repo_root: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True)
    print(done.stderr)
    assert done.returncode == 0, "the compiler broke off at the last call above"
    report = Report(**json.loads(done.stdout.splitlines()[-1]))
    assert not report.errors, "\n\n".join(report.errors)
    assert not report.missed, "no case compiles " + "\n".join(report.missed)
