"""`benchmarks/studies_gpu.py` runs from end to end: on a CPU, with a tiny model and few cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.scripts import load_script

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def sit(out: Path, *arguments: str) -> dict[str, Any]:
    call = ["studies_gpu.py", "--rehearse", "--only", "cells", "--out", str(out), *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", call)
        assert load_script("studies_gpu", ROOT).main() == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_cells_share_a_machine_and_a_sitting_can_be_resumed(tmp_path: Path) -> None:
    report = sit(tmp_path / "first.json", "--cells", "prefix_cache/cache_on#1")
    assert list(report["machines"]) == ["blocks of 16"]
    assert report["left_out"] == []
    (cell,) = report["cells"].values()
    assert cell["failure"] is None
    assert cell["config"] == "prefix_cache"
    assert cell["summary"]["completed"] == len(cell["requests"]["ttft_ms"]) == 10
    assert cell["summary"]["total_cached_tokens"] == sum(cell["requests"]["cached_tokens"]) > 0
    assert cell["steps"]["duration_s"] == pytest.approx(
        sum(cell["steps"]["parts"][f"parts.{part}"] for part in PARTS)
    )
    before = ("--resume", str(tmp_path / "first.json"), "--cells", "prefix_cache/*1", "--renew")
    report = sit(tmp_path / "second.json", *before, "--time-limit", "0")
    assert list(report["cells"].values()) == [cell]
    assert "machines: blocks of 16" in report["left_out"]
    assert len(report["sittings"]) == 2


PARTS = (
    "schedule_s", "update_s", "prepare_s", "forward_s", "sample_s", "sync_s",
)  # fmt: skip
