"""Validation: nothing is found where there is nothing, and every kind of error is."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import simserve
from simserve.cli.main import app
from simserve.errors import ConfigError, TraceError
from simserve.fidelity.logs.measured import measured_log
from simserve.fidelity.logs.vllm_log import StepLog
from simserve.fidelity.replay.log_run import replay_log, simulate_log
from simserve.fidelity.replay.plans import PlanCheck
from simserve.fidelity.validate.attribution import priced_plans
from simserve.fidelity.validate.divergence import explain
from simserve.fidelity.validate.judged_logs import group_repeats
from simserve.fidelity.validate.saturation import NEAR_SATURATION, ScaledCost, ttft_elasticity
from simserve.fidelity.validate.step_errors import (
    SLOWER_HOST,
    StepError,
    errors_by_regime,
    price_log,
)
from simserve.fidelity.validate.timing import profile_timing
from simserve.fidelity.validate.tolerances import BLIND, HOST_KNOWN, LIMITS, parse_tolerances
from simserve.fidelity.validate.validation import Cell, Validation
from simserve.fidelity.validate.workload import Timing, validate_workload
from simserve.protocols import Price
from simserve.types import StepRun
from tests.fidelity.conftest import LOGS, write
from tests.fidelity.made_log import HostCost, made_log, poisson


@pytest.fixture(scope="module")
def log() -> StepLog:
    """Light load on `HostCost`."""
    return made_log(poisson(30, 12.0), HostCost())


def timing(gpu_scale: float = 1.0, **more: Any) -> Timing:
    return Timing(name="made", cost=lambda host: HostCost(host, gpu_scale), **more)


def cell(validation: Validation, name: str) -> Cell:
    return next(one for one in validation.cells if one.name == name)


# -- the whole -------------------------------------------------------------------------------------


def test_the_right_cost_model_is_right_in_everything(log: StepLog) -> None:
    found = validate_workload([log], timing())
    assert found.misses == []
    assert found.divergence is None
    errors = [one.error for one in found.cells if one.error is not None]
    assert len(errors) == 17
    assert np.abs(errors).max() < 1e-3
    assert all(real == simulated for real, simulated in found.counts.values())
    assert found.steps["all"].num_steps == len(log.steps)
    assert found.steps["all"].mape < 1e-3
    assert not found.near_saturation
    assert all(abs(e or 0.0) < 2e-3 for by in found.attribution.values() for e in by.values())


def test_a_request_before_the_first_step_waits_as_long_in_every_run() -> None:
    log = made_log([(0.0105, 3000, 3)], HostCost(300.0))
    found = validate_workload([log], timing_of(300.0))
    assert all(abs(e or 0.0) < 1e-3 for by in found.attribution.values() for e in by.values())


def timing_of(host_scale: float) -> Timing:
    return Timing(name="made", cost=lambda host: HostCost(host_scale * host))


def test_preemptions_are_found_again() -> None:
    log = made_log(poisson(40, 60.0, output_len=60), HostCost(), num_free_blocks=300)
    found = validate_workload([log], timing())
    real, simulated = found.counts["num_preemptions"]
    assert real == simulated > 0
    assert (found.misses, found.divergence) == ([], None)


def test_scatter_is_shown_beside_and_not_judged(log: StepLog) -> None:
    found = validate_workload([log], timing(scattered=lambda host: HostCost(host, 1.5)))
    itl = cell(found, "itl_p50")
    assert itl.scattered_error == pytest.approx(0.5, abs=0.05)
    assert abs(itl.error or 0.0) < 1e-3
    assert found.misses == []
    assert itl.as_json()["scattered_error"] == itl.scattered_error


@pytest.mark.parametrize("gpu_scale", [0.85, 1.15])
def test_wrong_step_times_are_found_and_blamed_on_pricing(log: StepLog, gpu_scale: float) -> None:
    found = validate_workload([log], timing(gpu_scale))
    assert {"itl_p50", "ttft_p50", "ttft_p95"} <= set(found.misses)
    assert found.steps["all"].bias == pytest.approx(gpu_scale - 1.0, abs=0.02)
    blame = found.attribution["itl_p50"]
    assert abs(blame["scheduling"] or 0.0) < 2e-3
    assert blame["pricing"] == pytest.approx(gpu_scale - 1.0, abs=0.02)
    assert found.divergence is not None
    assert found.divergence.by_arrival
    assert "only in the" in found.divergence.reason


@pytest.mark.parametrize("host_scale", [0.7, 1.6])
def test_a_host_s_speed_is_taken_from_its_log(host_scale: float) -> None:
    log = made_log(poisson(60, 12.0), HostCost(host_scale))
    blind, known = (validate_workload([log], timing(), host_scale=h) for h in (1.0, None))
    assert known.host_scale == pytest.approx(host_scale, rel=0.04)
    assert abs(known.steps["all"].bias) < 0.003 < abs(blind.steps["all"].bias)
    assert known.misses == []
    assert cell(known, "e2el_p99").limit == HOST_KNOWN["e2el_p99"]
    assert cell(blind, "e2el_p99").limit is None
    assert {one.name for one in known.step_verdicts} >= {"step_mape_gpu", "step_bias"}
    assert blind.step_verdicts == ()


def test_another_rule_is_a_miss_however_good_the_times(log: StepLog) -> None:
    # The engine seems to have scheduled one token less in a prefill, at the same time.
    tokens = log.steps.num_tokens.copy()
    tokens[int(tokens.argmax())] -= 1
    altered = replace(log, steps=replace(log.steps, num_tokens=tokens))
    found = validate_workload([altered], timing())
    assert found.misses == ["scheduling rule"]
    assert found.divergence is not None
    assert "a rule of the scheduler differs" in str(found.divergence)


def test_another_rule_is_found_at_the_log_s_own_times_behind_other_arrivals(log: StepLog) -> None:
    tokens = log.steps.num_tokens.copy()
    tokens[int(tokens.argmax())] -= 1
    altered = replace(log, steps=replace(log.steps, num_tokens=tokens))
    found = validate_workload([altered], timing(1.15))
    assert found.divergence is not None
    assert found.divergence.by_arrival
    assert "scheduling rule" in found.misses
    (replay,) = found.as_json()["replay"]
    assert replay["log"] == "made"
    assert "tokens after" in replay["first_difference"]
    # With rules that take more steps than were recorded there is no replay to measure.
    more = validate_workload([replace(log, config=replace(log.config, max_num_seqs=1))], timing())
    assert more.misses[-1] == "scheduling rule"
    assert more.attribution["itl_p50"]["scheduling"] is None
    assert more.attribution["itl_p50"]["both"] is not None


def test_logs_that_cannot_be_judged_are_refused(log: StepLog) -> None:
    silent = replace(log, token_times_s=(*log.token_times_s[:-1], np.zeros(0)))
    with pytest.raises(
        TraceError, match=r"made\.json\.gz: requests\[29\]: times: no token came out"
    ):
        validate_workload([silent], timing())
    preempted = replace(log, steps=replace(log.steps, preempted={len(log.steps) - 1: (29,)}))
    with pytest.raises(TraceError, match=r"\[29\]: times: it was preempted after its last token"):
        validate_workload([preempted], timing())
    too_long = replace(
        log.requests[-1], prompt=((9, 50_000),)
    )  # the engine refuses it, and so do we
    with pytest.raises(TraceError, match=r"segs: 50000 tokens of prompt and 20 that came out are"):
        validate_workload([replace(log, requests=(*log.requests[:-1], too_long))], timing())
    refused = replace(silent, requests=(*log.requests[:-1], too_long))
    assert validate_workload([refused], timing()).counts
    nothing = np.zeros(len(log.steps))
    unclocked = replace(log, steps=replace(log.steps, schedule_s=nothing, update_s=nothing))
    with pytest.raises(TraceError, match=r"do not tell the host's speed: give it with --host-sca"):
        validate_workload([unclocked], timing(), host_scale=None)


@pytest.mark.parametrize("num_steps", [1, 10])
def test_step_errors_say_of_how_many_steps_they_are(num_steps: int) -> None:
    """However few there are, a miss is one."""
    short = made_log([(0.01, 300, num_steps)], HostCost())
    found = validate_workload([short], timing(2.0), host_scale=None)
    by_name = {one.name: one for one in found.step_verdicts}
    assert by_name["step_bias"].num_steps == len(short.steps) == num_steps
    assert by_name["step_bias"].missed
    assert "step_bias" in found.misses
    (told,) = (one for one in found.as_json()["step_limits"] if one["name"] == "step_bias")
    assert (told["limit"], told["num_steps"]) == (HOST_KNOWN["step_bias"], num_steps)


def test_logs_that_were_fitted_on_are_told(log: StepLog) -> None:
    assert validate_workload([log], timing(fitted_on=("made", "x"))).fitted_on == ("made",)
    assert validate_workload([log], timing(fitted_on=("x",))).fitted_on == ()


# -- repeats and spread ----------------------------------------------------------------------------


def test_repeats_are_put_together_and_their_spread_counts() -> None:
    workload = poisson(30, 12.0)
    repeats = [
        made_log(workload, HostCost(gpu_scale=scale), name=f"rep{scale}", num_free_blocks=blocks)
        for scale, blocks in ((0.8, 4000), (1.2, 3970))
    ]
    other = made_log(poisson(20, 12.0, seed=1), HostCost(), name="other")
    groups = group_repeats([repeats[0], other, repeats[1]])
    assert [[one.name for one in group] for group in groups] == [["rep0.8", "rep1.2"], ["other"]]
    unlike = [
        replace(other, config=replace(other.config, num_gpu_blocks=3900)),
        replace(other, config=replace(other.config, policy="priority")),
        replace(other, engine="vllm-0.11.0"),
        replace(other, gpu="NVIDIA A100"),
    ]
    assert [len(group) for group in group_repeats([other, *unlike])] == [1] * 5
    # 0.9 is 10 % from the mean, which is more than 5 %, but within what repeats differ.
    found = validate_workload(repeats, timing(0.9))
    itl = cell(found, "itl_p50")
    assert itl.spread == pytest.approx(0.2, abs=0.03)
    assert itl.limit == itl.spread
    assert itl.error == pytest.approx(-0.1, abs=0.02)
    assert (itl.larger, itl.missed) == ("spread", False)
    assert cell(validate_workload(repeats, timing(0.6)), "itl_p50").missed


def test_one_log_s_spread_is_the_profile_s(log: StepLog) -> None:
    spread = {"below": {"itl_p50": 0.2, "ttft_p50": 0.01}}
    found = validate_workload([log], timing(1.1, repeat_spread=spread))
    assert cell(found, "itl_p50").limit == 0.2
    assert not cell(found, "itl_p50").missed
    assert cell(found, "ttft_p50").limit == BLIND["ttft_p50"]
    # A known host leaves no such excuse.
    known = validate_workload([log], timing(1.1, repeat_spread=spread), host_scale=None)
    assert cell(known, "itl_p50").limit == HOST_KNOWN["itl_p50"]
    assert cell(known, "itl_p50").missed


def test_given_tolerances_are_exact(log: StepLog) -> None:
    given = {"itl_p50": 0.5, "ttft_p50": 0.5, "tpot_p99": 1e-9, "step_bias": 1e-9}
    found = validate_workload([log], timing(1.1), tolerances=given)
    assert not cell(found, "itl_p50").missed
    assert {"tpot_p99", "step_bias"} <= set(found.misses)


# -- saturation ------------------------------------------------------------------------------------


def test_near_saturation_ttft_is_judged_by_the_repeats_alone() -> None:
    workload = poisson(150, 78.0)
    repeats = [made_log(workload, HostCost(gpu_scale=s), name=f"r{s}") for s in (0.97, 1.03)]
    assert ttft_elasticity(repeats[0], HostCost()) > NEAR_SATURATION
    found = validate_workload(repeats, timing())
    assert found.near_saturation
    ttft = cell(found, "ttft_p50")
    assert (ttft.in_range, ttft.missed, ttft.limit) == (True, False, None)
    assert cell(validate_workload(repeats, timing(1.1)), "ttft_p50").missed
    single = validate_workload(repeats[:1], timing())
    assert not cell(single, "ttft_p50").judged
    assert not cell(single, "e2el_p50").judged
    assert cell(single, "itl_p50").judged
    assert cell(single, "throughput").judged


def test_without_queues_ttft_follows_step_times_one_to_one() -> None:
    log = made_log([(i * 0.5, 300, 3) for i in range(8)], HostCost())
    assert ttft_elasticity(log, HostCost()) == pytest.approx(1.0, abs=1e-6)


def test_scaled_cost_scales_everything(log: StepLog) -> None:
    base = simulate_log(log, _executor(HostCost()))
    twice = simulate_log(
        replace(log, requests=tuple(replace(r, arrival_s=2 * r.arrival_s) for r in log.requests)),
        _executor(ScaledCost(HostCost(), 2.0)),
    )
    assert twice.steps.end_s == pytest.approx(2 * base.steps.end_s)


def _executor(cost: Any) -> Any:
    from simserve.executor.simulated import SimulatedExecutor

    return SimulatedExecutor(cost)


class NothingIsFree(HostCost):
    """A step without tokens costs nothing, as the protocol has it."""

    def price(self, run: StepRun) -> Price:
        price = super().price(run)
        return price if run.plan.request_ids else Price([0.0] * run.count, price.parts)


CLOCKS = ("start_s", "end_s", "duration_s", "schedule_s", "update_s")

# -- parts -----------------------------------------------------------------------------------------


def test_step_errors_by_hand() -> None:
    error = StepError.of(np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    assert error == StepError(2, 0.5, 0.0)


def test_step_errors_tell_regimes_apart(log: StepLog) -> None:
    errors = errors_by_regime([price_log(log, HostCost())])
    assert {"all", "GPU-bound", "decode, up to 32 requests", "mixed, up to 1024 tokens"} <= set(
        errors
    )
    regimes = [name for name in errors if "," in name]
    assert sum(errors[name].num_steps for name in regimes) == len(log.steps)
    without_tokens = replace(
        log,
        steps=replace(
            log.steps,
            row_offsets=np.append(log.steps.row_offsets, log.steps.row_offsets[-1]),
            **{name: np.append(getattr(log.steps, name), 1.0) for name in CLOCKS},
        ),
    )
    assert errors_by_regime([price_log(without_tokens, NothingIsFree())])["all"] == errors["all"]
    assert not price_log(log, HostCost(), HostCost(SLOWER_HOST)).host_bound.any()
    assert price_log(log, HostCost(600.0), HostCost(600.0 * SLOWER_HOST)).host_bound.all()


def test_priced_plans_stretch_the_log_s_clock(log: StepLog) -> None:
    priced = price_log(log, HostCost())
    same, real = priced_plans(log, priced), measured_log(log)
    assert same.get("ttft", "p99") == pytest.approx(real.get("ttft", "p99"), rel=1e-3)
    longer = replace(priced, predicted_s=2 * priced.measured_s)
    itl, base = (one.get("itl", "p50") for one in (priced_plans(log, longer), real))
    assert base is not None
    assert itl == pytest.approx(2 * base, rel=0.02)


def test_a_late_divergence_is_explained_by_who_was_there(log: StepLog) -> None:
    plans = PlanCheck(log)
    data = replay_log(log, plans)
    assert plans.finish() is None
    later = replace(log, added_s=log.added_s + np.where(np.arange(len(log.added_s)) == 5, 9.0, 0.0))
    step = int(np.searchsorted(log.steps.start_s, log.added_s[5]))
    difference = _difference_at(log, step)
    told = explain(later, data, difference)
    assert told.by_arrival
    assert told.reason == "requests taken in by then: 5 only in the simulation"
    assert not explain(log, data, difference).by_arrival


def test_a_refused_request_is_not_why_plans_differ(log: StepLog) -> None:
    too_long = replace(log.requests[-1], prompt=((9, 50_000),))
    times_s = (*log.token_times_s[:-1], np.zeros(0))
    refused = replace(log, requests=(*log.requests[:-1], too_long), token_times_s=times_s)
    after_all = replace(_difference_at(log, 0), step=len(log.steps))
    assert not explain(refused, replay_log(refused), after_all).by_arrival


def _difference_at(log: StepLog, step: int) -> Any:
    from simserve.fidelity.replay.plans import PlanDifference

    return PlanDifference(step, log.steps.rows(step), (), (), ())


def test_tolerances_by_metric_and_by_name() -> None:
    assert parse_tolerances(["itl=7", "ttft_p50=1.5", "throughput=3"]) == {
        "itl_p50": 0.07,
        "itl_p95": 0.07,
        "itl_p99": 0.07,
        "ttft_p50": 0.015,
        "throughput": 0.03,
    }
    assert set(BLIND) | set(HOST_KNOWN) <= set(LIMITS)
    for text in ("itl", "itl=", "itl=-1", "itl=nan", "ttft_p51=3", "=3"):
        with pytest.raises(ConfigError, match="--tolerance"):
            parse_tolerances([text])


# -- the command -----------------------------------------------------------------------------------

PROFILE = "h200-llama-3.1-8b-vllm"
PROFILES = Path(simserve.__file__).parent / "presets" / "profiles"


def run(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["validate", *arguments], env={"COLUMNS": "100"})
    return outcome.exit_code, outcome.output


def test_the_command_prints_everything_and_exits_by_the_verdict(tmp_path: Path) -> None:
    log, out = str(LOGS / "long_on_2048_1024.json.gz"), tmp_path / "out.json"
    loose = [f"--tolerance={name}=1000" for name in ("ttft", "itl", "e2el", "throughput")]
    status, output = run(log, "--profile", PROFILE, "--json", str(out), *loose)
    assert status == 0, output
    for text in (
        "decisions: vllm-0.20.2; timing: ",
        PROFILE,
        "TTFT p95",
        "E2EL mean",
        "TPOT p50",
        "spread",
        "steps 63 real",
        "prefix-hit tokens 0 real, 0 simulated",
        "MAPE",
        "our plans, real times",
        "plans: ",
        "long_on_2048_1024 at its own times: all plans equal",
        "1 of 1 workloads within limits",
    ):
        assert text in output, text
    (found,) = json.loads(out.read_text())
    assert found["misses"] == []
    assert len(found["metrics"]) == 17
    status, output = run(log, "--profile", PROFILE, "--tolerance", "itl_p50=0.000001")
    assert status == 1
    assert "misses: " in output
    assert "0 of 1 workloads within limits" in output


def test_a_log_that_cannot_be_judged_does_not_keep_others_from_it(tmp_path: Path) -> None:
    """Neither one without a known engine, nor a repeat with an open end, nor no log at all."""
    good, out = LOGS / "long_on_2048_1024.json.gz", tmp_path / "out.json"
    document = json.loads(gzip.decompress(good.read_bytes()))
    unknown = write(tmp_path / "unknown.json.gz", {**document, "engine": "mine-1.0"})
    requests = [{**one, "times": []} for one in document["requests"][:1]]
    open_end = {**document, "requests": requests + document["requests"][1:]}
    repeat = write(tmp_path / "repeat.json.gz", open_end)
    none = tmp_path / "none.json.gz"
    loose = [f"--tolerance={name}=1000" for name in ("ttft", "itl", "e2el", "throughput")]
    paths = [str(path) for path in (none, unknown, good, repeat)]
    status, output = run(*paths, "--profile", PROFILE, "--json", str(out), *loose)
    assert status == 2
    assert "1 of 1 workloads within limits" in output
    found, *refused = json.loads(out.read_text())
    assert found["logs"] == ["long_on_2048_1024"]
    assert [one["files"] for one in refused] == [[str(path)] for path in (none, repeat, unknown)]
    for one, says in zip(refused, ("cannot", "no token came out", "not known"), strict=True):
        assert says in one["error"]
        assert f"not judged: {one['error']}" in output
    status, output = run(str(none), "--profile", PROFILE)
    assert (status, output.count("\n")) == (2, 1)
    # A number beyond its limit is no reason to call the others right.
    status, output = run(str(good), str(none), "--profile", PROFILE, "--tolerance", "itl=0.000001")
    assert status == 2
    assert "0 of 1 workloads within limits" in output


def test_a_log_is_no_repeat_of_itself() -> None:
    log = LOGS / "long_on_2048_1024.json.gz"
    again = log.parent / ".." / log.parent.name / log.name
    loose = [f"--tolerance={name}=1000" for name in ("ttft", "itl", "e2el", "throughput")]
    status, output = run(str(log), str(again), "--profile", PROFILE, *loose)
    assert status == 2
    assert f"not judged: {again}: is named twice" in output
    assert "1 of 1 workloads within limits" in output


def test_a_profile_of_another_engine_or_gpu_is_flagged(warm: StepLog) -> None:
    assert profile_timing(PROFILE, warm).remarks == ()
    other = replace(warm, engine="vllm-0.11.0", gpu="NVIDIA A100")
    engine, gpu = profile_timing(PROFILE, other).remarks
    assert engine.endswith("step times are those of vllm-0.20.2, the log is of vllm-0.11.0")
    assert gpu.endswith("measured on gpu 'h200', the log is of 'NVIDIA A100'")


def test_what_a_log_s_model_and_settings_leave_open_is_flagged(warm: StepLog) -> None:
    (model,) = profile_timing(PROFILE, replace(warm, model="my model")).remarks
    assert model.endswith("'my model', is no preset; it is priced as llama-3.1-8b")
    model, gpu = profile_timing(PROFILE, replace(warm, model="", gpu="")).remarks
    assert model.endswith("the log says no model; it is priced as llama-3.1-8b")
    assert gpu.endswith("measured on gpu 'h200', the log says none")
    (model,) = profile_timing("h200-llama-3.2-1b-vllm", warm).remarks
    assert "is that of llama-3.2-1b, the log is of llama-3.1-8b" in model
    few = replace(warm, config=replace(warm.config, max_num_seqs=64))
    (graphs,) = profile_timing(PROFILE, few).remarks
    assert "go up to 512 tokens (256 decodes)" in graphs
    assert graphs.endswith("max_num_seqs = 64 and budget = 40960 has them up to 128 (64)")
    config = replace(warm.config, not_read={"dtype": "float8"})
    (settings,) = profile_timing(PROFILE, warm, replace(warm, config=config)).remarks
    assert settings == "warm: settings that are not read: dtype = 'float8'"


def test_a_fitted_log_is_known_by_name_or_contents(tmp_path: Path, warm: StepLog) -> None:
    log = replace(warm, name="renamed")
    profile = json.loads((PROFILES / f"{PROFILE}.json").read_text())
    profile["fitted"][0]["sha256"] = hashlib.sha256(warm.path.read_bytes()).hexdigest()
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile))
    assert profile_timing(str(path), log).fitted_on == ("renamed",)
    assert profile_timing(PROFILE, log).fitted_on == ()
    ramp = replace(warm, name="ramp", path=Path("/no/such/file"))
    assert profile_timing(PROFILE, warm, ramp).fitted_on == ("ramp",)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", "no-such"], "no profile is called 'no-such'"),
        (["--profile", PROFILE, "--host-scale", "fast"], "expected auto or a positive number"),
        (["--profile", PROFILE, "--host-scale", "-1"], "expected auto or a positive number"),
        (["--profile", PROFILE, "--tolerance", "x=1"], "there is no 'x'"),
        (["--profile", PROFILE, "--json", "/no/such/folder/f.json"], "cannot be written"),
    ],
)
def test_mistakes_end_with_status_2(arguments: list[str], says: str) -> None:
    status, output = run(str(LOGS / "prefill_2048.json.gz"), *arguments)
    assert status == 2, output
    assert says in output
