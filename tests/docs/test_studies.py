"""docs/studies says what comes out when its configurations are simulated, and what was measured."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.docs.scripts import load_script, run_script

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "studies"
PAGES = sorted((ROOT / "docs" / "studies").glob("*.md"))
NOTEBOOKS = ROOT / "notebooks" / "studies"
NO_CONFIGURATION = {"long_prefill_recorded", "decode_kernels", "flash_time", "flash_counters"}
NO_CONFIGURATION |= {"sampling_errors", "sampling_methods"}
"""Tables of what was recorded or measured elsewhere."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of all that the studies' pages come from."""
    for folder in ("benchmarks", "configs", "docs", "tests/data"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


@cache
def studies_here() -> Any:
    return load_script("studies", ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_what_comes_out(page: Path) -> None:
    stale = list(studies_here().main([page.stem], check=True))
    assert not stale, "`python benchmarks/studies.py` writes them anew; then read the pages again"


def test_a_changed_number_is_found(tree: Path) -> None:
    page = tree / "docs" / "studies" / "prefix-cache.md"
    page.write_text(page.read_text().replace("| 16,368 |", "|     16 |").replace("16,368", "16"))
    outcome = run_script("studies", tree, "--check", "prefix-cache", "decode-kernels")
    assert outcome == (1, "out of date: docs/studies/prefix-cache.md\n")


def measured(ttft_ms: float) -> dict[str, Any]:
    """A file as `studies_gpu.py` writes it: three runs of a cell, and one that failed.

    `ttft_ms` is the median of all latencies.
    """
    keys = [f"class.{which} {n}.p50_ttft_ms" for which in ("cold", "repeat") for n in (256, 1024)]
    keys += [
        f"class.{which} {n}.p50_ttft_ms" for which in ("cold", "repeat") for n in (4096, 16384)
    ]
    row = {
        "failure": None,
        "config": "prefix_cache",
        "summary": {"num_gpu_blocks": 17001},
        "requests": {"class": ["repeat 16384"], "cached_tokens": [16367]},
        "steps": {},
    }
    cells = {
        f"prefix_cache/cache_on#{i + 1}": {
            **row,
            "summary": row["summary"] | dict.fromkeys(keys, v),
        }
        for i, v in enumerate((ttft_ms - 1.0, ttft_ms, ttft_ms + 5.0))
    }
    return {
        "command": ["python", "benchmarks/studies_gpu.py"],
        "date": "2026-01-02T03:04:05+00:00",
        "environment": {
            "gpu": "Some GPU",
            "commit": None,
            "packages": {"torch": "2", "triton": "3"},
        },
        "machines": {},
        "launches": {},
        "steps": {},
        "kernels": {},
        "left_out": [],
        "sittings": [{"date": "2026-01-02T03:04:05+00:00", "wall_s": 12.3}],
        "cells": cells | {"prefix_cache/cache_off#1": {"failure": "OutOfMemoryError: no room"}},
    }


def test_measured_cells_stand_beside_their_simulation(tree: Path) -> None:
    results = tree / "benchmarks" / "results" / "studies_h200.json"
    results.write_text(json.dumps(measured(12.34)))
    page = tree / "docs" / "studies" / "prefix-cache.md"
    assert not list(load_script("studies", tree).main(["prefix-cache"], check=False))
    both = r"12\.3 / [\d.]+ +"
    assert re.search(rf"\| +16,384 \| 16,367 / 16,368 +\| {both}\| {both}\|\n", page.read_text())
    assert not list(load_script("studies", tree).main(["prefix-cache"], check=True))
    results.write_text(json.dumps(measured(12.84)))
    stale = list(load_script("studies", tree).main(["prefix-cache"], check=True))
    assert stale == ["docs/studies/prefix-cache.md"]


def test_what_was_not_measured_is_said(tree: Path) -> None:
    (tree / "benchmarks" / "results" / "studies_h200.json").unlink(missing_ok=True)
    assert not list(load_script("studies", tree).main(["prefix-cache"], check=False))
    block = "<!-- begin h200:prefix_cache -->\nNot measured yet.\n<!-- end h200:prefix_cache -->\n"
    assert block in (tree / "docs" / "studies" / "prefix-cache.md").read_text()


def test_traces_are_what_their_script_writes(tmp_path: Path) -> None:
    assert run_script("study_traces", ROOT, str(tmp_path)) == (0, "")
    names = sorted(path.name for path in CONFIGS.glob("*.jsonl"))
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert filecmp.cmpfiles(CONFIGS, tmp_path, names, shallow=False) == (names, [], [])


def test_every_configuration_has_its_tables_and_every_page_is_listed() -> None:
    found = {
        name for page in PAGES for name in re.findall(r"<!-- begin (\S+) -->", page.read_text())
    }
    configurations = {path.stem for path in CONFIGS.glob("*.yaml")}
    simulated = {name.partition(":")[0] for name in found if not name.startswith("h200")}
    assert simulated - NO_CONFIGURATION == configurations
    assert {f"h200:{name}" for name in configurations} <= found
    listed = re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs" / "studies" / "README.md").read_text())
    assert {page.name for page in PAGES} - {"README.md"} <= set(listed)


def test_every_study_has_a_notebook_without_outputs() -> None:
    pages = {page.stem.replace("-", "_") for page in PAGES} - {"README"}
    notebooks = {path.stem: path for path in NOTEBOOKS.glob("*.ipynb")}
    assert set(notebooks) == pages
    for path in notebooks.values():
        cells = [one for one in json.loads(path.read_text())["cells"] if one["cell_type"] == "code"]
        assert all(one["outputs"] == [] and one["execution_count"] is None for one in cells)
