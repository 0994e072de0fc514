"""Where the commit that a run names comes from."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

import simserve
from simserve.config import environment

NOTED = {"url": "https://example.org/simserve", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}}


@pytest.mark.parametrize(
    ("noted", "commit"),
    [
        (json.dumps(NOTED), "0123abc"),
        (json.dumps({"url": "file:///a.whl", "archive_info": {}}), None),
        (None, None),
    ],
)
def test_an_installation_knows_the_commit_that_pip_noted(
    noted: str | None, commit: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = SimpleNamespace(read_text=lambda name: noted)
    monkeypatch.setattr(environment, "distribution", lambda name: package)
    monkeypatch.setattr(simserve, "__file__", str(tmp_path / "simserve" / "__init__.py"))
    assert environment.collect()["commit"] == commit


def test_a_checkout_goes_by_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    answers = {"rev-parse": "4567def", "status": " M README.md"}
    monkeypatch.setattr(environment, "_git", lambda root, word, *_: answers[word])
    monkeypatch.setattr(simserve, "__file__", str(tmp_path / "simserve" / "__init__.py"))
    assert environment.collect()["commit"] == "4567def+"


def test_versions_are_those_of_the_packages() -> None:
    packages = environment.collect()["packages"]
    assert {"numpy", "pyarrow", "pyyaml"} <= packages.keys()
    assert packages == {name: version(name) for name in packages}
