"""`simserve calibrate`: what it measures, a machine of known speed, and a run on a CPU."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.config.build import build
from simserve.config.executor import Real, Simulated
from simserve.config.loader import LoadedConfig
from simserve.config.presets import load_gpu, load_model
from simserve.cost.coefficients import COEFFICIENTS
from simserve.cost.dealing import AttentionPlan
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import Graphs, ProfileFile, load_profile
from simserve.cost.step_work import NO_FACTORS, SizeFactors
from simserve.errors import SimserveError
from simserve.executor.real.bench import gpu as bench_gpu
from simserve.fidelity.calibrate import measure
from simserve.fidelity.calibrate.calibration import (
    GROUPS,
    Calibration,
    fit_calibration,
    predicted_s,
    read_calibration,
    write_calibration,
)
from simserve.fidelity.calibrate.design import Limits, design, traffic
from simserve.fidelity.calibrate.points import regimes
from simserve.fidelity.fit.host import engine_seconds
from simserve.fidelity.fit.step import predict
from simserve.fidelity.logs import executor_facts
from simserve.fidelity.logs.step_watch import MeasuredSteps, StepWatch
from simserve.report.calibration_plot import draw_calibration
from simserve.types import StepPlan, StepResult, StepRun, TraceRequest

GRAPHS = Graphs(sizes=[1, 2, 4, *range(8, 257, 8)], full_up_to=256, piecewise=False)
LIMITS = Limits(
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=131072,
    num_kv_tokens=700_000,
    block_size=16,
)
PLAN = {
    "few_decodes": {"tile": 64, "programs": 528, "fine_tokens": 512},
    "many_decodes": {"tile": 128, "programs": 264, "fine_tokens": 512},
    "many_decodes_from": 32,
    "short": {
        "tall": {"rows": 64, "keys": 64, "programs": 264},
        "whole": {"rows": 16, "keys": 32, "programs": 528},
    },
    "long": {
        "tall": {"rows": 128, "keys": 128, "programs": 132},
        "whole": {"rows": 16, "keys": 64, "programs": 528},
    },
    "long_from": 4097,
}
WITH_PLAN = {
    "merge_layer_s": 6e-6,
    "round_layer_s": 3e-7,
    "shared_kv_saved": 0.4,
    "overlap_blend": 0.6,
    "mixed_layer_s": 1e-5,
}
WITHOUT_PLAN = {**dict.fromkeys(WITH_PLAN, 0.0), "mixed_layer_s": 2e-5}
NOT_SEEN = (
    "loop_step_s",
    "loop_request_s",
    "intake_first_s",
    "intake_request_s",
    "intake_token_s",
    "launch_step_s",
)
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


def known_profile() -> ProfileFile:
    """Another machine than the one that the fit starts from."""
    real = load_profile("h200-llama-3.1-8b-vllm")
    factors = np.random.default_rng(3).uniform(0.8, 1.1, len(COEFFICIENTS))
    coefficients = {
        name: float(np.clip(value * factor, COEFFICIENTS[name].low, COEFFICIENTS[name].high))
        for (name, value), factor in zip(real.coefficients.items(), factors, strict=True)
    }
    coefficients |= dict.fromkeys(NOT_SEEN, 0.0)
    coefficients |= {"context_layer_s": 2e-8, "context_blend": 0.5, "inputs_mixed_s": 2e-4}
    own = {"coefficients": coefficients | WITH_PLAN, "graphs": GRAPHS, "size_factors": {}}
    return real.model_copy(update={**own, "attention_plan": AttentionPlan(**PLAN)})


class KnownExecutor:
    """Takes exactly what a profile says, and says so in the real executor's parts."""

    single_steps = True

    def __init__(self, cost: ProfileCost) -> None:
        self._cost = cost

    def add_request(self, request: TraceRequest) -> None:
        pass

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        parts = {name: np.atleast_1d(s) for name, s in self._cost.price(run).parts.items()}
        host = {"schedule_s": parts["schedule_s"], "update_s": parts["update_s"]}
        if "/" in run.plan.request_ids[0]:  # a designed step: no scheduler made it
            host = dict.fromkeys(host, np.zeros(1))
        gpu = sum(seconds for name, seconds in parts.items() if name not in (*host, "inputs_s"))
        columns = {
            **host,
            "prepare_s": parts["inputs_s"],
            "forward_s": np.atleast_1d(gpu),
            "first_shape": np.zeros(1),
        }
        end_s = start_s + sum(float(values[0]) for values in columns.values())
        return StepResult(np.array([end_s]), columns, run.plan.samples)


class FakeMachine:
    num_gpu_blocks = 40_000

    def __init__(self) -> None:
        self.facts = {
            "device": "cuda",
            "device_name": "NVIDIA H200",
            "torch": "2.11",
            "triton": "3.6",
            "attention_plan": PLAN,
            **dict.fromkeys(("attention", "kv_layout", "mixed", "dtype", "kv_dtype"), "so"),
        }

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProfileFile, Calibration]:
    """A profile, and the calibration of a machine that takes what it says."""
    profile = known_profile()
    path = tmp_path_factory.mktemp("known") / "known.json"
    path.write_text(profile.model_dump_json())

    def build_known(loaded: LoadedConfig, seed: int, machine: Any) -> Any:
        assert isinstance(loaded.config.executor, Real)
        config = loaded.config.model_copy(update={"executor": Simulated()})
        built = build(replace(loaded, config=config), seed)
        cost = ProfileCost(loaded.model, loaded.gpu, path=path)
        built.parts.executor = KnownExecutor(cost)
        return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "open_machine", lambda loaded: FakeMachine())
        patch.setattr(measure, "build", build_known)
        patch.setattr(executor_facts, "graphs", lambda facts, *most: GRAPHS)
        source = {
            "model": "llama-3.1-8b",
            "executor": {"kind": "real"},
            "scheduler": {"max_num_seqs": 256},
        }
        return profile, measure.measure(source, time_limit_s=0.0)


def test_known_coefficients_come_back(known: tuple[ProfileFile, Calibration]) -> None:
    profile, calibration = known
    found = fit_calibration(calibration, "mine")
    assert not differing(found.coefficients, profile.coefficients)
    assert not found.size_factors
    assert not found.decode_size_factors
    assert found.attention_plan == profile.attention_plan


def differing(found: Mapping[str, float], true: Mapping[str, float]) -> dict[str, object]:
    """Those that are off by more than 1 %."""
    return {
        name: (found[name], value)
        for name, value in true.items()
        if abs(found[name] - value) > 0.01 * value
    }


def priced_anew(
    calibration: Calibration,
    coefficients: Mapping[str, float],
    size_factors: SizeFactors = NO_FACTORS,
) -> Calibration:
    """The same steps on a machine that takes what `coefficients` say."""

    def priced(measured: MeasuredSteps, made_by_scheduler: bool) -> MeasuredSteps:
        steps, sheet, graphs = measured.steps, calibration.sheet, calibration.graphs
        duration_s = predict(coefficients, sheet, steps, graphs, 1.0, size_factors)
        if not made_by_scheduler:
            duration_s = duration_s - engine_seconds(coefficients, steps)
        return MeasuredSteps(replace(steps, duration_s=duration_s), measured.host_s, measured.heat)

    return replace(
        calibration,
        designed=priced(calibration.designed, made_by_scheduler=False),
        traffic=priced(calibration.traffic, made_by_scheduler=True),
        held_out=priced(calibration.held_out, made_by_scheduler=True),
    )


def test_sizes_are_found_apart_for_decodes_and_for_steps_with_prefills(
    known: tuple[ProfileFile, Calibration],
) -> None:
    profile, calibration = known
    factors = SizeFactors(prefills={64: 1.2, 128: 0.95}, decodes={64: 0.9, 96: 1.15})
    graphs = GRAPHS.model_copy(update={"piecewise": True})
    sized = priced_anew(replace(calibration, graphs=graphs), profile.coefficients, factors)
    found = fit_calibration(sized, "mine")
    for kind, true in (
        (found.size_factors, factors.prefills),
        (found.factors.decodes, factors.decodes),
    ):
        assert {size: kind[size] for size in true} == pytest.approx(true, rel=0.02)
        assert all(abs(kind[size] - 1.0) < 0.03 for size in kind if size not in true)


def test_where_it_is_not_known_how_attention_is_dealt_out_a_sum_and_a_maximum_stand_in(
    known: tuple[ProfileFile, Calibration],
) -> None:
    profile, calibration = known
    without = replace(
        calibration,
        attention_plan=None,
        **{
            name: replace(group, steps=replace(group.steps, dealt=None))
            for name in GROUPS
            for group in [calibration.group(name)]
        },
    )
    true = {**profile.coefficients, **WITHOUT_PLAN}
    found = fit_calibration(priced_anew(without, true), "mine")
    assert not differing(found.coefficients, true)
    assert found.attention_plan is None


def test_a_warm_host_of_designed_steps_is_told_apart(
    known: tuple[ProfileFile, Calibration],
) -> None:
    """They repeat what the host has just done; traffic does not."""
    profile, calibration = known
    true, designed = profile.coefficients, calibration.designed
    whole_s = predict(true, calibration.sheet, designed.steps, GRAPHS, 0.5)
    steps = replace(designed.steps, duration_s=whole_s - 0.5 * engine_seconds(true, designed.steps))
    warm = replace(calibration, designed=MeasuredSteps(steps, 0.5 * designed.host_s, designed.heat))
    found = fit_calibration(warm, "mine")
    for name in ("launch_eager_layer_s", "inputs_step_s", "linear_flops", "kv_bandwidth"):
        assert found.coefficients[name] == pytest.approx(true[name], rel=0.02)
    steps_again, prices = predicted_s(warm, found, "designed")
    assert prices == pytest.approx(steps_again.steps.duration_s, rel=0.05)


def test_a_host_that_was_slow_for_some_steps_makes_no_kernel_slow(
    known: tuple[ProfileFile, Calibration],
) -> None:
    """And its times add up to those measured, though most steps were faster than the mean."""
    profile, calibration = known
    traffic = calibration.traffic
    slower = np.random.default_rng(1).lognormal(0.0, 0.4, len(traffic))
    schedule_s, host_s = slower * traffic.steps.schedule_s, slower * traffic.host_s
    update_s = slower * traffic.steps.update_s
    forward_s = traffic.steps.duration_s - traffic.steps.engine_s - traffic.host_s
    whole_s = forward_s + schedule_s + update_s + host_s
    steps = replace(traffic.steps, duration_s=whole_s, schedule_s=schedule_s, update_s=update_s)
    scattered = replace(calibration, traffic=MeasuredSteps(steps, host_s, traffic.heat))
    found = fit_calibration(scattered, "mine")
    decodes = steps.take(steps.num_prefills == 0)
    kernels, true_kernels = (
        predict(one.coefficients, calibration.sheet, decodes, GRAPHS, host_scale=0.0)
        for one in (found, profile)
    )
    assert kernels == pytest.approx(true_kernels, rel=0.02)
    c, host = found.coefficients, steps.engine_s + host_s
    inputs_s = c["inputs_step_s"] + c["inputs_request_s"] * steps.num_reqs
    inputs_s = inputs_s + c["inputs_mixed_s"] * (steps.num_prefills > 0)
    priced_s = engine_seconds(c, steps) + inputs_s
    assert priced_s.sum() == pytest.approx(host.sum(), rel=0.02)
    assert np.median(host / priced_s) < 0.97


def test_what_heat_adds_to_kernels_is_found(known: tuple[ProfileFile, Calibration]) -> None:
    calibration = known[1]

    def heated(measured: MeasuredSteps) -> MeasuredSteps:
        steps = measured.steps
        assert measured.heat.max() * calibration.sheet.token_flops_s > 0.3
        kernels_s = steps.duration_s - steps.engine_s - measured.host_s
        gain = np.where(steps.num_prefills > 0, 0.2, 0.1) * calibration.sheet.token_flops_s
        whole_s = steps.duration_s + gain * measured.heat * kernels_s
        return MeasuredSteps(replace(steps, duration_s=whole_s), measured.host_s, measured.heat)

    hot = replace(
        calibration,
        designed=heated(calibration.designed),
        traffic=heated(calibration.traffic),
        held_out=heated(calibration.held_out),
    )
    found = fit_calibration(hot, "mine")
    assert found.clock is not None
    assert found.clock.prefills == pytest.approx(0.2, rel=0.05)
    assert found.clock.decodes == pytest.approx(0.1, rel=0.05)
    assert found.errors["blind"]["all"].mape < 0.01


def test_a_profile_says_what_it_was_measured_on(known: tuple[ProfileFile, Calibration]) -> None:
    found = fit_calibration(known[1], "mine")
    assert found.engine.name == "simserve"
    assert found.engine.decision_version == "0.11.0"
    assert (found.model, found.gpu, found.graphs) == ("llama-3.1-8b", "h200", GRAPHS)
    assert found.attention_path.startswith("attention so, kv_layout so, ")
    assert found.measured_on.startswith("NVIDIA H200, torch 2.11, triton 3.6")
    assert [one.name for one in found.fitted] == ["designed", "traffic"]
    assert [one.name for one in found.held_out] == ["held_out"]
    assert found.domain["num_tokens"] == (1.0, 8192.0)
    assert found.errors["blind"]["all"].mape < 0.01


def test_a_calibration_survives_its_file(
    known: tuple[ProfileFile, Calibration], tmp_path: Path
) -> None:
    path = tmp_path / "c.steps.json.gz"
    write_calibration(path, known[1])
    assert fit_calibration(read_calibration(path), "mine") == fit_calibration(known[1], "mine")
    path.write_bytes(b"{}")
    with pytest.raises(
        SimserveError, match=r"c\.steps\.json\.gz: cannot read these measured steps"
    ):
        read_calibration(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(attention_plan=None), "designed: attention_plan and columns"),
        (lambda d: d["traffic"].pop("num_chunks"), "traffic: attention_plan and columns"),
        (lambda d: d["held_out"]["heat"].pop(), "held_out: columns of unlike lengths"),
    ],
)
def test_steps_that_do_not_go_together_are_refused(
    known: tuple[ProfileFile, Calibration],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    path = tmp_path / "c.steps.json.gz"
    write_calibration(path, known[1])
    document = json.loads(gzip.decompress(path.read_bytes()))
    change(document)
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    with pytest.raises(SimserveError, match=rf"c\.steps\.json\.gz: .*{message}"):
        read_calibration(path)


def test_the_picture_holds_every_step(known: tuple[ProfileFile, Calibration]) -> None:
    calibration = known[1]
    found = regimes(calibration, fit_calibration(calibration, "mine"))
    groups = (calibration.designed, calibration.traffic, calibration.held_out)
    assert sum(len(one.measured_s) for one in found) == sum(map(len, groups))
    assert max(float(np.abs(one.error).max()) for one in found) < 0.01
    assert draw_calibration(found, "title").startswith(b"\x89PNG")


def test_the_profile_that_ships_is_what_its_steps_give() -> None:
    name = "h200-llama-3.1-8b-simserve"
    steps = Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.steps.json.gz"
    calibration = read_calibration(steps)
    found, shipped = fit_calibration(calibration, name), load_profile(name)
    # No step of this model waits for launches one by one.
    told = [one for one in COEFFICIENTS if one != "launch_eager_layer_s"]
    assert [found.coefficients[one] for one in told] == pytest.approx(
        [shipped.coefficients[one] for one in told], rel=1e-3, abs=1e-9
    )
    assert found.size_factors == pytest.approx(shipped.size_factors, abs=0.002)
    assert found.decode_size_factors == pytest.approx(shipped.decode_size_factors, abs=0.002)
    for group in GROUPS:
        prices, of_shipped = (predicted_s(calibration, one, group)[1] for one in (found, shipped))
        assert prices == pytest.approx(of_shipped, rel=1e-3)
    assert [log.sha256 for log in found.held_out] == [log.sha256 for log in shipped.held_out]
    assert found.fitted[1].sha256 == shipped.fitted[1].sha256
    assert found.attention_plan == shipped.attention_plan == AttentionPlan(**PLAN)
    assert shipped.errors["blind"]["all"].mape < 0.04


def test_the_design_covers_all_regimes_and_paddings() -> None:
    cases = design(LIMITS, 4)
    batches = {len(case.requests) for case in cases}
    assert {1, 12, 180, 256} <= batches
    assert max(case.num_tokens for case in cases) == 8192
    mixed = [case for case in cases if len({n == 1 for n, *_ in case.requests}) == 2]
    assert len(mixed) > 40


def test_the_design_leaves_out_what_does_not_fit() -> None:
    small = LIMITS._replace(
        max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, num_kv_tokens=4096
    )
    for case in design(small, 4):
        assert len(case.requests) <= 8
        assert case.num_tokens <= 256
        assert case.max_len + 4 <= 1024
    fitted, held_out = traffic(small)
    sizes = [one["max_concurrency"] for one in (*fitted, held_out)]
    assert sizes == [4, 8, 8, 8, 8, 8, 4, 8, 8, 8, 8]


def test_each_size_of_traffic_is_measured_at_two_times() -> None:
    fitted, held_out = traffic(LIMITS)
    sizes = [one["max_concurrency"] for one in fitted]
    half = len(sizes) // 2
    assert set(sizes[:half]) == set(sizes[half:])
    assert all(one != following for one, following in pairwise(sizes))
    assert held_out["max_concurrency"] not in sizes


def test_prefills_without_graphs_are_not_padded(tmp_path: Path) -> None:
    model, gpu = load_model("llama-3.1-8b"), load_gpu("h200")
    plans = [
        StepRun(StepPlan(step=0, request_ids=["a"], starts=[0], num_tokens=[n], samples=[True]))
        for n in (241, 248)
    ]
    padded: dict[bool, bool] = {}
    for piecewise in (False, True):
        graphs = GRAPHS.model_copy(update={"piecewise": piecewise})
        path = tmp_path / "p.json"
        path.write_text(known_profile().model_copy(update={"graphs": graphs}).model_dump_json())
        cost = ProfileCost(model, gpu, path=path)
        short, long = (cost.price(plan).parts for plan in plans)
        padded[piecewise] = short["linear_s"] == long["linear_s"]
        assert (short["launch_s"] > 0) is not piecewise  # launch_step_s is 0 here
    assert padded == {False: False, True: True}


class Answers:
    """Answers every step with the same parts."""

    single_steps = True

    def __init__(self, **parts: float) -> None:
        self.parts = parts

    def add_request(self, request: TraceRequest) -> None:
        """Nothing depends on it."""

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        return StepResult([start_s + 1.0], self.parts, [1])


def test_the_watch_keeps_counts_and_times() -> None:
    answers = Answers(schedule_s=1.0, update_s=2.0, prepare_s=4.0, forward_s=8.0, sync_s=16.0)
    watch = StepWatch(answers, None, 1)
    for step, first_shape in enumerate((0.0, 0.0, 1.0)):
        answers.parts["first_shape"] = first_shape
        plan = StepPlan(step=step, request_ids=["a", "b"], starts=[5, 7], num_tokens=[3, 1])
        plan.samples += [True, True]
        watch.submit(StepRun(plan), 0.0)
    found = watch.measured()
    assert len(found) == 1  # not the warm-up step, nor the one in which something was compiled
    assert found.steps.duration_s.tolist() == [31.0]
    assert found.steps.engine_s.tolist() == [3.0]
    assert found.host_s.tolist() == [20.0]
    assert found.steps.num_tokens.tolist() == [4]
    assert found.steps.decode_kv_tokens.tolist() == [8]
    assert found.steps.prefill_pairs.tolist() == [3 * 5 + 6]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", *arguments])


@pytest.mark.parametrize(
    ("found", "arguments", "sentence"),
    [
        ((), (), "simserve calibrate needs torch and triton, not installed here: pip install"),
        ((), ("--gpu", "h200"), "simserve calibrate needs torch and triton, not installed"),
        ((), ("--device", "cpu"), "simserve calibrate --device cpu needs torch, not installed"),
        ((), ("-o", "executor.device=cpu"), "simserve calibrate --device cpu needs torch"),
        (("torch", "triton"), (), "simserve calibrate needs a CUDA GPU, and torch 2.9 sees none"),
        (("torch",), ("--device", "cpu"), "no GPU was found here: say with --gpu"),
        (("torch",), ("--device", "tpu", "--gpu", "h200"), "--device: 'tpu' is not one of cuda"),
    ],
)
def test_nothing_to_measure_on_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: tuple[str, ...],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    torch.__version__ = "2.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    for module in (bench_gpu, measure):
        monkeypatch.setattr(module, "find_spec", lambda name: name if name in found else None)
    monkeypatch.setattr(measure, "collect", lambda: {"gpu": None})
    outcome = invoke("--out", str(tmp_path / "p.json"), *arguments)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(sentence)
    assert len(outcome.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_gpu_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "collect", lambda: {"gpu": "NVIDIA H200, 580.159.04"})
    assert measure.gpu_here() == "h200"


def test_a_tiny_model_is_calibrated_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    overrides = ("kv_cache.num_gpu_blocks=200", "scheduler.max_num_seqs=4", "seed=1")
    outcome = invoke(
        "--model", str(tmp_path / "config.json"), "--device", "cpu", "--gpu", "h200",
        "--time-limit", "1", "--traffic-steps", "20", "--out", str(tmp_path / "tiny.json"),
        *(word for override in overrides for word in ("-o", override)),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert "| all " in outcome.stdout
    profile = load_profile(path=tmp_path / "tiny.json")
    assert profile.attention_path.endswith("plain torch on a CPU")
    again = invoke(
        "--steps", str(tmp_path / "tiny.steps.json.gz"), "--out", str(tmp_path / "b.json")
    )
    assert again.exit_code == 0, again.output
    assert load_profile(path=tmp_path / "b.json").coefficients == profile.coefficients
    assert (tmp_path / "tiny.png").read_bytes()[:4] == b"\x89PNG"
