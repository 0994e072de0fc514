from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.cli.progress import waiting
from simserve.cost.coefficients import COEFFICIENTS, OF_PLANS
from simserve.cost.profile_file import ProfileFile, load_profile
from simserve.cost.step_work import SizeFactors
from simserve.errors import TraceError
from simserve.fidelity.fit.least_squares import fit_bounded, fit_non_negative
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.fit.profile import fit_profile
from simserve.fidelity.fit.residuals import step_errors_of
from simserve.fidelity.fit.sizes import weighted_median
from simserve.fidelity.logs.loaded_log import LoadedLog, load_log
from simserve.fidelity.logs.vllm_log import read_vllm_log
from tests.fidelity.synthetic_logs import synthetic_log

Floats = NDArray[np.float64]
LOGS = Path(__file__).parents[1] / "data" / "vllm_logs"
WAITS = {"context_layer_s": 2e-8, "context_blend": 0.5}
"""The engine of the profile splits contexts; this is one that does not."""
NOT_TOLD = (*OF_PLANS, "inputs_mixed_s")
"""Logs of this engine say neither how attention was dealt out nor what kernels took alone."""
TRUE = {**load_profile("h200-llama-3.1-8b-vllm").coefficients, **WAITS}


@pytest.fixture(scope="module")
def logs() -> list[LoadedLog]:
    """Exact logs of two models."""
    return [
        synthetic_log(TRUE, name=f"{model} {seed}", model=model, seed=seed)
        for model in ("llama-3.1-8b", "llama-3.2-1b")
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def profile(logs: list[LoadedLog]) -> ProfileFile:
    """Fitted to them."""
    return fit_profile(logs, [], name="synthetic", model="llama-3.1-8b")


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_known_coefficients_are_recovered(profile: ProfileFile, name: str) -> None:
    """So a fit that drops what a coefficient stands for fails."""
    assert (TRUE[name] > 0) is (name not in NOT_TOLD)
    assert profile.coefficients[name] == pytest.approx(TRUE[name], rel=0.01, abs=0.0)


def test_a_log_that_does_not_time_its_scheduler_is_refused(logs: list[LoadedLog]) -> None:
    nothing = np.zeros(len(logs[0].steps))
    mute = replace(logs[0], steps=replace(logs[0].steps, schedule_s=nothing, update_s=nothing))
    with pytest.raises(TraceError, match=r"llama-3\.1-8b 0: all its schedule\(\) and update\(\)"):
        fit_profile([mute, logs[1]], [], name="x", model="llama-3.1-8b")


def test_times_in_other_units_are_told() -> None:
    log = load_log(read_vllm_log(LOGS / "warm.json.gz"))
    times = ("duration_s", "schedule_s", "update_s", "gap_s")
    in_ns = replace(log.steps, **{name: 1e3 * getattr(log.steps, name) for name in times})
    with pytest.raises(TraceError, match=r"_s = .* s, which is not from 0 to 1: are their times"):
        fit_profile([replace(log, steps=in_ns)], [], name="x", model="llama-3.1-8b")


def test_sizes_with_poor_kernels_are_found(logs: list[LoadedLog]) -> None:
    """Each model has its own; those of the profile's model are written, and move nothing else."""
    true = {208: 0.9, 256: 1.3, 512: 1.2}
    both = SizeFactors(prefills=true, decodes=true)
    sized = [
        synthetic_log(TRUE, name=str(seed), num_steps=3000, seed=seed, size_factors=both)
        for seed in (7, 8)
    ]
    found = fit_profile([*sized, *logs[2:]], [], name="x", model="llama-3.1-8b")
    assert found.size_factors == pytest.approx(true, rel=0.04)
    assert found.decode_size_factors is None  # kernels were not timed by themselves
    for name in ("linear_flops", "linear_bandwidth", "kv_bandwidth", "prefill_flops"):
        assert found.coefficients[name] == pytest.approx(TRUE[name], rel=0.02)
    unlike = fit_profile([*sized, *logs[2:]], [], name="x", model="llama-3.2-1b")
    assert not unlike.size_factors


@pytest.mark.parametrize("unit", [0.1, 0.3, 1 / 3, 1.0])
@pytest.mark.parametrize("half", [1, 2, 3, 5, 7])
def test_of_two_factors_in_the_middle_the_lower_counts(unit: float, half: int) -> None:
    """Whether half the weights sum to half of their sum is a matter of rounding, which differs."""
    values = np.arange(2.0 * half)
    assert weighted_median(values, np.full(2 * half, unit)) == half - 1
    assert weighted_median(values[1:], np.full(2 * half - 1, unit)) == half


def test_outliers_do_not_move_it(logs: list[LoadedLog]) -> None:
    rng = np.random.default_rng(3)
    spoilt = []
    for log in logs:
        slow = np.where(rng.random(len(log.steps)) < 0.03, 1.5, 1.0)
        noise = rng.lognormal(0.0, 0.01, len(log.steps))
        steps = replace(log.steps, duration_s=log.steps.duration_s * slow * noise)
        spoilt.append(replace(log, steps=steps))
    found = fit_profile(spoilt, [], name="synthetic", model="llama-3.1-8b").coefficients
    for name in ("linear_flops", "linear_bandwidth", "kv_bandwidth", "prefill_flops"):
        assert found[name] == pytest.approx(TRUE[name], rel=0.05)


def test_hosts_of_different_speed_are_told_apart(logs: list[LoadedLog]) -> None:
    slow = synthetic_log(TRUE, name="slow", num_steps=2000, host_scale=1.5, seed=5)
    fast = synthetic_log(TRUE, name="fast", num_steps=2000, host_scale=0.5, seed=6)
    found = fit_profile([*logs, slow, fast], [], name="x", model="llama-3.1-8b")
    scale = {log.name: log.host_scale for log in found.fitted}
    assert scale["slow"] / scale["fast"] == pytest.approx(3.0, rel=0.05)
    assert found.coefficients["linear_flops"] == pytest.approx(TRUE["linear_flops"], rel=0.01)


def test_the_target_models_hosts_define_a_scale_of_one() -> None:
    own = [synthetic_log(TRUE, name=f"own {i}", seed=i, host_scale=0.8) for i in range(3)]
    other = synthetic_log(TRUE, name="other", model="llama-3.2-1b", host_scale=1.6)
    found = fit_profile([*own, other], [], name="x", model="llama-3.1-8b")
    assert found.coefficients["inputs_step_s"] == pytest.approx(
        0.8 * TRUE["inputs_step_s"], rel=0.01
    )
    assert found.fitted[0].host_scale == pytest.approx(1.0, abs=0.01)
    assert found.fitted[3].host_scale == pytest.approx(1.9, abs=0.05)


def test_held_out_errors_domain_and_scatter(logs: list[LoadedLog]) -> None:
    longer = replace(
        logs[1], steps=replace(logs[1].steps, duration_s=1.1 * logs[1].steps.duration_s)
    )
    found = fit_profile([logs[0], *logs[2:]], [longer], name="x", model="llama-3.1-8b")
    error = found.errors["blind"]["all"]
    assert error.num_steps == len(longer.steps)
    assert error.bias == pytest.approx(1 / 1.1 - 1, abs=0.005)
    assert error.mape == pytest.approx(1 - 1 / 1.1, abs=0.005)
    steps = logs[0].steps
    assert found.domain["num_tokens"] == (steps.num_tokens.min(), steps.num_tokens.max())
    assert [log.name for log in found.held_out] == ["llama-3.1-8b 1"]
    for quantiles in found.residuals.values():
        assert quantiles == sorted(quantiles)
        assert np.mean(quantiles) == pytest.approx(1.0, abs=1e-3)


def test_what_cannot_be_fitted_is_said(logs: list[LoadedLog]) -> None:
    for fitted, held_out, model, message in (
        (logs, [], "qwen3-8b", "no log of model 'qwen3-8b'"),
        (logs, logs[:1], "llama-3.1-8b", "fitted and held out at once: llama-3.1-8b 0"),
        (
            [logs[0], replace(logs[1], gpu="h100")],
            [],
            "llama-3.1-8b",
            "one gpu, the logs are of h100, h200",
        ),
    ):
        with pytest.raises(TraceError, match=message):
            fit_profile(fitted, held_out, name="x", model=model)


def test_fit_command(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    arguments = [
        "fit",
        *(str(LOGS / f"{name}.json.gz") for name in ("prefill_2048", "decode_b8_c2048", "warm")),
        "--held-out",
        str(LOGS / "long_on_2048_1024.json.gz"),
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "errors on 1 log not fitted" in result.output
    profile = load_profile(path=out)
    assert (profile.name, profile.model, profile.gpu) == ("mine", "llama-3.1-8b", "h200")
    assert profile.engine.timing_version == "0.20.2"
    assert profile.errors["blind"]["all"].mape < 0.2
    again = tmp_path / "again.json"
    CliRunner().invoke(app, [*arguments[:-1], str(again), "--name", "mine"])
    assert json.loads(again.read_text()) == json.loads(out.read_text())


def test_numpy_of_a_fit_has_one_thread_unless_told_otherwise(tmp_path: Path) -> None:
    """It reads the variable when it is imported, so that later were too late."""
    code = f"""
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "numpy":
            print("threads:", os.environ["OPENBLAS_NUM_THREADS"])
sys.meta_path.insert(0, Watch())
from simserve.cli.main import app
app(["fit", {str(tmp_path / "none.jsonl")!r}, "--out", "none"])
"""
    for given, expected in ({}, "threads: 1"), ({"OPENBLAS_NUM_THREADS": "2"}, "threads: 2"):
        env = {name: value for name, value in os.environ.items() if name[:8] != "OPENBLAS"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env | given, capture_output=True, text=True)
        assert done.stdout.splitlines()[0] == expected, done.stderr


@pytest.mark.parametrize("is_terminal", [True, False])
def test_fitting_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with waiting("fitting 2 logs"):
        pass
    if is_terminal:
        assert re.search(r"fitting 2 logs.*0:00:00", shown.getvalue())
    else:
        assert shown.getvalue() == "fitting 2 logs …\n"


def test_fit_command_asks_whose_profile_it_is(tmp_path: Path) -> None:
    files = [str(LOGS / f"{name}.json.gz") for name in ("prefill_2048", "m1b_decode_b32_c2048")]
    result = CliRunner().invoke(app, ["fit", *files, "--out", str(tmp_path / "p.json")])
    assert result.exit_code == 2
    assert "logs are of llama-3.1-8b, llama-3.2-1b: say with --model" in result.output


def test_least_squares_keep_to_their_bounds() -> None:
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    falling = fit_non_negative(columns, np.array([3.0, 2.0, 1.0]), np.ones(3), outlier=10.0)
    assert falling.tolist() == [pytest.approx(2.0), 0.0]
    x = np.linspace(1, 10, 50)

    def curve(p: Floats) -> Floats:
        return np.asarray(np.log((p[0] * x + p[1]) / (2 * x + 5)))

    free = fit_bounded(
        curve, np.ones(2), np.full(2, 1e-3), np.full(2, 1e3), np.ones(50), outlier=0.1
    )
    assert free == pytest.approx([2.0, 5.0], rel=1e-4)
    bound = fit_bounded(
        curve, np.ones(2), np.full(2, 1e-3), np.array([1.5, 1e3]), np.ones(50), outlier=0.1
    )
    assert bound[0] == pytest.approx(1.5)


def test_the_profile_that_ships_prices_logs_that_it_never_saw() -> None:
    profile = load_profile("h200-llama-3.1-8b-vllm")
    names = ("multiturn_prefix", "pressure", "warm")
    logs = [load_log(read_vllm_log(LOGS / f"{name}.json.gz")) for name in names]
    assert {log.sha256 for log in logs}.isdisjoint(log.sha256 for log in profile.fitted)
    for error in (errors["all"] for errors in step_errors_of(logs, Prices.of(profile)).values()):
        assert error.num_steps > 4000
        assert error.mape < 0.055
        assert abs(error.bias) < 0.025
