"""Which points a sweep has, what they are called, and every way in which its section is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.config.loader import load_config
from simserve.config.sweep_loader import Point, load_points, load_sweep
from simserve.errors import ConfigError

BASE: dict[str, Any] = {"model": "llama-3.1-8b", "workload": {"synthetic": {"num_requests": 2}}}
SEQS = "scheduler.max_num_seqs"
BUDGET = "scheduler.max_num_batched_tokens"


def points(sweep: dict[str, Any], overrides: Any = (), **base: Any) -> list[Point]:
    return load_points(load_sweep({**BASE, **base, "sweep": sweep}, overrides))


def problem(sweep: dict[str, Any], overrides: Any = ()) -> str:
    with pytest.raises(ConfigError) as raised:
        points(sweep, overrides)
    return str(raised.value)


def test_a_grid_is_every_combination() -> None:
    found = points({"type": "grid", "parameters": {SEQS: [4, 8], BUDGET: [64, 128]}})
    assert [tuple(point.settings.values()) for point in found] == [
        (4, 64), (4, 128), (8, 64), (8, 128),
    ]  # fmt: skip
    assert found[1].name == "max_num_seqs=4,max_num_batched_tokens=128"
    assert found[1].loaded is not None
    assert found[1].loaded.config.scheduler.max_num_seqs == 4
    assert found[1].loaded.config.scheduler.max_num_batched_tokens == 128


def test_zip_goes_through_all_lists_at_once() -> None:
    found = points({"type": "zip", "parameters": {SEQS: [4, 8, 4], BUDGET: [64, 64, 128]}})
    assert [list(point.values.values()) for point in found] == [[4, 64], [8, 64], [4, 128]]


def test_one_at_a_time_starts_from_the_configuration() -> None:
    sweep = {"type": "one_at_a_time", "parameters": {SEQS: [4, 8], BUDGET: [512]}}
    found = points(sweep, scheduler={"max_num_seqs": 16})
    assert [point.name for point in found] == [
        "base", "max_num_seqs=4", "max_num_seqs=8", "max_num_batched_tokens=512",
    ]  # fmt: skip
    assert [point.values[SEQS] for point in found] == [16, 4, 8, 16]
    assert found[0].values[BUDGET] == 8192  # the engine's default, written out
    assert found[0].settings == {}


def test_scenarios_meet_every_combination_of_parameters() -> None:
    found = points(
        {
            "type": "scenarios",
            "scenarios": {"base line": {}, "small": {BUDGET: 2048}},
            "parameters": {"workload": [{"synthetic": {"num_requests": 1}}, BASE["workload"]]},
        }
    )
    assert [point.name for point in found] == [
        "base_line,workload=1", "base_line,workload=2", "small,workload=1", "small,workload=2",
    ]  # fmt: skip
    assert [point.scenario for point in found] == ["base line"] * 2 + ["small"] * 2
    assert found[2].values == {BUDGET: 2048, "workload": {"synthetic": {"num_requests": 1}}}


@settings(max_examples=30)
@given(
    st.lists(st.text(max_size=300), min_size=1, max_size=5, unique=True),
    st.lists(st.integers(0, 100), min_size=1, max_size=5, unique=True),
)
def test_names_are_file_names_and_differ_or_it_is_an_error(
    labels: list[str], seeds: list[int]
) -> None:
    sweep = {"type": "grid", "parameters": {"label": labels, "seed": seeds}}
    try:
        found = points(sweep)
    except ConfigError:
        assert "two points are called" in problem(sweep)
        return
    names = {point.name for point in found}
    assert len(names) == len(labels) * len(seeds)
    assert not [name for name in names if "/" in name or name.startswith(".") or len(name) > 200]


def test_values_that_do_not_go_together_fail_alone() -> None:
    sweep = {"type": "grid", "parameters": {SEQS: [4, 64], BUDGET: [32, 128]}}
    found = points(sweep)
    assert [point.error is None for point in found] == [True, True, False, True]
    assert "must be at least max_num_seqs (64), not 32" in str(found[2].error)


def test_mistakes_have_a_place(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "model: llama-3.1-8b\nworkload: {synthetic: {}}\nsweep:\n  type: grid\n"
        f"  parameters:\n    {SEQS}: [4, many]\n    scheduler.max_num_sequences: [1]\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_points(load_sweep(path))
    text = str(raised.value)
    assert f"{path}:6:33: {SEQS}: must be a whole number, not the text 'many'" in text
    assert f"{path}:7:35: scheduler.max_num_sequences: unknown key" in text
    assert len(raised.value.problems) == 2  # each once, in however many points it is


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"type": "gird", "parameters": {SEQS: [1]}}, "did you mean 'grid'?"),
        ({"parameters": {SEQS: [1]}}, "needs a type: grid, zip, one_at_a_time, scenarios"),
        ({"type": "grid", "parameters": {}}, "sweep.parameters"),
        ({"type": "grid", "parameters": {SEQS: 4}}, "must be a list, not 4"),
        ({"type": "grid", "parameters": {SEQS: []}}, "sweep.parameters"),
        ({"type": "grid", "parameters": {SEQS: [4, 8, 4]}}, "4 stands in the list twice"),
        ({"type": "grid", "parameters": {SEQS: [4]}, "repetitions": 3}, "belongs under metrics"),
        ({"type": "zip", "parameters": {SEQS: [4], BUDGET: [1, 2]}}, f"{BUDGET} has 2"),
        (
            {"type": "grid", "parameters": {"scheduler": [{}], SEQS: [4]}},
            f"{SEQS} is a part of scheduler",
        ),
        (
            {"type": "scenarios", "scenarios": {"a": {SEQS: 1}}, "parameters": {SEQS: [4]}},
            "stands among the parameters and in scenario a",
        ),
        ({"type": "grid", "parameters": {"model.config.x": [1]}}, "model"),
        (
            {"type": "grid", "parameters": {"seed": list(range(400)), SEQS: list(range(1, 301))}},
            "120000 points are more than 100000",
        ),
    ],
)
def test_a_wrong_section_is_one_sentence(sweep: dict[str, Any], message: str) -> None:
    assert message in problem(sweep)


def test_two_equal_points_are_an_error() -> None:
    assert "two points are called" in problem({"type": "zip", "parameters": {SEQS: [4, 4]}})


@pytest.mark.parametrize("name", ["summary.csv", "sweep.yaml"])
def test_a_point_is_not_called_as_a_file_beside_it(name: str) -> None:
    sweep = {"type": "scenarios", "scenarios": {name: {}, "other": {}}}
    assert f"a point is called {name}" in problem(sweep)


def test_overrides_reach_into_the_section() -> None:
    sweep = {
        "type": "scenarios",
        "scenarios": {"a": {}, "b": {SEQS: 4}},
        "parameters": {BUDGET: [64, 128]},
    }
    given = [f"sweep.parameters.{BUDGET}=[256]", f"sweep.scenarios.a.{SEQS}=2"]
    given += ["sweep.scenarios.c={}", "sweep.timeout_s=5"]
    found = points(sweep, given)
    assert [point.settings for point in found] == [
        {SEQS: 2, BUDGET: 256}, {SEQS: 4, BUDGET: 256}, {BUDGET: 256},
    ]  # fmt: skip
    assert load_sweep({**BASE, "sweep": sweep}, given).sweep.timeout_s == 5
    same = {"type": "grid", "parameters": {SEQS: [4]}}
    key = f"sweep.parameters.{SEQS}"
    assert [p.settings for p in points(same, {key: [8, 16]})] == [{SEQS: 8}, {SEQS: 16}]
    assert problem(same, [f"{key}=8"]) == f"-o {key}=8: {key}: must be a list, not 8"
    told = problem(same, ["sweep.parameters.scheduler.max_num_seq=[8]"])
    assert told.startswith("-o sweep.parameters.scheduler.max_num_seq=[8]: scheduler.max_num_seq:")
    assert "did you mean" in told


def test_an_override_of_what_varies_is_an_error() -> None:
    sweep = {"type": "grid", "parameters": {SEQS: [4, 8]}}
    assert "-o scheduler.max_num_seqs would change nothing" in problem(sweep, [f"{SEQS}=2"])
    assert points(sweep, ["scheduler={policy: priority}", "sweep.timeout_s=5"])[0].error is None


def test_a_run_of_a_sweep_and_a_sweep_of_a_run() -> None:
    sweep = {"type": "grid", "parameters": {SEQS: [4]}}
    with pytest.raises(ConfigError, match="`simserve sweep` starts it"):
        load_config({**BASE, "sweep": sweep})
    with pytest.raises(ConfigError, match="has no `sweep` section"):
        load_sweep(BASE)


def test_all_points_have_the_same_seeds() -> None:
    sweep = {"type": "grid", "parameters": {SEQS: [4, 8]}}
    found = points(sweep, seed=5, metrics={"repetitions": 3})
    for point in found:
        assert point.loaded is not None
        assert point.loaded.config.seed == 5
        assert point.loaded.config.metrics.repetitions == 3
