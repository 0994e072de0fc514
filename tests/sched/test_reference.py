"""Our scheduler and an independent plain model of the same rules decide alike, in every field."""

from __future__ import annotations

from typing import Any

import pytest

from simserve.fidelity.conform.check import simulate_case
from tests.golden.cases import load
from tests.sched.random_cases import random_case
from tests.sched.reference import EngineWouldCrash, simulate

SMALL = ("g14", "g16", "g33", "g39", "g41", "g44", "g45", "g47", "g48", "g53", "g55", "g56", "g57")


def difference(expected: dict[str, Any], got: dict[str, Any]) -> str | None:
    """The first one. Mean times per output token may round differently in the last place."""
    last = None
    if "max_steps" in (expected["summary"]["end"], got["summary"]["end"]):
        # What is still in flight or has not arrived when a run is cut off is nobody's business.
        last = min(len(expected["steps"]), len(got["steps"])) - 3
        expected = {**expected, "requests": [], "summary": {}}
        got = {**got, "requests": [], "summary": {}}
    for part, end in (("steps", last), ("requests", None)):
        wanted, had = expected[part][:end], got[part][:end]
        for i, (want, have) in enumerate(zip(wanted, had, strict=False)):
            for key in sorted({*want, *have}):
                a, b = want.get(key), have.get(key)
                if key == "k":  # which kind each has; in which order they are listed is form
                    a, b = dict(a or ()), dict(b or ())
                if key == "tpot" and a is not None and b is not None:
                    a = b = abs(a - b) < 2e-9 or (a, b)
                if a != b:
                    return f"{part} {i}, {key}: {a} in the plain model, {b} in ours"
        if len(wanted) != len(had):
            return f"{len(wanted)} {part} in the plain model, {len(had)} in ours"
    if expected["summary"] != got["summary"]:
        return f"summary: {expected['summary']} in the plain model, {got['summary']} in ours"
    return None


@pytest.mark.parametrize("name", SMALL)
def test_the_plain_model_itself_meets_recorded_cases(name: str) -> None:
    case = load(name)
    assert difference(case, simulate(case)) is None


@pytest.mark.parametrize("start", range(0, 240, 30))
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
    for seed in range(80):
        try:
            summaries.append(simulate(random_case(seed))["summary"])
        except EngineWouldCrash:
            continue
    assert {summary["end"] for summary in summaries} == {"done", "deadlock", "max_steps"}
    for key in ("ghosts", "preemptions", "resumed", "prefix_hits"):
        assert sum(summary[key] > 0 for summary in summaries) >= 3, key
    assert any(succeeded for s in summaries for _, succeeded in s.get("resets", ()))


def small_case(prompts: list[int], outputs: list[int], **config: Any) -> dict[str, Any]:
    """Requests that arrive together and share nothing."""
    base = random_case(0)["config"]
    plain = {
        "block_size": 4,
        "num_gpu_blocks": 30,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 32,
        "long_prefill_token_threshold": 0,
        "max_num_partial_prefills": 1,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "policy": "fcfs",
        "async_scheduling": False,
        "spec": None,
        "kv_groups": None,
    }
    requests = [
        {"id": i, "t": 0.0, "prompt": [[1000 + i, length]], "out": output}
        for i, (length, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return {
        "format": 1,
        "config": {**base, **plain, **config},
        "workload": {"requests": requests},
    }


def test_the_last_token_of_a_prompt_of_max_model_len_is_never_scheduled_in_a_chunk() -> None:
    case = small_case([32], [1], max_num_batched_tokens=31)
    got = simulate_case(case)
    assert [step["n"] for step in got["steps"]] == [[31], []]
    assert got["summary"]["end"] == "deadlock"
    assert difference(simulate(case), got) is None


def test_lookahead_slots_are_kept_before_the_drafter_first_runs() -> None:
    # Near max_model_len the drafter is not run for anybody; the slots are kept all the same.
    spec = {"method": "eagle", "num": 4, "accept": [1, 1], "draft_len": [1, 1]}
    case = small_case([29, 4], [20, 9], spec=spec)
    got = simulate_case(case)
    assert got["steps"][1]["b"] == [[1, [10, 2]]]
    assert difference(simulate(case), got) is None
