"""What choosing tokens adds to a step: its formula, and what it does to a run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simserve.config.build import build
from simserve.config.loader import load_config
from simserve.cost import sampling_file
from simserve.cost.sampling import SamplingCost, Times, method_of
from simserve.cost.sampling_file import METHODS, SamplingFile, Table, load_sampling
from simserve.engine.simulation import simulate
from simserve.errors import ConfigError
from simserve.metrics.recorder import RunData
from simserve.sampling import RequestSampling
from simserve.types import StepPlan, TraceRequest

VOCAB = 1000


def times(step_us: float, row_us: float) -> Table:
    """Of 1 and 8 rows; twice as long for twice the vocabulary."""
    return tuple(
        tuple(1e-6 * vocab / VOCAB * (step_us + row_us * rows) for rows in (1, 8))
        for vocab in (500, 2000)
    )


def measured(**changes: Any) -> SamplingFile:
    values = {
        "schema_version": 1,
        "gpu": "h200",
        "measured_on": "nothing",
        "logits": "none",
        "source": "none.json",
        "sha256": "0",
        "num_rows": (1, 8),
        "vocab_sizes": (500, 2000),
        "methods": {name: times(10 * (i + 1), i + 1) for i, name in enumerate(METHODS)},
        "logprobs": {0: times(100, 4), 1: times(200, 8), 5: times(400, 16)},
        "errors": {},
    }
    return SamplingFile(**{**values, **changes})


def request(name: str) -> TraceRequest:
    return TraceRequest(request_id=name, arrival_s=0.0, prompt=(("p", 4),), output_len=2)


def priced_us(
    wants: dict[str, RequestSampling],
    included: str | None = None,
    vocab_size: int = VOCAB,
) -> tuple[float, SamplingCost]:
    cost = SamplingCost(measured(), vocab_size, lambda one: wants[one.request_id], included)
    for name in wants:
        cost.add_request(request(name))
    plan = StepPlan(step=1, request_ids=list(wants))
    return 1e6 * cost.price_s(plan, 1), cost


def many(count: int, **settings: Any) -> dict[str, RequestSampling]:
    name = "-".join(settings)
    return {f"{name}{i}": RequestSampling(**settings) for i in range(count)}


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({}, "temperature"),
        ({"temperature": 0.0, "top_p": 0.9}, "greedy"),
        ({"temperature": 0.001}, "temperature"),
        ({"top_k": -1, "min_p": 0.1}, "min_p"),
        ({"top_k": VOCAB}, "temperature"),
        ({"top_k": VOCAB - 1}, "top_k"),
        ({"top_p": 0.9, "min_p": 0.1}, "top_p"),
        ({"top_k": 3, "top_p": 0.9}, "top_k top_p"),
    ],
)
def test_settings_have_a_method(settings: dict[str, Any], method: str) -> None:
    assert method_of(RequestSampling(**settings), VOCAB) == method


def test_rows_cost_what_those_of_each_method_would_cost_alone() -> None:
    greedy, top_p = many(3, temperature=0.0), many(2, top_p=0.9)
    assert priced_us(greedy)[0] == pytest.approx(20 + 3 * 2)
    assert priced_us(top_p)[0] == pytest.approx(50 + 2 * 5)
    assert priced_us(greedy | top_p)[0] == pytest.approx(26 + 60)
    assert priced_us(greedy | top_p)[0] == priced_us(top_p | greedy)[0]


def test_time_is_linear_between_vocabularies() -> None:
    assert priced_us(many(2, top_p=0.9), vocab_size=3 * VOCAB // 2)[0] == pytest.approx(1.5 * 60)


def test_rules_come_on_top_for_their_rows() -> None:
    plain, ruled = many(2, top_p=0.9), many(3, top_p=0.9, min_tokens=1)
    assert priced_us(plain | ruled)[0] == pytest.approx(50 + 5 * 5 + 80 + 3 * 8)


@pytest.mark.parametrize(("number", "us"), [(0, 116), (1, 232), (3, 348), (5, 464), (20, 464)])
def test_log_probabilities_are_taken_of_rows_that_ask(number: int, us: float) -> None:
    asking = many(3, logprobs=0, temperature=0.0) | {"most": RequestSampling(logprobs=number)}
    greedy = many(3, temperature=0.0)
    plain = priced_us(greedy | {name: replace(one, logprobs=None) for name, one in asking.items()})
    assert priced_us(greedy | asking)[0] == pytest.approx(plain[0] + us)


def test_what_the_steps_have_is_taken_off() -> None:
    assert priced_us(many(2, top_p=0.9), included="argmax")[0] == pytest.approx(60 - 12)
    assert priced_us(many(2, temperature=0.0), included="temperature")[0] == 0.0


def test_what_was_not_measured_is_said() -> None:
    _, inside = priced_us(many(8, top_p=0.9))
    assert inside.remarks == ()
    _, outside = priced_us(many(9, top_p=0.9, logprobs=7), vocab_size=3000)
    assert outside.out_of_domain_steps == 1
    of_vocab, of_rows, of_logprobs = outside.remarks
    assert "3,000 tokens" in of_vocab
    assert "9 requests" in of_rows
    assert "7 log-probabilities" in of_logprobs
    plan = StepPlan(step=2, request_ids=list(many(9, top_p=0.9, logprobs=7)))
    outside.price_s(plan, 10)
    outside.price_s(replace(plan, step=6), 3)
    assert outside.out_of_domain_steps == 1 + 4 + 3


CONFIG: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200",
    "workload": {
        "synthetic": {
            "num_requests": 60,
            "prompt_len": {"kind": "constant", "value": 100},
            "output_len": {"kind": "constant", "value": 40},
        },
    },
    "kv_cache": {"num_gpu_blocks": 4000},
}
MIX = [{"weight": 3, "temperature": 0}, {"weight": 7, "top_p": 0.9, "logprobs": 5}]


@pytest.fixture
def coefficients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Large ones, so that rounding does not hide them."""
    folder = tmp_path / "sampling"
    folder.mkdir()
    (folder / "h200.json").write_text(measured(num_rows=(1, 512)).model_dump_json())
    monkeypatch.setattr(sampling_file, "files", lambda package: tmp_path)


def run(leap: bool, **executor: Any) -> RunData:
    loaded = load_config({**CONFIG, "executor": executor})
    built = build(loaded, 0, leap=leap)
    simulate(built.parts)
    return built.recorder.data()


@pytest.mark.usefixtures("coefficients")
def test_leaping_prices_each_step_alike() -> None:
    leaped, single = (run(leap, sampling=MIX).steps for leap in (True, False))
    assert np.array_equal(leaped.end_s, single.end_s)
    assert np.array_equal(leaped.parts["sample_s"], single.parts["sample_s"])


@pytest.mark.usefixtures("coefficients")
def test_steps_take_longer_by_that_part_and_only_with_sampling() -> None:
    plain, sampled = run(True).steps, run(True, sampling=MIX).steps
    assert "sample_s" not in plain.parts
    lengths = [one.end_s[0] - one.start_s[0] for one in (sampled, plain)]
    assert lengths[0] - lengths[1] == pytest.approx(sampled.parts["sample_s"][0], rel=1e-6)
    assert lengths[0] > lengths[1]


@pytest.mark.usefixtures("coefficients")
def test_other_gpus_and_drafts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"executor.sampling: .*not measured on gpu a100.*h200"):
        load_config({**CONFIG, "gpu": "a100", "executor": {"sampling": MIX}})
    drafts = {"speculative": {"method": "ngram", "num_speculative_tokens": 2}}
    with pytest.raises(ConfigError, match="verify drafts"):
        load_config({**CONFIG, "scheduler": drafts, "executor": {"sampling": MIX}})
    with pytest.raises(ConfigError, match=r"no token of llama-3.1-8b"):
        load_config({**CONFIG, "executor": {"sampling": [{"stop_token_ids": [10**7]}]}})


@pytest.mark.usefixtures("coefficients")
def test_what_requests_and_classes_say_is_priced(tmp_path: Path) -> None:
    """By the request over its class over an entry over the likeliest token."""
    rows = [{}, {"temperature": 0.7, "top_p": 0.9}, {"logprobs": 1}]
    file = tmp_path / "t.jsonl"
    lines = [
        {"request_id": f"r{i}", "arrival_s": 0, "prompt_len": 9, "output_len": 2, "sampling": row}
        for i, row in enumerate(rows)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    of_trace = {**CONFIG, "workload": {"trace": {"path": str(file)}}}
    classes = [
        {"name": "a", "count": 1},
        {"name": "b", "count": 1, "sampling": {"temperature": 0.7, "top_p": 0.9}},
        {"name": "c", "count": 1, "sampling": {"logprobs": 1}},
    ]
    of_classes = {**CONFIG, "workload": {"synthetic": {"classes": classes}}}
    for entries, names in (([], ("greedy", "top_p")), ([{"top_k": 5}], ("top_k", "top_k top_p"))):
        settings = {"cost": {"kind": "formula", "base_s": 1}, "sampling": entries}
        for config in (of_trace, of_classes):
            built = build(load_config({**config, "executor": settings}), 0)
            simulate(built.parts)
            found = load_sampling("h200")
            of_two, of_one = (Times(found, found.methods[name], 128_256) for name in names)
            logprobs_s = Times(found, found.logprobs[1], 128_256).of(1)
            expected_s = of_two.of(2) + of_one.of(1) + logprobs_s
            assert built.recorder.data().steps.parts["sample_s"][0] == pytest.approx(expected_s)


def test_what_cannot_be_priced_is_said() -> None:
    classes = [{"name": "a", "sampling": {"top_p": 0.9}}]
    config = {**CONFIG, "gpu": "a100", "workload": {"synthetic": {"classes": classes}}}
    built = build(load_config({**config, "executor": {"cost": {"kind": "roofline"}}}), 0)
    assert built.sampling is None
    (warning,) = built.warnings
    assert "not priced: what it costs was not measured on gpu a100" in warning


def test_what_is_shipped_is_what_was_measured(repo_root: Path) -> None:
    script = repo_root / "benchmarks" / "sampling_fit.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_all_shipped_times_can_be_read() -> None:
    for gpu in sampling_file.sampling_gpus():
        found = sampling_file.load_sampling(gpu)
        assert found.gpu == gpu
        assert load_config({**CONFIG, "gpu": gpu, "executor": {"sampling": MIX}})
