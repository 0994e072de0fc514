"""Measuring samplers: each way of each kind of case is checked, and a wrong token is noticed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve.executor.real.bench import sample_calls  # noqa: E402
from simserve.executor.real.bench.kernel_cases import WAYS, choose_cases  # noqa: E402
from simserve.executor.real.bench.kernels import measure_kernels  # noqa: E402
from simserve.executor.real.bench.sample_calls import SampleInputs, torch_sample  # noqa: E402
from simserve.executor.real.bench.sample_cases import SampleCase  # noqa: E402
from simserve_kernels.sampling import SamplingPlan  # noqa: E402

SMALL = SamplingPlan(chunk=64, tile=128, capacity=64, scan=64, survey_warps=1)
GREEDY = {"temperature": 0}


@pytest.fixture(autouse=True)
def small_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sample_calls.sample
    monkeypatch.setattr(sample_calls, "sample", lambda *args: real(*args, plan=SMALL))


def case(*settings: dict[str, Any], **more: Any) -> SampleCase:
    return SampleCase(name="sample", batch=3, settings=settings, vocab_size=90, **more)


def measure(device: str, one: SampleCase) -> list[Any]:
    def timer(calls: Any) -> list[float]:
        return [float(len(calls))]

    return list(
        measure_kernels(
            [one], ways=WAYS, layouts=("nhd", "packed"), device=device, timer=timer, max_copies=2
        )
    )


@pytest.mark.parametrize(
    "one",
    [
        case(GREEDY),
        case({}, dtype="bfloat16"),
        case({"top_k": 50}, kind="peaked"),
        case({"top_p": 0.9}, kind="equal"),
        case({"min_p": 0.05}),
        case({"top_k": 50, "top_p": 0.9}),
        case(GREEDY, {"top_p": 0.9}),
    ],
    ids=lambda one: f"{one.settings} {one.kind} {one.dtype}",
)
def test_both_ways_give_a_checked_row(device: str, one: SampleCase) -> None:
    rows = measure(device, one)
    assert [(row.path, row.layout, row.failure) for row in rows] == [
        ("sampler", "", None),
        ("torch", "", None),
    ]
    assert {row.samples_us for row in rows} == {(2.0,)}
    assert rows[0].num_bytes == 3 * 90 * (2 if one.dtype == "bfloat16" else 4)


@pytest.mark.parametrize("settings", [GREEDY, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}])
def test_a_wrong_token_is_noticed(device: str, settings: dict[str, Any]) -> None:
    (inputs,) = SampleInputs.copies(case(settings), device, max_copies=1)
    right = inputs.call("sampler")()
    assert inputs.error(right) <= 1e-4
    least_likely = inputs.logits.argmin(-1)
    assert inputs.error(right._replace(tokens=least_likely)) == 1
    assert inputs.error(least_likely) == 1


def test_a_token_that_its_number_does_not_point_at_is_noticed(device: str) -> None:
    (inputs,) = SampleInputs.copies(case({}, kind="equal"), device, max_copies=1)
    right = inputs.call("sampler")()
    moved = right._replace(tokens=(right.tokens + 9) % 90)
    assert inputs.error(moved) > 0.05


def test_torch_draws_what_the_reference_keeps(device: str) -> None:
    settings = ({"top_p": 0.5}, {"top_p": 0.9}, GREEDY)
    (inputs,) = SampleInputs.copies(case(*settings), device, max_copies=1)
    assert inputs.error(torch_sample(inputs.logits, inputs.columns)) == 0


def test_cases_are_found_by_name() -> None:
    names = [one.name for one in choose_cases(["sample top_p*"])]
    assert names == [
        *(f"sample top_p b{batch}" for batch in (1, 64, 256)),
        *(f"sample top_p b64 {kind}" for kind in ("peaked", "equal", "bfloat16")),
    ]
