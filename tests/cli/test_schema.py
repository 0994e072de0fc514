from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.config.loader import load_config
from simserve.config.sweep_loader import load_points, load_sweep

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "schema" / "simserve.schema.json"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
BEYOND = {"long_prefill_labels.yaml", "own.yaml", "block_size.yaml"}
"""Configurations of what no engine does."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))


def test_the_committed_schema_is_what_the_command_prints() -> None:
    """Otherwise: simserve schema > schema/simserve.schema.json"""
    outcome = CliRunner().invoke(app, ["schema"])
    assert outcome.exit_code == 0
    assert outcome.stdout == SCHEMA.read_text()


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize("config", CONFIGS, ids=relative)
def test_every_configuration_names_the_schema_and_fulfils_it(config: Path) -> None:
    text = config.read_text()
    match = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert match, "the first line names no schema"
    assert Path(os.path.normpath(config.parent / match[1])) == SCHEMA
    validator().validate(yaml.safe_load(text))


@pytest.mark.parametrize("config", CONFIGS, ids=relative)
def test_every_configuration_can_be_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    is_sweep = "sweep" in yaml.safe_load(config.read_text())
    points = load_points(load_sweep(config)) if is_sweep else []
    configs = [point.loaded for point in points] or [load_config(config)]
    assert None not in configs
    remarked = [one for one in configs if one and (one.warnings or not one.reachable_in_engine)]
    assert bool(remarked) == (config.name in BEYOND)


def test_every_key_is_described() -> None:
    schema = json.loads(SCHEMA.read_text())
    undescribed = [
        f"{name}.{key}"
        for name, definition in {"": schema, **schema["$defs"]}.items()
        for key, entry in definition.get("properties", {}).items()
        if not {"description", "$ref"} & set(entry) and key not in ("kind", "type")
    ]
    assert not undescribed


def test_a_wrong_configuration_does_not_fulfil_it() -> None:
    good = {"model": "llama-3.1-8b", "workload": {"synthetic": {}}}
    validator().validate(good)
    for wrong in ({"max_num_seqs": 4}, {"seed": "1"}, {"scheduler": {"policy": "prio"}}):
        with pytest.raises(jsonschema.ValidationError):
            validator().validate({**good, **wrong})


def test_w2_is_the_benchmark_that_figures_are_quoted_for() -> None:
    config = load_config(ROOT / "configs" / "bench" / "w2.yaml").config
    synthetic = config.workload.synthetic
    assert synthetic is not None
    assert synthetic.num_requests == 10_000
    assert synthetic.arrival.model_dump() == {"kind": "poisson", "rate": 6.5}
    assert synthetic.prompt_len.model_dump() == {
        "kind": "lognormal", "mean": 1005, "sigma": 0.8, "min": 16, "max": 6000,
    }  # fmt: skip
    assert synthetic.output_len.model_dump() == {
        "kind": "lognormal", "mean": 250.75, "sigma": 0.7, "min": 4, "max": 2000,
    }  # fmt: skip
    assert config.gpu == "a100"
    assert config.executor.cost.kind == "roofline"
    assert config.scheduler.max_num_batched_tokens == 2048
    assert config.scheduler.max_num_seqs == 256
    assert config.kv_cache.block_size == 16
    assert config.kv_cache.enable_prefix_caching
    assert config.seed == 0
