"""The page on cost models says what the code does."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from simserve.cost.features import UNITS
from simserve.cost.profile_file import ProfileFile, load_profile
from simserve.cost.roofline import PARTS, RooflineCost


def test_the_page_names_every_feature_part_and_parameter(repo_root: Path) -> None:
    page = (repo_root / "docs" / "cost-models.md").read_text()
    parameters = list(inspect.signature(RooflineCost).parameters)[3:]
    for name in (*UNITS, *PARTS, *parameters, *ProfileFile.model_fields):
        assert f"`{name}`" in page, name


def test_the_pages_profile_loads(repo_root: Path, tmp_path: Path) -> None:
    page = (repo_root / "docs" / "cost-models.md").read_text()
    found = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert found is not None
    (tmp_path / "example.json").write_text(found.group(1))
    profile = load_profile(path=tmp_path / "example.json")
    assert profile.name == json.loads(found.group(1))["name"]
