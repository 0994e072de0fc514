"""The tables of docs/ say what benchmarks/results hold, and the script that writes them notices."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.docs.scripts import run_script

ROOT = Path(__file__).parents[2]


def test_pages_and_results_agree() -> None:
    assert run_script("tables", ROOT, "--check") == (0, "")


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    for folder in ("benchmarks", "docs", "simserve/presets/profiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    page = tmp_path / "docs" / "kernels.md"
    text = page.read_text()
    row = re.search(r"\| prefill 8192 .*\|", text)
    assert row is not None
    page.write_text(text.replace(row[0], row[0].replace("1", "2", 1)))
    outcome = run_script("tables", tmp_path, "--check")
    assert outcome == (1, "out of date: docs/kernels.md\n")


def test_every_table_has_a_place() -> None:
    script = (ROOT / "benchmarks" / "tables.py").read_text()
    names = set(re.findall(r'^    "(.*?)": \(f?"[\w./{}-]+json"', script, re.M))
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert len(names) > 5
    assert names == set(re.findall(r"<!-- (.*): begin -->", pages))
