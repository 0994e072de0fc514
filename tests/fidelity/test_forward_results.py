from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.cost.profile_file import load_profile
from simserve.errors import TraceError
from simserve.executor.real.bench.step_cases import parse_step_case
from simserve.fidelity.fit.prices import Prices
from simserve.fidelity.logs.forward_results import load_forward_results

SHAPES = (
    *(f"{n}*1@{k}" for n in (1, 8, 64, 256) for k in (128, 2048, 8192) if n * k < 10**6),
    *(str(q) for q in (16, 128, 512, 1024, 4096, 16384)),
    *("2048@10240", "8192,32*1@8192", "1024@4096c,64*1@512", "256,8*1@2048"),
)
FACTS = {"model": "llama-3.1-8b", "gpu": "h200", "engine": "vllm-0.33.0"}
PARTLY = load_profile("h200-llama-3.1-8b-vllm")


def _write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def _priced(tmp_path: Path) -> Path:
    """Cases that take what a profile says of their kernels."""
    cases = [{"case": f"c{i}={shape}", "median_us": 1.0} for i, shape in enumerate(SHAPES)]
    log = load_forward_results(_write(tmp_path / "unpriced.json", cases), **FACTS)
    seconds = Prices.of(PARTLY).predict(log, 0.0)
    for case, time_s in zip(cases, seconds.tolist(), strict=True):
        case["median_us"] = 1e6 * time_s
    return _write(tmp_path / "forward.json", {"vllm_version": "0.33.0", "results": cases})


def test_a_case_counts_what_its_batch_computes(tmp_path: Path) -> None:
    rows = [{"shape": "mix=32*1@8192,2048@10240c", "latency_us": [900, 1100, 1000]}]
    log = load_forward_results(_write(tmp_path / "f.json", rows), **FACTS)
    steps = log.steps
    assert (steps.num_tokens[0], steps.num_reqs[0], steps.num_decodes[0]) == (2080, 33, 32)
    assert (steps.decode_kv_tokens[0], steps.prefill_kv_tokens[0]) == (32 * 8192, 10240)
    assert steps.prefill_pairs[0] == 2048 * 8192 + 2048 * 2049 // 2
    assert steps.duration_s[0] == pytest.approx(1e-3)
    assert not log.has_host


def test_results_of_bench_step_count_the_tokens_before(tmp_path: Path) -> None:
    shape = parse_step_case("mix=2*1@100,1@100,64").shape
    assert shape == "3*1@100,1*64@0"
    row = {"case": "mix", "shape": shape, "median_ms": 9.0, "parts_ms": {"forward": 5.0}}
    document = {
        "environment": {"simserve": "1.0", "gpu": "NVIDIA H200, 580.1"},
        "rows": [row],
    }
    log = load_forward_results(_write(tmp_path / "s.json", document), model="llama-3.1-8b")
    assert (log.engine, log.gpu) == ("simserve-1.0", "h200")
    assert (log.steps.decode_kv_tokens[0], log.steps.prefill_pairs[0]) == (303, 32 * 65)
    assert log.steps.duration_s[0] == pytest.approx(5e-3)


def test_a_fit_of_forward_passes_has_no_host(tmp_path: Path) -> None:
    file, out = _priced(tmp_path), tmp_path / "p.json"
    command = ["fit", str(file), "--out", str(out), "--model", "llama-3.1-8b", "--gpu", "h200"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    profile = load_profile(path=out)
    assert profile.engine.timing_version == "0.33.0"
    assert profile.coefficients["inputs_step_s"] == profile.coefficients["schedule_step_s"] == 0.0
    assert not profile.residuals
    log = load_forward_results(file, **FACTS)
    error = Prices.of(profile).predict(log, 1.0) / log.steps.duration_s - 1.0
    assert np.abs(error).mean() < 0.01


def test_they_are_fitted_beside_step_logs(tmp_path: Path) -> None:
    log = "tests/data/vllm_logs/warm.json.gz"
    out = tmp_path / "p.json"
    command = ["fit", log, str(_priced(tmp_path)), "--out", str(out), "--model", "llama-3.1-8b"]
    result = CliRunner().invoke(app, [*command, "--gpu", "h200", "--engine", "vllm-0.20.2"])
    assert result.exit_code == 0, result.output
    profile = load_profile(path=out)
    assert profile.coefficients["inputs_step_s"] > 5e-4
    log_file, forward = profile.fitted
    assert (log_file.num_steps, forward.num_steps) == (289, len(SHAPES))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"results": []}, "holds no results"),
        ({"config": {"budget": 1}, "requests": [], "steps": []}, "is a step log"),
        ([{"latency_us": 5}], r"record 1: no batch such as .* it has latency_us"),
        ([{"case": "8"}], "record 1: no positive time under median_us or latency_us; it is None"),
        ([{"case": "8", "median_us": -1}], "no positive time"),
        ([{"case": "v=16*4@4096:3", "median_us": 1}], "drafts are not priced"),
        ([{"case": "8@4", "median_us": 1}], "'8@4' is no batch"),
        ({"kv_len_jitter": 0.5, "r": [{"case": "1@9", "median_us": 1}]}, "--kv-len-jitter 0"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, document: Any, message: str) -> None:
    file = _write(tmp_path / "f.json", document)
    with pytest.raises(TraceError, match=message):
        load_forward_results(file, **FACTS)


def test_facts_that_the_file_lacks_are_asked_for(tmp_path: Path) -> None:
    file = _write(tmp_path / "f.json", {"d": {"median_us": 9, "shape": "8"}})
    for missing in FACTS:
        facts = {**FACTS, missing: None}
        with pytest.raises(TraceError, match=f"--{missing}"):
            load_forward_results(file, **facts)
