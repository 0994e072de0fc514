from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simserve.config.loader import load_config
from simserve.errors import ConfigError

BASE = {"model": "llama-3.1-8b", "workload": {"synthetic": {"num_requests": 10}}}


def test_values_are_yaml() -> None:
    config = load_config(
        BASE,
        [
            "scheduler.max_num_seqs=64",
            "scheduler.enable_chunked_prefill=true",
            "executor.cost={kind: formula, base_s: 1e-3}",
            "metrics.percentiles=[50, 99.9]",
            "label='017'",
            "metrics.window=null",
            "gpu = h100",
        ],
    ).config
    assert config.scheduler.max_num_seqs == 64
    assert config.executor.cost.kind == "formula"
    assert config.metrics.percentiles == (50, 99.9)
    assert config.label == "017"
    assert config.gpu == "h100"


def test_the_last_of_several_wins() -> None:
    assert load_config(BASE, ["seed=1", "seed=2"]).config.seed == 2


def test_a_parent_that_is_absent_or_empty_is_made() -> None:
    assert load_config(BASE, ["metadata.a.b.c=1"]).config.metadata == {"a": {"b": {"c": 1}}}
    window = load_config({**BASE, "metrics": {"window": None}}, ["metrics.window.start_s=1"])
    assert window.config.metrics.window is not None


def test_a_workload_can_be_swapped() -> None:
    swapped = load_config(BASE, ["workload.synthetic=null", "workload.trace.path=a.jsonl"]).config
    assert swapped.workload.synthetic is None
    assert swapped.workload.trace is not None


def test_a_number_is_a_constant_length() -> None:
    plain, written = (
        load_config(BASE, {"workload.synthetic.prompt_len": value}).config
        for value in (500, {"kind": "constant", "value": 500})
    )
    assert plain == written
    for value, said in ((0, "at least 1, not 0"), (2.5, "whole number"), (True, "a mapping")):
        with pytest.raises(ConfigError, match=f"synthetic.prompt_len: must be {said}|{said}"):
            load_config(BASE, {"workload.synthetic.prompt_len": value})


def test_list_entries_go_by_index() -> None:
    base = {
        **BASE,
        "kv_cache": {"groups": [{"type": "full"}, {"type": "sliding_window", "window": 8}]},
    }
    groups = load_config(base, ["kv_cache.groups.1.window=16"]).config.kv_cache.groups
    assert groups is not None
    assert groups[1].model_dump()["window"] == 16


def test_values_by_path_from_python() -> None:
    config = load_config(BASE, {"scheduler.max_num_seqs": 64, "metrics.percentiles": (50,)}).config
    assert config.scheduler.max_num_seqs == 64


def test_the_source_is_left_alone() -> None:
    source = {**BASE, "scheduler": {"max_num_seqs": 4}}
    load_config(source, ["scheduler.max_num_seqs=8"])
    assert source["scheduler"] == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "scheduler.max_num_seq=64",
            "-o scheduler.max_num_seq=64: scheduler.max_num_seq: unknown key"
            " (did you mean 'max_num_seqs'?)",
        ),
        (
            "scheduler.max_num_seqs=x",
            "-o scheduler.max_num_seqs=x: scheduler.max_num_seqs:"
            " must be a whole number, not the text 'x'",
        ),
        (
            "scheduler.enable_chunked_prefill=off",
            "-o scheduler.enable_chunked_prefill=off: scheduler.enable_chunked_prefill:"
            " off is a boolean to some readers: write false, or 'off' for text",
        ),
        (
            "scheduler.max_num_batched_tokens=8",
            "-o scheduler.max_num_batched_tokens=8: scheduler.max_num_batched_tokens:"
            " must be at least max_num_seqs (16), not 8",
        ),
        (
            "model.config.x=1",
            "-o model.config.x=1: model: is neither a mapping nor a list with an entry 'config'",
        ),
        (
            "seed",
            "-o seed: write KEY=VALUE, for example scheduler.max_num_seqs=64",
        ),
        ("label=\udcff", "-o 'label=\\udcff': is not UTF-8 text"),
        (
            "workload.trace.path=a",
            "-o workload.trace.path=a: workload: needs either trace or synthetic, not both",
        ),
        (
            "metrics.window.start_s=9",
            "-o metrics.window.start_s=9: metrics.window: end_s (5) is not after start_s (9)",
        ),
        (
            "workload={trace: {path: ''}}",
            "-o workload={trace: {path: ''}}: workload.trace.path: must not be empty",
        ),
        (
            "scheduler..kind=vllm",
            "-o scheduler..kind=vllm: write KEY=VALUE, for example scheduler.max_num_seqs=64",
        ),
    ],
)
def test_errors_name_the_argument(override: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    others = {"scheduler": {"max_num_seqs": 16}, "metrics": {"window": {"start_s": 1, "end_s": 5}}}
    file.write_text(json.dumps({**BASE, **others}))
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert str(caught.value) == message


def test_an_argument_is_not_blamed_for_what_the_file_lacks(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("workload: {synthetic: {}}\nmetrics: {window: {start_s: 2, end_s: 1}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["seed=1", "metrics.plot=false", "workload.synthetic.rate=2"])
    said = {problem.path: problem for problem in caught.value.problems}
    for path in ("model", "metrics.window"):
        assert said[path].file == str(file)


@pytest.mark.parametrize("given", [None, 8, [("seed", 8)], {8: 8}, [b"seed=1"]])
def test_what_are_no_overrides_is_said(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^overrides are texts .*, not (None|8|\('seed'|b')"):
        load_config(BASE, given)


def test_a_model_that_is_a_file_is_told_how_it_is_given() -> None:
    form = r"or a Hugging Face file as path/to/config\.json or \{config: path"
    with pytest.raises(ConfigError, match=form):
        load_config(BASE, ["model=hf"])


@pytest.mark.parametrize("given", ["model=hf.json", "model={config: hf.json}"])
def test_a_model_may_be_a_file_either_way(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [given], base_dir=tmp_path)
    assert str(caught.value).startswith(f"-o {given}: model: hf.json: cannot read")
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "hf.json").write_text(json.dumps(shape))
    loaded = load_config(BASE, [given], base_dir=tmp_path)
    assert loaded.model.num_hidden_layers == 2
    assert loaded.config.model_dump()["model"] == {"config": "hf.json"}


def test_near_names_are_found_whatever_their_case() -> None:
    with pytest.raises(ConfigError, match="did you mean 'a100'"):
        load_config(BASE, ["gpu=A100"])


def test_a_syntax_error_is_one_too() -> None:
    with pytest.raises(ConfigError, match=r"^-o seed=\[1: seed: not YAML"):
        load_config(BASE, ["seed=[1"])


def test_all_bad_overrides_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, ["seed", "seed=[", "model.x.y=1"])
    assert len(caught.value.problems) == 3
