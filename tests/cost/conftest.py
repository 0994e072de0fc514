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
    """A profile with round numbers."""
    coefficients = {
        "schedule_step_s": 1e-4,
        "schedule_request_s": 1e-5,
        "schedule_new_request_s": 2e-5,
        "schedule_new_token_s": 1e-7,
        "inputs_step_s": 1e-3,
        "inputs_request_s": 2e-5,
        "inputs_mixed_s": 0.0,
        "update_step_s": 3e-5,
        "update_request_s": 5e-6,
        "loop_step_s": 1e-5,
        "loop_request_s": 1e-6,
        "intake_first_s": 2e-4,
        "intake_request_s": 1e-4,
        "intake_token_s": 2e-7,
        "launch_step_s": 3e-3,
        "launch_eager_layer_s": 4e-4,
        "kernel_gap_layer_s": 3e-5,
        "mixed_layer_s": 5e-5,
        "merge_layer_s": 0.0,
        "linear_bandwidth": 0.8,
        "linear_flops": 0.75,
        "linear_blend": 0.2,
        "cached_tokens": 1000.0,
        "kv_bandwidth": 0.9,
        "mixed_kv_bandwidth": 0.6,
        "context_layer_s": 0.0,
        "round_layer_s": 0.0,
        "context_blend": 0.5,
        "kv_imbalance": 0.3,
        "shared_kv_saved": 0.0,
        "decode_tokens": 250.0,
        "prefill_flops": 0.6,
        "launch_blend": 0.25,
    }
    return {
        "schema_version": 1,
        "name": "synthetic",
        "model": "llama-3.1-8b",
        "measured_models": ["llama-3.1-8b"],
        "gpu": "h200",
        "engine": {"name": "none", "timing_version": "0", "decision_version": "0.11.0"},
        "attention_path": "none",
        "measured_on": "made up for tests",
        "host": "adds",
        "graphs": {"sizes": [1, 2, 4, *range(8, 513, 8)], "full_up_to": 256},
        "domain": {"num_tokens": [1, 4096], "num_reqs": [1, 256], "decode_kv_tokens": [0, 500000]},
        "coefficients": coefficients,
        "residuals": {
            "decode, up to 32 requests": [0.5, 1.0, 1.5],
            "decode, over 32 requests": [0.9, 1.1],
        },
    }


@pytest.fixture(scope="session")
def models(
    profile_json: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CostModel]:
    """Cost models of every kind: dense, windowed and expert models, profiles with both hosts."""
    file: Path = tmp_path_factory.mktemp("profile") / "synthetic.json"
    file.write_text(json.dumps(profile_json))
    gpu, llama = load_gpu("h200"), load_model("llama-3.1-8b")
    window, experts = load_model("mistral-7b-v0.1"), load_model("mixtral-8x7b")
    return {
        "formula": FormulaCost(4e-3, 2.5e-5, 1.1e-9),
        "roofline": RooflineCost(llama, gpu),
        "roofline-window": RooflineCost(window, gpu),
        "roofline-experts": RooflineCost(experts, gpu, kv_cache_dtype="fp8"),
        "profile": ProfileCost(llama, gpu, path=file),
        "profile-overlaps": ProfileCost(llama, gpu, path=file, host="overlaps", host_scale=1.5),
        "profile-window": ProfileCost(window, gpu, name="h200-llama-3.1-8b-vllm"),
        "profile-shipped": ProfileCost(
            load_model("llama-3.2-1b"), gpu, name="h200-llama-3.2-1b-vllm"
        ),
        "profile-dealt": ProfileCost(llama, gpu, name="h200-llama-3.1-8b-simserve"),
        "profile-dealt-window": ProfileCost(window, gpu, name="h200-llama-3.1-8b-simserve"),
    }
