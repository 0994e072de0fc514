"""Settings of sampling: mistakes are named where they stand, and what is right is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from simserve.config.executor import Real
from simserve.config.loader import load_config
from simserve.errors import ConfigError

HEAD = """\
model: llama-3.1-8b
gpu: h200
workload: {synthetic: {num_requests: 1, arrival: {kind: immediate}}}
executor:
  kind: real
  sampling:
"""


@pytest.mark.parametrize(
    ("entry", "column", "key", "part"),
    [
        ("{top_p: 0}", 15, "top_p", "greater than 0"),
        ("{top_p: 1.5}", 15, "top_p", "at most 1"),
        ("{top_k: -3}", 15, "top_k", "at least -1"),
        ("{min_p: 2}", 15, "min_p", "at most 1"),
        ("{temperature: -1}", 21, "temperature", "at least 0"),
        ("{weight: 0, top_p: 0.9}", 16, "weight", "greater than 0"),
        ("{topp: 0.9}", 8, "topp", "top_p"),
    ],
)
def test_a_mistake_is_named_where_it_stands(
    tmp_path: Path, entry: str, column: int, key: str, part: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{HEAD}    - {{temperature: 0}}\n    - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert problem.path == f"executor.sampling.1.{key}"
    assert (problem.line, problem.column) == (8, column)
    assert part in problem.message


@pytest.mark.parametrize(
    ("tokens", "entry", "column", "key", "part"),
    [
        ("replay", "{ignore_eos: false}", 20, "ignore_eos", "use tokens sampled"),
        ("replay", "{logprobs: 5}", 18, "logprobs", "use tokens sampled"),
        ("sampled", "{logprobs: 21}", 18, "logprobs", "at most 20"),
        ("sampled", "{stop_token_ids: [5, 128256]}", 8, "stop_token_ids", "no token of llama"),
    ],
)
def test_a_wrong_combination_is_named_where_it_stands(
    tmp_path: Path, tokens: str, entry: str, column: int, key: str, part: str
) -> None:
    file = tmp_path / "c.yaml"
    head = HEAD.replace("  sampling:", f"  tokens: {tokens}\n  sampling:")
    file.write_text(f"{head}    - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert problem.path == f"executor.sampling.0.{key}"
    assert (problem.line, problem.column) == (8, column)
    assert part in problem.message


def test_penalties_do_not_go_with_drafts(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    head = HEAD.replace("  sampling:", "  tokens: sampled\n  sampling:")
    drafts = "scheduler: {speculative: {method: ngram, num_speculative_tokens: 2}}\n"
    file.write_text(f"{head}    - {{presence_penalty: 1}}\n{drafts}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == ("executor.sampling.0.presence_penalty", 8)


def test_classes_are_checked_as_entries_are(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    workload = "workload: {synthetic: {classes: [{name: a, sampling: {logprobs: 2}}]}}"
    lines = HEAD.splitlines()
    file.write_text("\n".join([*lines[:2], workload, *lines[3:5]]))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert problem.path == "workload.synthetic.classes.0.sampling.logprobs"
    assert (problem.line, problem.column) == (3, 65)


def test_a_mixture_is_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + "    - {weight: 30, temperature: 0}\n    - {weight: 70, top_p: 0.9}\n")
    real = load_config(file).config.executor
    assert isinstance(real, Real)
    assert [(one.weight, one.temperature, one.top_p) for one in real.sampling] == [
        (30, 0, 1),
        (70, 1, 0.9),
    ]
