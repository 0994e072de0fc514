"""A real run beside its simulation: what is simulated, what is written, what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from simserve.api import Written, run
from simserve.config.dump import dump_config
from simserve.config.executor import FormulaCost, RooflineCost, Simulated
from simserve.config.loader import LoadedConfig, load_config
from simserve.fidelity.validate.percentile_table import percentile_rows
from simserve.fidelity.validate.real_gpu import compile_warning, simulated_twin, validate
from simserve.metrics.arrow import numbers
from simserve.metrics.rundir import read_run

FACTS = {
    "executor.device": "cuda",
    "executor.device_name": "Some GPU",
    "executor.attention": "v2",
    "executor.kv_layout": "packed",
    "executor.mixed": "split",
    "executor.dtype": "bfloat16",
    "executor.kv_dtype": "bfloat16",
    "executor.gpu_used_bytes": 3 * 2**30,
    "executor.estimated_gpu_memory_bytes": 2**31,
}


BASE = {
    "model": "llama-3.1-8b",
    "workload": {
        "synthetic": {
            "num_requests": 5,
            "prompt_len": {"kind": "constant", "value": 30},
            "output_len": {"kind": "constant", "value": 4},
        }
    },
}


def config(**executor: Any) -> LoadedConfig:
    return load_config({**BASE, "executor": {"kind": "real", **executor}})


def stand_in(folder: Path, base_s: float, **parts: Any) -> Written:
    """A directory that looks as if a real run had left it; parts are of all steps, or of each."""
    result = run({**BASE, "executor": {"cost": {"kind": "formula", "base_s": base_s}}})
    for name, value in parts.items():
        column = numbers(np.broadcast_to(value, result.steps_table.num_rows))
        result.steps_table = result.steps_table.append_column(f"parts.{name}", column)
    result.summary_dict |= FACTS | {"num_gpu_blocks": 321, "timing": "measured"}
    return Written(result.summary_dict, result.save(folder), None)


def test_the_twin_differs_in_nothing_but_the_executor_and_has_the_real_pool() -> None:
    loaded = config()
    twin = simulated_twin(loaded, {"num_gpu_blocks": 321}).config
    assert twin.executor == Simulated(cost=RooflineCost(kind="roofline"))
    assert twin.kv_cache.num_gpu_blocks == 321
    same = {"executor": loaded.config.executor, "kv_cache": loaded.config.kv_cache}
    assert twin.model_copy(update=same) == loaded.config


def test_the_cost_model_is_the_shadow_s_if_no_other_is_named() -> None:
    formula, other = ({"kind": "formula", "base_s": s} for s in (0.5, 0.25))
    for executor, base_s in (
        ({"cost": formula}, 0.5),
        ({"shadow": {"cost": formula}}, 0.5),
        ({"shadow": {"cost": formula}, "cost": other}, 0.25),
    ):
        loaded = config(**executor)
        twin = simulated_twin(loaded, {"num_gpu_blocks": 9}).config
        assert twin.executor.cost == FormulaCost(kind="formula", base_s=base_s)
        again = load_config(yaml.safe_load(dump_config(loaded.config)))
        assert simulated_twin(again, {"num_gpu_blocks": 9}).config.executor == twin.executor


def test_sampling_is_priced_where_it_was_measured() -> None:
    executor = {"kind": "real", "tokens": "sampled", "sampling": [{"top_p": 0.9}]}
    for gpu, is_priced in (("h200", True), ("a100", False)):
        loaded = load_config({**BASE, "gpu": gpu, "executor": executor})
        twin = simulated_twin(loaded, {"num_gpu_blocks": 9}).config.executor
        assert isinstance(twin, Simulated)
        assert twin.sampling == (loaded.config.executor.sampling if is_priced else [])


def test_both_results_and_their_difference_are_written(tmp_path: Path) -> None:
    real = stand_in(tmp_path / "run", base_s=0.1)
    loaded = config(cost={"kind": "formula", "base_s": 0.2})
    validation = validate(loaded, real)
    rows = {row.key: row for row in validation.rows}
    assert rows["p50_itl_ms"].error == pytest.approx(1.0)
    runs = (read_run(real.directory), read_run(real.directory / "simulated"))
    assert validation.rows[:-1] == percentile_rows(*(one.summary_dict for one in runs))
    written = json.loads((real.directory / "validation.json").read_text())
    assert written["statement"] == validation.statement
    assert written["rows"] == [row.as_json() for row in validation.rows]


def test_the_statement_names_decisions_path_and_timing(tmp_path: Path) -> None:
    statement = validate(config(), stand_in(tmp_path / "run", 0.1)).statement
    assert statement == (
        "decisions vllm 0.11.0; real: Some GPU, attention v2, kv_layout packed, mixed split, "
        "dtype bfloat16, kv_dtype bfloat16; simulated: timing roofline"
    )


@pytest.mark.parametrize(
    ("name", "attention", "flagged"),
    [
        ("h200-llama-3.1-8b-simserve", "auto", False),
        ("h200-llama-3.1-8b-simserve", "v2", True),
        ("h200-llama-3.1-8b-vllm", "auto", True),
    ],
)
def test_a_profile_of_another_path_is_flagged(
    tmp_path: Path, name: str, attention: str, flagged: bool
) -> None:
    real = stand_in(tmp_path / "run", 0.1)
    path = {"attention": attention, "kv_layout": "nhd", "mixed": "varlen"}
    real.summary.update({f"executor.{key}": value for key, value in path.items()})
    statement = validate(config(cost={"kind": "profile", "name": name}), real).statement
    assert (f"; profile '{name}' was measured on another path: " in statement) == flagged


def test_the_shadow_s_prices_are_summed_over_the_real_steps(tmp_path: Path) -> None:
    real = stand_in(tmp_path / "run", 0.1, shadow_s=0.05, first_shape=0.0)
    validation = validate(config(), real)
    assert compile_warning(real.directory) is None
    priced = {row.key: row for row in validation.rows}["shadow_s"]
    assert priced.real == pytest.approx(0.1 * real.summary["num_steps"])
    assert priced.error == pytest.approx(-0.5)
    assert priced.name == "all real steps, priced by the shadow (s)"


def test_the_shadow_is_not_blamed_for_the_making_of_drafts(tmp_path: Path) -> None:
    real = stand_in(tmp_path / "run", 0.1, shadow_s=0.05, draft_s=0.02)
    priced = {row.key: row for row in validate(config(), real).rows}["shadow_s"]
    assert priced.real == pytest.approx(0.08 * real.summary["num_steps"])
    assert priced.name == "all real steps, without drafting, priced by the shadow (s)"


def test_steps_that_compiled_are_named_and_not_priced(tmp_path: Path) -> None:
    first_shape = [1.0, 0.0, 0.0, 1.0]
    real = stand_in(tmp_path / "run", 0.1, shadow_s=0.05, first_shape=first_shape)
    validation = validate(config(), real)
    priced = {row.key: row for row in validation.rows}["shadow_s"]
    assert priced.real == pytest.approx(0.2)
    assert priced.name == "real steps that compiled nothing, priced by the shadow (s)"
    assert ", something was compiled in 2 steps;" in validation.statement
    warning = compile_warning(real.directory)
    assert warning is not None
    assert warning.startswith("2 of 4 steps compiled kernels or captured CUDA graphs: 0.20 s of ")


def test_memory_is_beside_its_estimate(tmp_path: Path) -> None:
    row = validate(config(), stand_in(tmp_path / "run", 0.1)).rows[-1]
    assert (row.key, row.real, row.simulated) == ("gpu_memory_gib", 3.0, 2.0)
