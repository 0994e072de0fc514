from __future__ import annotations

import gzip
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from simserve.config.executor import RooflineCost
from simserve.config.loader import load_config
from simserve.config.resolve import scheduler_limits
from simserve.cost import roofline
from simserve.errors import ConfigError

BASE = {"model": "llama-3.1-8b", "workload": {"synthetic": {}}}
RECORDED = Path(__file__).parents[1] / "data" / "golden_functions.json.gz"


def recorded() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(arguments, outcome) of SchedulerConfig, recorded from vLLM v0.11.0."""
    with gzip.open(RECORDED) as file:
        rows: list[tuple[dict[str, Any], dict[str, Any]]] = json.load(file)["scheduler_config"]
    return rows


@pytest.mark.parametrize(("arguments", "outcome"), recorded(), ids=str)
def test_limits_are_those_recorded(arguments: dict[str, Any], outcome: dict[str, Any]) -> None:
    if "error" in outcome:
        with pytest.raises(ConfigError):
            scheduler_limits(**arguments)
    else:
        assert scheduler_limits(**arguments)._asdict() == outcome


@pytest.mark.parametrize(
    ("gpu", "budget", "max_num_seqs"),
    [
        ("h100", 8192, 1024),
        ("h200", 8192, 1024),
        ("mi300x", 8192, 1024),
        ("a100", 2048, 256),
        ("l40s", 2048, 256),
        ("rtx4090", 2048, 256),
    ],
)
def test_defaults_go_by_the_gpu(gpu: str, budget: int, max_num_seqs: int) -> None:
    scheduler = load_config({**BASE, "gpu": gpu}).config.scheduler
    assert scheduler.max_num_batched_tokens == budget
    assert scheduler.max_num_seqs == max_num_seqs


def test_max_model_len_is_the_models() -> None:
    assert load_config(BASE).config.scheduler.max_model_len == 131072


def test_default_max_num_seqs_is_cut_to_the_budget() -> None:
    scheduler = load_config(BASE, ["scheduler.max_num_batched_tokens=512"]).config.scheduler
    assert scheduler.max_num_seqs == 512


def test_a_given_max_num_seqs_is_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: must be at least max_num_seqs"):
        load_config(BASE, ["scheduler.max_num_batched_tokens=512", "scheduler.max_num_seqs=513"])


def test_without_chunked_prefill_the_budget_is_the_model_length() -> None:
    loaded = load_config(
        BASE, ["scheduler.enable_chunked_prefill=false", "scheduler.max_model_len=5000"]
    )
    assert loaded.config.scheduler.max_num_batched_tokens == 5000
    assert not loaded.reachable_in_engine
    assert "forces chunked prefill on" in loaded.warnings[0]


def test_a_budget_below_the_model_length_needs_chunked_prefill() -> None:
    with pytest.raises(ConfigError, match="a longer prompt could never start"):
        load_config(
            BASE,
            {
                "scheduler.enable_chunked_prefill": False,
                "scheduler.max_num_batched_tokens": 512,
                "scheduler.max_model_len": 4096,
                "scheduler.max_num_seqs": 8,
            },
        )


def test_several_partial_prefills_set_a_threshold() -> None:
    loaded = load_config(
        BASE, ["scheduler.max_num_partial_prefills=2", "scheduler.max_model_len=8192"]
    )
    assert loaded.config.scheduler.long_prefill_token_threshold == 327
    assert not loaded.reachable_in_engine
    assert "refuse any value but 1" in loaded.warnings[0]


def test_nothing_is_said_of_an_ordinary_configuration() -> None:
    loaded = load_config(BASE)
    assert loaded.reachable_in_engine
    assert loaded.warnings == ()


@pytest.mark.parametrize(("threshold", "said"), [(31, False), (32, True), (64, True)])
def test_a_threshold_of_the_budget_or_more_does_nothing(threshold: int, said: bool) -> None:
    loaded = load_config(
        BASE,
        {
            "scheduler.max_num_batched_tokens": 32,
            "scheduler.long_prefill_token_threshold": threshold,
        },
    )
    assert any("does nothing" in warning for warning in loaded.warnings) == said


@pytest.mark.parametrize(("quirks", "said"), [("as_engine", True), ("fixed", False)])
def test_a_threshold_cuts_prompts_though_chunking_is_off(quirks: str, said: bool) -> None:
    loaded = load_config(
        BASE,
        {
            "scheduler.enable_chunked_prefill": False,
            "scheduler.long_prefill_token_threshold": 8,
            "scheduler.quirks": quirks,
        },
    )
    assert any("cuts prompts although" in warning for warning in loaded.warnings) == said


def test_more_positions_than_the_model_has_are_remarked() -> None:
    loaded = load_config(BASE, ["scheduler.max_model_len=200000"])
    assert loaded.warnings == (
        "scheduler.max_model_len: 200000 is more than the 131072 positions of llama-3.1-8b; "
        "vLLM v0.11.0 refuses that",
    )
    assert not loaded.reachable_in_engine


@pytest.mark.parametrize(("block_size", "reachable"), [(17, False), (256, False), (128, True)])
def test_block_sizes_that_the_engine_does_not_take(block_size: int, reachable: bool) -> None:
    loaded = load_config(BASE, {"kv_cache.block_size": block_size})
    assert loaded.reachable_in_engine == reachable
    assert [warning.partition(":")[0] for warning in loaded.warnings] == (
        [] if reachable else ["kv_cache.block_size"]
    )


def test_another_scheduler_is_not_the_engines() -> None:
    assert not load_config(BASE, ["scheduler.kind=sarathi"]).reachable_in_engine


@pytest.mark.parametrize(
    ("synthetic", "total"),
    [
        ({}, 1000),
        ({"num_requests": 7}, 7),
        ({"classes": [{"name": "a", "count": 2}, {"name": "b", "count": 3}]}, 5),
        ({"classes": [{"name": "a", "count": 2}, {"name": "b"}]}, 1000),
        ({"sessions": {"num_sessions": 4, "turns": {"kind": "constant", "value": 2}}}, None),
    ],
)
def test_the_number_of_requests_is_written_out(
    synthetic: dict[str, Any], total: int | None
) -> None:
    config = load_config({**BASE, "workload": {"synthetic": synthetic}}).config
    assert config.workload.synthetic is not None
    assert config.workload.synthetic.num_requests == total
    assert load_config(config).config == config


def test_defaults_of_the_roofline_are_written_once() -> None:
    """The schema shows them, the class has them: the same numbers."""
    parameters = inspect.signature(roofline.RooflineCost).parameters
    for name, field in RooflineCost.model_fields.items():
        if name != "kind":
            assert field.default == parameters[name].default, name
