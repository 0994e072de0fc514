"""docs/studies says what comes out when its configurations are simulated now."""

from __future__ import annotations

import filecmp
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "studies"
PAGES = sorted((ROOT / "docs" / "studies").glob("*.md"))


def call(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tables_are_what_comes_out() -> None:
    outcome = call(ROOT / "benchmarks" / "studies.py", "--check")
    assert outcome.returncode == 0, (
        f"{outcome.stdout}{outcome.stderr}`python benchmarks/studies.py` writes them anew; then "
        "read the pages again"
    )


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    for folder in ("benchmarks", "configs", "docs", "tests/data"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    page = tmp_path / "docs" / "studies" / "prefix-cache.md"
    page.write_text(page.read_text().replace("| 16,368 |", "|     16 |").replace("16,368", "16"))
    outcome = call(tmp_path / "benchmarks" / "studies.py", "--check", "prefix-cache", "template")
    assert outcome.returncode == 1, outcome.stderr
    assert outcome.stdout == "out of date: docs/studies/prefix-cache.md\n"


def test_traces_are_what_their_script_writes(tmp_path: Path) -> None:
    outcome = call(ROOT / "benchmarks" / "study_traces.py", str(tmp_path))
    assert outcome.returncode == 0, outcome.stderr
    names = sorted(path.name for path in CONFIGS.glob("*.jsonl"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert filecmp.cmpfiles(CONFIGS, tmp_path, names, shallow=False) == (names, [], [])


def test_every_configuration_has_a_table_and_every_page_is_listed() -> None:
    found = {
        name for page in PAGES for name in re.findall(r"<!-- begin (\S+) -->", page.read_text())
    }
    assert found - {"long_prefill_recorded"} == {path.stem for path in CONFIGS.glob("*.yaml")}
    listed = re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs" / "studies" / "README.md").read_text())
    assert {page.name for page in PAGES} - {"README.md"} <= set(listed)
