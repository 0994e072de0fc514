"""Our scheduler and an independent plain model of the same rules decide alike, in every field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simserve.fidelity.cases import load_case
from simserve.fidelity.conform import simulate_case
from tests.sched.random_cases import random_case
from tests.sched.reference import EngineWouldCrash, simulate

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
SMALL = ("g14", "g16", "g33", "g39", "g41", "g44", "g45", "g47", "g48", "g53", "g55", "g56", "g57")


def difference(expected: dict[str, Any], got: dict[str, Any]) -> str | None:
    """The first one. Mean times per output token may round differently in the last place."""
    last = None
    if expected["summary"]["end"] == "max_steps":
        # What is still in flight or has not arrived when a run is cut off is nobody's business.
        last = len(expected["steps"]) - 3
        expected = {**expected, "requests": [], "summary": {}}
        got = {**got, "requests": [], "summary": {}}
    for part, end in (("steps", last), ("requests", None)):
        for i, (want, have) in enumerate(
            zip(expected[part][:end], got[part][:end], strict=bool(not last))
        ):
            for key in sorted({*want, *have}):
                a, b = want.get(key), have.get(key)
                if key == "k":  # which kind each has; in which order they are listed is form
                    a, b = dict(a or ()), dict(b or ())
                if key == "tpot" and a is not None and b is not None:
                    a = b = abs(a - b) < 2e-9 or (a, b)
                if a != b:
                    return f"{part} {i}, {key}: {a} in the plain model, {b} in ours"
    if expected["summary"] != got["summary"]:
        return f"summary: {expected['summary']} in the plain model, {got['summary']} in ours"
    return None


@pytest.mark.parametrize("name", SMALL)
def test_the_plain_model_itself_meets_recorded_cases(name: str) -> None:
    (path,) = GOLDEN.glob(f"{name}*.json.gz")
    case = load_case(path)
    assert difference(case, simulate(case)) is None


@pytest.mark.parametrize("start", range(0, 360, 30))
def test_random_cases_agree(start: int) -> None:
    compared = 0
    for seed in range(start, start + 30):
        case = random_case(seed)
        try:
            expected = simulate(case)
        except EngineWouldCrash:
            continue
        compared += 1
        found = difference(expected, simulate_case(case))
        assert found is None, f"random_case({seed}): {found}"
    assert compared > 20


def test_random_cases_reach_the_rare_rules() -> None:
    summaries = []
    for seed in range(120):
        try:
            summaries.append(simulate(random_case(seed))["summary"])
        except EngineWouldCrash:
            continue
    assert {summary["end"] for summary in summaries} == {"done", "deadlock", "max_steps"}
    for key in ("ghosts", "preemptions", "resumed", "prefix_hits"):
        assert sum(summary[key] > 0 for summary in summaries) >= 3, key
    assert any(succeeded for s in summaries for _, succeeded in s.get("resets", ()))
