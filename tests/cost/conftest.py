"""Cost models of every kind, and plans to price."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simserve.config.presets import load_gpu, load_model
from simserve.cost.formula import FormulaCost
from simserve.cost.profile import ProfileCost
from simserve.cost.roofline import RooflineCost
from simserve.protocols import CostModel
from simserve.types import StepPlan, StepRun


@pytest.fixture(scope="session")
def step() -> Callable[..., StepRun]:
    """Makes a run of (start, tokens) requests."""

    def make(*requests: tuple[int, int], count: int = 1, samples: bool = True) -> StepRun:
        plan = StepPlan(
            step=0,
            request_ids=[str(i) for i in range(len(requests))],
            starts=[start for start, _ in requests],
            num_tokens=[n for _, n in requests],
            samples=[samples] * len(requests),
        )
        return StepRun(plan, count)

    return make


@pytest.fixture(scope="session")
def profile_json() -> dict[str, Any]:
    """A synthetic profile with a slope, a hinge and a table."""
    return {
        "schema_version": 1,
        "name": "synthetic",
        "model": "llama-3.1-8b",
        "gpu": "h200",
        "engine": {"name": "none", "timing_version": "0", "decision_version": "0.11.0"},
        "attention_path": "none",
        "measured_on": "made up for tests",
        "domain": {"num_tokens": [1, 4096], "num_reqs": [1, 256], "decode_kv_tokens": [0, 500000]},
        "terms": [
            {"feature": "step", "unit": "steps", "part": "host_s", "seconds_per_unit": 1e-3},
            {"feature": "num_reqs", "unit": "requests", "part": "host_s", "seconds_per_unit": 2e-5},
            {
                "feature": "num_tokens",
                "unit": "tokens",
                "points": [[1, 0.005], [512, 0.013], [4096, 0.1]],
            },
            {"feature": "decode_kv_tokens", "unit": "tokens", "seconds_per_unit": 3e-8},
            {
                "feature": "decode_kv_tokens",
                "unit": "tokens",
                "above": 1000.5,
                "seconds_per_unit": 1e-8,
            },
        ],
    }


@pytest.fixture(scope="session")
def models(
    profile_json: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CostModel]:
    """One cost model of every kind; a dense, a windowed and an expert model for the roofline."""
    file: Path = tmp_path_factory.mktemp("profile") / "synthetic.json"
    file.write_text(json.dumps(profile_json))
    gpu = load_gpu("h200")
    return {
        "formula": FormulaCost(4e-3, 2.5e-5, 1.1e-9),
        "roofline": RooflineCost(load_model("llama-3.1-8b"), gpu),
        "roofline-window": RooflineCost(load_model("mistral-7b-v0.1"), gpu),
        "roofline-experts": RooflineCost(load_model("mixtral-8x7b"), gpu, kv_cache_dtype="fp8"),
        "profile": ProfileCost(load_model("llama-3.1-8b"), gpu, path=file),
    }
