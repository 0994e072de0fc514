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
        ("{top_k: -3}", 15, "top_k", "at least 0"),
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


def test_it_goes_with_the_real_executor_alone(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(HEAD.replace("real", "simulated") + "    - {top_p: 0.9}\n")
    with pytest.raises(ConfigError, match=r"executor\.sampling.*another kind"):
        load_config(file)


def test_a_mixture_is_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + "    - {weight: 30, temperature: 0}\n    - {weight: 70, top_p: 0.9}\n")
    real = load_config(file).config.executor
    assert isinstance(real, Real)
    assert [(one.weight, one.temperature, one.top_p) for one in real.sampling] == [
        (30, 0, 1),
        (70, 1, 0.9),
    ]
