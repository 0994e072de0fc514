"""A run's tables tell what every step computed: as the plans themselves do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from simserve import api
from simserve.cli.main import app
from simserve.config.build import build
from simserve.config.loader import load_config
from simserve.config.presets import load_model
from simserve.cost.dealing import AttentionPlan, Dealer, Dealt, MixedLaunches, SplitDecodes
from simserve.cost.profile_file import load_profile
from simserve.engine.simulation import simulate
from simserve.errors import RunDirectoryError
from simserve.fidelity.logs.observations import COLUMNS
from simserve.fidelity.logs.run_steps import measured_steps
from simserve.fidelity.logs.step_watch import PARTS, StepWatch
from simserve.metrics.rundir import read_run
from simserve.metrics.tables import requests_table, steps_table
from simserve.types import StepResult, StepRun
from tests.executor.decoders import tiny_config

LOG = Path(__file__).parents[1] / "data" / "vllm_logs" / "warm.json.gz"
COUNTS = [name for name in COLUMNS if not name.endswith("_s")]
GRAPH_SIZES = [1, 2, 4, 8]
PREEMPTING = ("kv_cache.num_gpu_blocks=20",)
SHORT_PROMPTS = (
    "workload.synthetic.shared_prefix=null",
    "workload.synthetic.prompt_len.max=8",
    "workload.synthetic.arrival.rate=5000",
)


class _Answers:
    """Takes some time for every part of a step, as the real executor does."""

    single_steps = True

    def add_request(self, request: Any) -> None: ...

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        rng = np.random.default_rng(run.plan.step)
        parts = {name: float(rng.uniform(1e-4, 1e-3)) for name in PARTS}
        facts = {"first_shape": float(run.plan.step % 10 == 3)}
        return StepResult([start_s + sum(parts.values())], parts | facts, run.plan.samples)


def _run(*overrides: str, dealer: Dealer | None = None) -> tuple[StepWatch, pa.Table, pa.Table]:
    config = {
        "model": "llama-3.2-1b",
        "workload": {
            "synthetic": {
                "num_requests": 40,
                "arrival": {"kind": "poisson", "rate": 900},
                "prompt_len": {"kind": "uniform", "min": 1, "max": 90},
                "output_len": {"kind": "uniform", "min": 1, "max": 12},
                "shared_prefix": {"prefix_len": {"kind": "constant", "value": 48}, "num_groups": 2},
            }
        },
        "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 256},
        "kv_cache": {"num_gpu_blocks": 200},
    }
    built = build(load_config(config, list(overrides)), 0)
    built.parts.executor = watch = StepWatch(_Answers(), None, 0)
    if dealer is not None:
        watch.deal(dealer, GRAPH_SIZES)
    simulate(built.parts)
    data = built.recorder.data()
    return watch, requests_table(data, False), steps_table(data)


def test_counts_are_those_of_the_plans() -> None:
    watch, requests, steps = _run()
    expected, found = watch.measured(), measured_steps(requests, steps)
    assert len(found) == len(expected) > 40
    for name in (*COUNTS, "duration_s", "schedule_s", "update_s"):
        columns = getattr(found.steps, name), getattr(expected.steps, name)
        assert columns[0] == pytest.approx(columns[1]), name
    assert found.host_s == pytest.approx(expected.host_s)
    assert found.heat == pytest.approx(expected.heat)
    assert found.heat.max() > 0
    assert found.steps.num_prefills.max() > 1
    assert found.steps.prefill_pairs.sum() > 0


def _dealer(num_programs: int) -> Dealer:
    """Of a GPU so small that the order of a batch makes a difference."""
    tiles = {"rows": 16, "keys": 16, "programs": num_programs}
    cut = {"tile": 16, "programs": num_programs, "fine_tokens": 32}
    launches = {"tall": tiles, "whole": {**tiles, "keys": 8}}
    plan = AttentionPlan(
        few_decodes=SplitDecodes(**cut),
        many_decodes=SplitDecodes(**{**cut, "tile": 32}),
        many_decodes_from=4,
        short=MixedLaunches(**launches),
        long=MixedLaunches(**{**launches, "tall": {**tiles, "rows": 32}}),
        long_from=80,
    )
    return Dealer(plan, load_model("llama-3.2-1b"))


@pytest.mark.parametrize("num_programs", [16, 24, 20])
@pytest.mark.parametrize("overrides", [(), PREEMPTING, SHORT_PROMPTS])
def test_attention_is_dealt_out_as_of_the_plans(
    num_programs: int, overrides: tuple[str, ...]
) -> None:
    """Of KV heads there are 8, so that these are two or three parts, and steps take many rounds.

    Among short prompts are some of one token, which look like decodes, beside parts of others.
    """
    watch, requests, steps = _run(*overrides, dealer=_dealer(num_programs))
    watched = watch.measured().steps
    again = measured_steps(requests, steps, None, _dealer(num_programs), GRAPH_SIZES).steps
    times = watched.duration_s.tolist()
    rows = [times.index(pytest.approx(one)) for one in again.duration_s]
    assert watched.dealt is not None
    assert again.dealt is not None
    for name, expected, found in zip(Dealt._fields, watched.dealt, again.dealt, strict=True):
        assert found.tolist() == expected[rows].tolist(), name
        assert len(set(found.tolist())) > 1, name


def test_steps_of_preempted_requests_are_left_out() -> None:
    watch, requests, steps = _run(*PREEMPTING)
    assert sum(requests["num_preemptions"].to_pylist()) > 0
    watched, explained = watch.measured(), measured_steps(requests, steps)
    expected, found = watched.steps, explained.steps
    assert 0 < len(found) < len(expected)
    rows = [list(expected.duration_s).index(pytest.approx(one)) for one in found.duration_s]
    for name in COUNTS:
        assert getattr(found, name).tolist() == getattr(expected, name)[rows].tolist(), name
    assert explained.heat == pytest.approx(watched.heat[rows])


def test_a_simulated_run_is_refused(tmp_path: Path) -> None:
    _, requests, steps = _run()
    with pytest.raises(RunDirectoryError, match=r"no parts\.forward_s"):
        measured_steps(requests, steps.drop_columns(["parts.forward_s"]))
    workload = {"synthetic": {"num_requests": 2}}
    config = {"model": "llama-3.2-1b", "workload": workload, "metrics": {"plot": False}}
    api.run_to_directory(load_config(config), out=tmp_path / "run")
    out = tmp_path / "p.json"
    result = CliRunner().invoke(app, ["fit", str(tmp_path / "run"), "--out", str(out)])
    assert result.exit_code == 2
    assert "was simulated" in result.output
    assert not out.exists()


def test_a_real_run_is_fitted(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3", torch_dtype="float32")))
    lengths = {"kind": "uniform", "min": 2, "max": 30}
    config = {
        "model": {"config": str(tmp_path / "config.json")},
        "gpu": "h200",
        "workload": {
            "synthetic": {"num_requests": 30, "prompt_len": lengths, "output_len": lengths}
        },
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 64},
        "kv_cache": {"num_gpu_blocks": 40},
        "executor": {"kind": "real", "device": "cpu", "dtype": "float32"},
        "metrics": {"plot": False},
    }
    api.run_to_directory(load_config(config), out=tmp_path / "run")
    out = tmp_path / "mine.json"
    result = CliRunner().invoke(app, ["fit", str(tmp_path / "run"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    profile = load_profile(path=out)
    assert profile.engine.name == "simserve"
    assert profile.engine.decision_version == "0.11.0"
    assert profile.attention_path.startswith("attention auto")
    assert "torch" in profile.measured_on
    steps = read_run(tmp_path / "run").steps
    assert 0.9 * len(steps) < profile.fitted[0].num_steps <= len(steps)
    assert profile.coefficients["inputs_step_s"] > 0
    assert profile.clock is not None
    again = CliRunner().invoke(
        app, ["fit", str(tmp_path / "run"), str(LOG), "--model", "x", "--out", str(out)]
    )
    assert again.exit_code == 2
    assert "of two engines" in again.output
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    shutil.copytree(tmp_path / "run", tmp_path / "dealt")
    shipped = load_profile("h200-llama-3.1-8b-simserve").attention_plan
    assert shipped is not None
    env["executor"]["attention_plan"] = shipped.model_dump()
    (tmp_path / "dealt" / "env.json").write_text(json.dumps(env))
    result = CliRunner().invoke(app, ["fit", str(tmp_path / "dealt"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    dealt = load_profile(path=out)
    assert dealt.attention_plan == shipped
    assert profile.coefficients["merge_layer_s"] == profile.coefficients["round_layer_s"] == 0
    both = CliRunner().invoke(
        app, ["fit", *(str(tmp_path / name) for name in ("run", "dealt")), "--out", str(out)]
    )
    assert both.exit_code == 2
    assert "dealt has another one than run" in " ".join(both.output.split())
    env["executor"]["attention_plan"]["long_from"] = 0
    (tmp_path / "dealt" / "env.json").write_text(json.dumps(env))
    broken = CliRunner().invoke(app, ["fit", str(tmp_path / "dealt"), "--out", str(out)])
    assert broken.exit_code == 2
    where = "dealt/env.json: executor.attention_plan.long_from: Input should be greater than 0"
    assert where in " ".join(broken.output.split())
