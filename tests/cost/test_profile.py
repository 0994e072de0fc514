from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simserve.config.presets import load_gpu, load_model
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import load_profile
from simserve.errors import ConfigError, OutOfDomainError, UnknownNameError
from simserve.types import StepRun

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def load(tmp_path: Path, profile_json: dict[str, Any]) -> Callable[..., ProfileCost]:
    """Makes a cost model of the synthetic profile after some changes to it."""

    def make(*changes: Change, **top: Any) -> ProfileCost:
        content = {**copy.deepcopy(profile_json), **top}
        for change in changes:
            change(content)
        (tmp_path / "p.json").write_text(json.dumps(content))
        shape, gpu = load_model("llama-3.1-8b"), load_gpu("h200")
        return ProfileCost(shape, gpu, path="p.json", base_dir=tmp_path)

    return make


def table(*points: tuple[float, float]) -> dict[str, Any]:
    return {"feature": "num_tokens", "unit": "tokens", "points": list(points)}


def seconds(model: ProfileCost, run: StepRun) -> float:
    return float(model.price(run).durations_s[0])


def test_points_are_reproduced_and_joined_by_straight_lines(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    points = [(1.0, 0.3), (1024.0, 1.0), (2048.0, 2.0), (4096.0, 2.1)]
    model = load(terms=[table(*points)], domain={"num_tokens": [1, 4096]})
    for x, y in points:
        assert seconds(model, step((0, int(x)))) == y
    assert seconds(model, step((0, 1536))) == 1.5
    assert model.out_of_domain_steps == 0


def test_extrapolation_is_monotone_and_counted(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load(
        terms=[table((1024, 1.0), (2048, 2.0), (4096, 2.5))], domain={"num_tokens": [1024, 4096]}
    )
    assert seconds(model, step((0, 16384))) == pytest.approx(2.5 + 12288 * 0.5 / 2048)
    assert seconds(model, step((0, 512))) == 0.5
    assert seconds(model, step((0, 2048))) == 2.0
    assert model.out_of_domain_steps == 2


def test_extrapolation_can_be_forbidden(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load(out_of_domain="error")
    model.price(step((0, 4096)))
    message = "profile 'synthetic': num_tokens = 4097 is outside the measured 1 to 4096"
    with pytest.raises(OutOfDomainError, match=message):
        model.price(step((0, 4097)))
    with pytest.raises(OutOfDomainError, match="decode_kv_tokens = 500009 is outside"):
        model.price(step((499_999, 1), count=10))


def test_steps_out_of_domain_are_counted_one_by_one(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load()
    model.price(step((499_996, 1), count=10))
    assert model.out_of_domain_steps == 6
    model.price(step(*[(1, 1)] * 257, count=5))
    assert model.out_of_domain_steps == 11


def test_terms_and_hinges_add_up(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    price = load().price(step((1500, 1)))
    assert price.parts["host_s"].tolist() == [pytest.approx(1e-3 + 2e-5)]
    expected = 0.005 + 1501 * 3e-8 + (1501 - 1000.5) * 1e-8
    assert price.parts["gpu_s"].tolist() == [pytest.approx(expected)]


def first(**fields: Any) -> Change:
    return lambda content: content["terms"][1].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            first(feature="num_req"),
            r"terms\.1: feature 'num_req' is not known \(did you mean 'num_r",
        ),
        (first(unit="tokens"), r"terms\.1: feature 'num_reqs' is in requests, not in 'tokens'"),
        (first(unit="ms"), r"'num_reqs' is in requests, not in 'ms'"),
        (first(seconds_per_unit=float("nan")), r"terms\.1\.seconds_per_unit: .*finite"),
        (
            first(seconds_per_unit=-1e-5),
            "'num_reqs' is not monotone: more of it costs less beyond 0",
        ),
        (first(points=[[1, 1], [2, 2]]), "give either seconds_per_unit or points"),
        (first(second_per_unit=1), r"not known \(did you mean 'seconds_per_unit'\?\)"),
        (lambda c: c["terms"].append(table((1, 1), (1, 2))), "first numbers must increase"),
        (lambda c: c["terms"].append(table((1, 2), (9, 1))), "'num_tokens' is not monotone"),
        (lambda c: c["domain"].pop("num_reqs"), "domain lacks feature 'num_reqs'"),
        (lambda c: c["domain"].update(num_samples=[0, 1]), "domain names 'num_samples', which no"),
        (lambda c: c["domain"].update(num_reqs=[2, 1]), "domain of 'num_reqs' is empty: 2"),
        (lambda c: c.update(schema_version=2), "schema_version: Input should be 1"),
        (lambda c: c.pop("measured_on"), "measured_on: Field required"),
        (lambda c: c.update(gpu="h100"), "measured with gpu 'h100', the configuration has 'h200'"),
        (lambda c: c.update(model="qwen3-8b"), "measured with model 'qwen3-8b'"),
    ],
)
def test_what_a_profile_may_not_say(
    load: Callable[..., ProfileCost], change: Change, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(change)


def test_a_hinge_may_take_back_no_more_than_there_is(load: Callable[..., ProfileCost]) -> None:
    def hinge(slope: float) -> Change:
        return lambda content: content["terms"][4].update(seconds_per_unit=slope)

    load(hinge(-3e-8))
    with pytest.raises(ConfigError, match=r"costs less beyond 1000\.5"):
        load(hinge(-3.1e-8))


def test_a_step_without_a_price_is_an_error(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load(terms=[table((64, 0.0), (128, 1.0))], domain={"num_tokens": [1, 128]})
    with pytest.raises(OutOfDomainError, match="gives a step of 3 tokens no time"):
        model.price(step((0, 3)))


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for content, message in (
        ("{", r"bad\.json:1:1: not JSON"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ("[]", "bad.json"),
        ("\ud800", "cannot read this profile"),
    ):
        bad.write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(ConfigError, match=message):
            load_profile(path=bad)
    with pytest.raises(ConfigError, match="cannot read this profile"):
        load_profile(path="missing.json", base_dir=tmp_path)
    with pytest.raises(ConfigError, match="either name or path"):
        load_profile()
    with pytest.raises(UnknownNameError, match="no profile is called 'x'"):
        load_profile("x")
