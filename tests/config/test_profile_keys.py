"""A run on a profile, from its configuration to its summary."""

from __future__ import annotations

from typing import Any

import pytest

from simserve.api import run
from simserve.errors import ConfigError

BASE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {
        "synthetic": {
            "num_requests": 40,
            "arrival": {"kind": "poisson", "rate": 20},
            "prompt_len": {"kind": "constant", "value": 300},
            "output_len": {"kind": "constant", "value": 30},
        }
    },
}
PROFILE = {"kind": "profile", "name": "h200-llama-3.1-8b-vllm"}


def summary(executor: dict[str, Any], *overrides: str) -> dict[str, Any]:
    return dict(run({**BASE, "executor": executor}, overrides).summary_dict)


def test_decisions_and_timing_are_stated_apart() -> None:
    found = summary({"cost": PROFILE})
    assert found["decisions"] == "vllm 0.11.0"
    assert found["timing"] == "profile h200-llama-3.1-8b-vllm (vllm 0.20.2)"
    assert found["out_of_domain_steps"] == 0


@pytest.mark.parametrize("repetitions", [1, 2])
def test_what_was_not_measured_is_a_warning_and_in_the_summary(repetitions: int) -> None:
    """Where whoever has only that reads it; what was is silent."""
    config = {**BASE, "executor": {"cost": PROFILE}, "metrics": {"repetitions": repetitions}}
    result = run(config | {"model": "qwen3-8b", "scheduler": {"enable_chunked_prefill": False}})
    (first, second) = result.warnings
    assert "forces chunked prefill on" in first
    assert "model 'qwen3-8b' was not measured" in second
    assert result.summary_dict["warnings"] == f"{first}; {second}"
    assert "warnings" not in run(config).summary_dict


@pytest.mark.parametrize(
    ("planned_ahead", "host", "is_said"),
    [(True, "as_measured", True), (True, "overlaps", False), (False, "as_measured", False)],
)
def test_host_time_that_steps_planned_ahead_do_not_hide_is_a_warning(
    planned_ahead: bool, host: str, is_said: bool
) -> None:
    config = {**BASE, "scheduler": {"async_scheduling": planned_ahead}}
    config["executor"] = {"cost": {**PROFILE, "host": host}, "noise": "residual"}
    warnings = run(config, ["workload.synthetic.num_requests=2"]).warnings
    assert is_said is any("its host time still adds" in text for text in warnings)


def test_a_slower_host_and_noise_show_in_latencies() -> None:
    plain = summary({"cost": PROFILE})
    slow = summary({"cost": {**PROFILE, "host_scale": 2.0}})
    assert slow["median_tpot_ms"] > 1.1 * plain["median_tpot_ms"]
    hidden = summary({"cost": {**PROFILE, "host": "overlaps"}})
    assert hidden["median_tpot_ms"] < 0.9 * plain["median_tpot_ms"]
    noisy = summary({"cost": PROFILE, "noise": "residual"})
    assert noisy["p99_itl_ms"] > plain["p99_itl_ms"]
    assert noisy == summary({"cost": PROFILE, "noise": "residual"})
    assert noisy != summary({"cost": PROFILE, "noise": "residual"}, "seed=1")


def test_runs_of_steps_are_what_single_steps_are_with_noise_and_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from simserve import api
    from simserve.config.build import build

    executor = {"cost": PROFILE, "noise": "residual"}
    at_once = summary(executor)

    def one_by_one(*args: Any, **options: Any) -> Any:
        return build(*args, **options, leap=False)

    monkeypatch.setattr(api, "build", one_by_one)
    assert summary(executor) == at_once


def test_noise_needs_a_profile() -> None:
    with pytest.raises(ConfigError, match="it needs cost kind profile"):
        run({**BASE, "executor": {"noise": "residual"}})
