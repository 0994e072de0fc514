"""Keys of speculative decoding: what they come to in a run, and what is refused where it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import simserve
from simserve import api
from simserve.config.dump import dump_config
from simserve.config.loader import load_config
from simserve.errors import ConfigError
from simserve.metrics.rundir import read_run

BASE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {
        "synthetic": {
            "num_requests": 20,
            "prompt_len": {"kind": "constant", "value": 100},
            "output_len": {"kind": "constant", "value": 40},
        }
    },
    "metrics": {"plot": False},
}
TWO = {"method": "ngram", "num_speculative_tokens": 2}
NAME = "spec_decode_conditional_acceptance_pos"


def summary(**speculative: Any) -> dict[str, Any]:
    scheduler = {"speculative": {**TWO, **speculative}}
    return simserve.run({**BASE, "scheduler": scheduler}).summary_dict


def test_a_summary_says_what_was_accepted() -> None:
    found = summary(acceptance=[0.9, 0.4])
    assert found[f"{NAME}_0"] == pytest.approx(0.9, abs=0.06)
    assert found[f"{NAME}_1"] == pytest.approx(0.4, abs=0.1)
    assert found["spec_decode_acceptance_rate_pos_1"] < found[f"{NAME}_1"]
    drafts, accepted = (found[f"spec_decode_num_{what}"] for what in ("drafts", "accepted_tokens"))
    assert found["spec_decode_mean_acceptance_length"] == 1 + accepted / drafts
    assert found["spec_decode_draft_share"] == 0


def test_one_number_is_that_of_every_position() -> None:
    one, each = summary(acceptance=0.5), summary(acceptance=[0.5, 0.5])
    for times in ("date", "run_id"):
        one.pop(times, None)
        each.pop(times, None)
    assert one["mean_e2el_ms"] == each["mean_e2el_ms"]
    assert one["spec_decode_num_drafts"] == each["spec_decode_num_drafts"]


def test_a_run_without_drafts_says_nothing_of_them() -> None:
    found = simserve.run(BASE).summary_dict
    assert not any(key.startswith("spec_decode") for key in found)


def test_drafting_takes_its_time(tmp_path: Path) -> None:
    """`draft_s` is a part of each step that drafts, and lengthens it."""
    speculative = {**TWO, "acceptance": 0.0, "draft_s": 0.25}
    config = {**BASE, "scheduler": {"speculative": speculative}}
    api.run_to_directory(load_config(config), out=tmp_path / "run")
    steps = read_run(tmp_path / "run").steps
    assert (steps["parts.draft_s"] == 0.25).all()
    assert (steps["duration_s"] > 0.25).all()


def test_a_draft_model_is_priced_by_its_own_shape() -> None:
    small, large = (
        summary(method="draft_model", draft_model=name, acceptance=0.5)
        for name in ("llama-3.2-1b", "llama-3.2-3b")
    )
    assert 0.1 < small["spec_decode_draft_share"] < large["spec_decode_draft_share"] < 0.7
    assert small["mean_e2el_ms"] < large["mean_e2el_ms"]


def test_what_a_run_has_accepted_can_be_fed_to_another(tmp_path: Path) -> None:
    found = summary(acceptance=[0.9, 0.4])
    (tmp_path / "summary.json").write_text(json.dumps(found))
    again = summary(acceptance_file=str(tmp_path / "summary.json"))
    assert again[f"{NAME}_0"] == pytest.approx(found[f"{NAME}_0"], abs=0.06)
    assert again[f"{NAME}_1"] == pytest.approx(found[f"{NAME}_1"], abs=0.1)


REAL = "executor: {kind: real, device: cpu, tokens: sampled}\n"
WITH_WEIGHTS = "executor: {kind: real, device: cpu, tokens: sampled, draft_weights: there}\n"
MISTAKES = [
    ("ngram", "acceptance: [0.5]", "", r":3:3: scheduler.speculative: acceptance has 1 numbers"),
    ("ngram", "acceptance: 0.5, acceptance_file: x.json", "", "say the same twice"),
    ("ngram", "draft_s: 0.1", "", r":3:3: scheduler.speculative: drafts are made up here: give"),
    ("ngram", "acceptance: 0.5", REAL, r":3:\d+: scheduler.speculative.acceptance: has no effect"),
    ("ngram", "draft_s: 0.1", REAL, "scheduler.speculative.draft_s: has no effect"),
    ("eagle", "prompt_lookup_min: 2", REAL, "speculative.method: eagle is only simulated"),
    ("eagle", "acceptance: 0.5, prompt_lookup_min: 2", "", "belongs to method ngram"),
    ("ngram", "acceptance: 0.5, prompt_lookup_min: 6, prompt_lookup_max: 5", "", "at most"),
    ("ngram", "acceptance: 0.5, draft_model: llama-3.2-1b", "", "need each other"),
    ("draft_model", "acceptance: 0.5", "", "need each other"),
    ("draft_model", "acceptance: 0.5, draft_model: llama-3.2-1", "", r"did you mean|llama-3.2-1b"),
    (
        "draft_model",
        "acceptance: 0.5, draft_model: qwen3-0.6b",
        "",
        "qwen3-0.6b has 151936 tokens, llama-3.1-8b has 128256",
    ),
    ("draft_model", "acceptance: 0.5, draft_model: {config: no.json}", "", "no.json: cannot read"),
    (
        "ngram",
        "prompt_lookup_min: 2",
        WITH_WEIGHTS,
        r":5:\d+: executor.draft_weights: has no effec",
    ),
    (
        "draft_model",
        "draft_model: {config: short.json}",
        REAL,
        r"draft_model: short knows 8192 positions, fewer than .* \(131072\): lower that",
    ),
    (
        "draft_model",
        "acceptance: 0.5, draft_model: llama-3.2-1b",
        "executor: {cost: {kind: formula, base_s: 0.1}}\n",
        "cannot price llama-3.2-1b: use roofline",
    ),
]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_real_configuration_loads_again_with_its_defaults_written_out(method: str) -> None:
    draft_model = "llama-3.2-1b" if method == "draft_model" else None
    speculative = {"method": method, "num_speculative_tokens": 2, "draft_model": draft_model}
    executor = {"kind": "real", "tokens": "sampled"}
    scheduler = {"speculative": speculative}
    loaded = load_config({**BASE, "scheduler": scheduler, "executor": executor})
    assert load_config(yaml.safe_load(dump_config(loaded.config))).config == loaded.config


@pytest.mark.parametrize(("method", "keys", "more", "words"), MISTAKES)
def test_a_mistake_is_named_where_it_stands(
    tmp_path: Path, method: str, keys: str, more: str, words: str
) -> None:
    short = {"vocab_size": 128256, "max_position_embeddings": 8192, "hidden_size": 64}
    layers = {"num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 1}
    (tmp_path / "short.json").write_text(json.dumps(short | layers))
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: llama-3.1-8b\n"
        "scheduler:\n"
        f"  speculative: {{method: {method}, num_speculative_tokens: 2, {keys}}}\n"
        "workload: {synthetic: {num_requests: 1, prompt_len: {kind: constant, value: 1}, "
        "output_len: {kind: constant, value: 1}}}\n" + more
    )
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
