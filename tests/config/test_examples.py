"""The configurations of configs/ load, and the scheduler among them is the tutorial's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import simserve
from simserve.config.loader import load_config
from simserve.config.sweep_loader import load_points, load_sweep

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if re.search("^sweep:", path.read_text(), re.M):
        assert all(point.error is None for point in load_points(load_sweep(path)))
    else:
        load_config(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_name_their_schema(path: Path) -> None:
    first = path.read_text().partition("\n")[0]
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / schema).resolve() == ROOT / "schema" / "simserve.schema.json"


def test_own_scheduler_is_that_of_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "tutorials" / "own-scheduler.md").read_text()
    assert (ROOT / "configs" / "own_scheduler" / "my_sched.py").read_text() in page
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)  # where no my_sched is
    result = simserve.run("configs/own_scheduler/own.yaml")
    sys.modules.pop("my_sched")
    assert result.summary_dict["completed"] == 100
    assert result.summary_dict["scheduler"] == "my_sched:MyScheduler"
    assert result.summary_dict["decisions"] == "own scheduler my_sched:MyScheduler"
