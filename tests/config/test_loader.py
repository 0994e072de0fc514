from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.config.dump import dump_config
from simserve.config.loader import load_config
from simserve.config.model import RunConfig
from simserve.errors import ConfigError, SimserveError

BASE = {"model": "llama-3.1-8b", "workload": {"synthetic": {"num_requests": 10}}}
SAMPLE = """\
# a comment
model: llama-3.1-8b
gpu: h200
workload:
  trace: {path: traces/chat.jsonl, format: auto, speedup: 2}
  max_concurrency: 1e3
scheduler: &s
  max_num_batched_tokens: 2048
  policy: "fcfs"
kv_cache: {num_gpu_blocks: 100, groups: [{type: full}, {type: sliding_window, window: 64}]}
executor:
  cost: {kind: formula, base_s: 1e-3}
metrics: {percentiles: [50, 99.9], goodput: {ttft: 500}, window: {start_s: 1}}
metadata: {note: |
  two
  lines
, list: [1, null, true]}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text)
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, SAMPLE.replace("{note: |\n  two\n  lines\n, ", "{"))
    ).config
    assert config.workload.max_concurrency == 1000
    assert config.executor.cost.model_dump()["base_s"] == 0.001
    assert config.metrics.percentiles == (50, 99.9)
    assert config.metadata == {"list": [1, None, True]}


def test_model_and_workload_make_a_configuration() -> None:
    config = load_config(BASE).config
    assert config.gpu == "h200"
    assert config.scheduler.kind == "vllm"
    assert config.executor.cost.kind == "roofline"


def test_aliases_are_copies(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "model: llama-3.1-8b\nworkload: {synthetic: {prompt_len: &n {kind: constant, value: 5},"
        " output_len: *n}}\n",
    )
    synthetic = load_config(
        file, ["workload.synthetic.output_len.value=7"]
    ).config.workload.synthetic
    assert synthetic is not None
    assert synthetic.prompt_len.model_dump()["value"] == 5
    assert synthetic.output_len.model_dump()["value"] == 7


def test_a_byte_order_mark_and_crlf_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbfmodel: llama-3.1-8b\r\nworkload: {synthetic: {}}\r\nsede: 1\r\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.source) == (3, 1, "sede: 1")


def test_columns_count_characters(tmp_path: Path) -> None:
    file = write(
        tmp_path, "model: llama-3.1-8b\nworkload: {synthetic: {}}\nmetadata: {ü: 1, b: 017}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.problems[0].column == 21


def test_mappings_need_no_file() -> None:
    numbers = {"scheduler": {"max_num_seqs": np.int64(64)}, "metrics": {"percentiles": (50.0,)}}
    config = load_config({**BASE, **numbers}).config
    assert config.scheduler.max_num_seqs == 64
    with pytest.raises(ConfigError, match=r"^<config>: scheduler.max_num_seq: unknown key"):
        load_config({**BASE, "scheduler": {"max_num_seq": 64}})


@pytest.mark.parametrize("value", [object(), {1: 2}, b"bytes", {"a": [object()]}])
def test_mappings_hold_plain_values(value: object) -> None:
    with pytest.raises(ConfigError, match="metadata"):
        load_config({**BASE, "metadata": value})


def test_mappings_that_hold_themselves_are_refused() -> None:
    loop: dict[str, object] = {}
    loop["loop"] = loop
    with pytest.raises(ConfigError, match="64 levels"):
        load_config({**BASE, "metadata": loop})


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "m.json").write_text(json.dumps(shape))
    file = write(tmp_path, "model: {config: m.json}\nworkload: {trace: {path: t.jsonl}}\n")
    loaded = load_config(file)
    assert loaded.model.num_hidden_layers == 2
    assert loaded.config.scheduler.max_model_len == 4096
    assert loaded.path("t.jsonl") == tmp_path / "t.jsonl"
    assert loaded.path("/t.jsonl") == Path("/t.jsonl")


def test_a_resolved_configuration_loads_as_itself(tmp_path: Path) -> None:
    first = load_config({**BASE, "metadata": {"a": "1e3", "b": "on", "c": "12:30", "d": "017"}})
    again = load_config(write(tmp_path, dump_config(first.config)))
    assert again.config == first.config
    assert load_config(first.config).config == first.config


@given(st.dictionaries(st.text(), st.text() | st.integers(-(10**9), 10**9) | st.booleans()))
@settings(max_examples=50, deadline=None)
def test_any_text_survives_being_written(metadata: dict[str, str | int | bool]) -> None:
    from simserve.config.yaml_text import parse_yaml

    config = RunConfig.model_validate({**BASE, "metadata": metadata})
    document = parse_yaml(dump_config(config), "c.yaml")
    assert not document.problems
    assert document.root.plain()["metadata"] == metadata


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_mutated_files_give_an_error_or_a_configuration(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(SAMPLE.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        stop = data.draw(st.integers(start, min(len(content), start + 12)))
        new = data.draw(
            st.binary(max_size=4)
            | st.sampled_from(
                [b"\n", b": ", b"- ", b"&a ", b"*a", b"{", b"]", b"\t", b"? ", b"!!x "]
            )
        )
        content[start:stop] = new
    file = tmp_path_factory.getbasetemp() / "mutated.yaml"
    file.write_bytes(bytes(content))
    with suppress(SimserveError):
        load_config(file)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(-2, 2)
    | st.sampled_from(["vllm", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["kind", "type", "trace", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from(sorted(RunConfig.model_fields)), VALUES, max_size=4),
    st.sampled_from(["scheduler", "workload", "executor", "kv_cache", "metrics"]),
    VALUES,
)
@settings(max_examples=100, deadline=None)
def test_any_tree_gives_an_error_or_a_configuration(
    tree: dict[str, object], key: str, value: object
) -> None:
    with suppress(SimserveError):
        load_config({**BASE, **tree, key: {"kind": value, "cost": value, "groups": [value]}})
