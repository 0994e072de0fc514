"""What is wrong with a case is one error that names file and field, and nothing runs forever."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.fidelity.conform.case_format import first_problem
from simserve.fidelity.conform.cases import Case
from tests.golden.cases import CASES, load, load_case

SPOILS: list[tuple[Callable[[Case], object], str]] = [
    (lambda c: c["config"].pop("block_size"), "config.block_size: Field required"),
    (lambda c: c["config"].update(block_size=2**53), "config.block_size: Input should be less"),
    (lambda c: c["config"].update(num_gpu_blocks=10**12), "config.num_gpu_blocks: Input should"),
    (lambda c: c["config"].update(max_num_seqs=None), "config.max_num_seqs: Input should be a va"),
    (lambda c: c["config"].update(max_num_seqs="8"), "config.max_num_seqs: Input should be a val"),
    (lambda c: c["config"].update(policy="lifo"), "config.policy: Input should be 'fcfs' or 'pr"),
    (lambda c: c["config"].update(enable_prefix_caching=1), "config.enable_prefix_caching: Input"),
    (lambda c: c["config"].update(cost=[1]), "config.cost: List should have at least 3 items"),
    (lambda c: c["config"].update(cost=[0.1, 0.1, float("nan")]), "config.cost.2: Input should be"),
    (lambda c: c["config"].update(spec={"method": "ngram", "num": 2, "accept": [1, 2]}),
     "config.spec: ngram needs draft_len"),
    (lambda c: c["config"].update(kv_groups=[{"type": "sliding"}]),
     "config.kv_groups.0: a sliding group needs a window"),
    (lambda c: c.update(config=3), "config: Input should be a valid dictionary"),
    (lambda c: c["workload"].update(requests={}), "workload.requests: Input should be a va"),
    (lambda c: c["workload"]["requests"][1].pop("t"), "workload.requests.1.t: Field required"),
    (lambda c: c["workload"]["requests"][1].update(id=7),
     "workload: requests: 1: id must be 1, is 7"),
    (lambda c: c["workload"]["requests"][1].update(out=0), "workload.requests.1.out: Input should"),
    (lambda c: c["workload"]["requests"][1].update(prompt=[[1, 2], ["x", 1, 2]]),
     "workload.requests.1.prompt.1: must be [segment, length] or ['o', request, length]"),
    (lambda c: c["workload"].update(aborts=[[0.5, 10**6]]), "workload: aborts: there is no reque"),
    (lambda c: c["workload"].update(aborts=[[0.5]]), "workload.aborts.0: must be [time, request]"),
    (lambda c: c["workload"].update(resets=[-1.0]), "workload.resets.0: Input should be greater"),
    (lambda c: c["steps"].insert(0, 3), "steps.0: Input should be a valid dictionary"),
    (lambda c: c.update(summary=[]), "summary: Input should be a valid dictionary"),
]  # fmt: skip


def conform(path: Path, case: Case) -> tuple[int, str]:
    path.write_bytes(gzip.compress(json.dumps(case).encode(), mtime=0))
    outcome = CliRunner().invoke(app, ["conform", str(path)])
    return outcome.exit_code, outcome.output


@pytest.fixture
def case() -> Case:
    return load("g01")


@pytest.mark.parametrize(("spoil", "says"), SPOILS)
def test_what_is_wrong_is_named(
    tmp_path: Path, case: Case, spoil: Callable[[Case], object], says: str
) -> None:
    spoil(case)
    status, output = conform(tmp_path / "bad.json.gz", case)
    assert status == 2
    assert output.startswith(f"{tmp_path}/bad.json.gz: not a case of format 1: {says}")
    assert output.count("\n") == 1


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_recorded_cases_are_of_the_format(path: Path) -> None:
    assert first_problem(load_case(path)) is None


def test_a_case_that_would_never_end_differs_after_its_steps(tmp_path: Path) -> None:
    case: dict[str, Any] = copy.deepcopy(load("g28"))  # a request that is preempted for ever
    assert case["config"]["max_steps"] == len(case["steps"])
    case["config"]["max_steps"] = 10**9
    status, output = conform(tmp_path / "x.json.gz", case)
    assert status == 1
    steps = len(case["steps"])
    assert f"DIFFERS at steps, count: expected {steps}, got {steps + 1}" in output
