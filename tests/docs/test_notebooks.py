"""Notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    """As Jupyter would, one cell after the other in a process of its own, but without a screen."""
    script = "\n\n".join("".join(cell["source"]) for cell in code_cells(path))
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "tests").symlink_to(path.parents[1] / "tests")  # recorded runs
    (folder / "cells.py").write_text(script)
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:FigureCanvasAgg", "cells.py"],
        cwd=folder,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert [file.name for file in folder.iterdir()] == ["cells.py"]  # nothing else is written


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_hold_no_outputs(path: Path) -> None:
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
