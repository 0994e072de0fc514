"""The page on cost models says what the code does."""

from __future__ import annotations

import inspect
from pathlib import Path

from simserve.cost import step_model
from simserve.cost.coefficients import COEFFICIENTS
from simserve.cost.features import UNITS
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import Engine, Graphs, ProfileFile, profile_names
from simserve.cost.roofline import PARTS, RooflineCost


def test_the_page_names_every_feature_part_and_parameter(repo_root: Path) -> None:
    page = (repo_root / "docs" / "cost-models.md").read_text()
    parameters = [
        *list(inspect.signature(RooflineCost).parameters)[3:],
        *(name for name in inspect.signature(ProfileCost).parameters if name.startswith("host")),
    ]
    fields = [*ProfileFile.model_fields, *Engine.model_fields, *Graphs.model_fields]
    of_profiles = [*step_model.PARTS, *COEFFICIENTS, *profile_names(), *fields]
    for name in (*UNITS, *PARTS, *parameters, *of_profiles):
        assert f"`{name}`" in page, name
