"""A missing torch skips, or stops the session where SIMSERVE_REQUIRE_TORCH=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


def run_pytest(folder: Path, require: str) -> subprocess.CompletedProcess[str]:
    """pytest on one test that needs torch, in an interpreter that cannot import it."""
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (folder / "test_it.py").write_text(
        "import pytest\n\ndef test_it():\n    pytest.importorskip('torch')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "-rs", "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        env={**os.environ, "SIMSERVE_REQUIRE_TORCH": require},
        capture_output=True,
        text=True,
    )


def test_missing_torch_skips_and_says_why(tmp_path: Path) -> None:
    outcome = run_pytest(tmp_path, require="")
    assert outcome.returncode == 0
    assert "could not import 'torch'" in outcome.stdout


def test_missing_torch_fails_where_it_is_required(tmp_path: Path) -> None:
    outcome = run_pytest(tmp_path, require="1")
    assert outcome.returncode == pytest.ExitCode.USAGE_ERROR
    assert "SIMSERVE_REQUIRE_TORCH=1, but torch" in outcome.stderr
