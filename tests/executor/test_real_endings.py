"""A sampled request ends by the token that ends it, and later turns quote what it said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simserve.executor.real.decoder_shape import DecoderShape  # noqa: E402
from simserve.executor.real.outcomes import Outcome, Outcomes  # noqa: E402
from simserve.executor.real.tokens import TokenIds  # noqa: E402
from simserve.metrics.recorder import RunData  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from simserve.types import TraceRequest, output_segment  # noqa: E402
from tests.executor.served import Schedule, open_machine, request, serve  # noqa: E402
from tests.executor.test_real_outcomes import SCHEDULES  # noqa: E402
from tests.executor.test_real_sampling import REQUESTS, choice  # noqa: E402
from tests.executor.test_real_schedules import tiny  # noqa: E402


def outcomes_of(
    schedule: Schedule,
    requests: list[TraceRequest] = REQUESTS,
    shape: DecoderShape | None = None,
    device: str = "cpu",
    dtype: str = "float64",
    **settings: Any,
) -> tuple[dict[str, Outcome], RunData]:
    kept: list[Outcome] = []
    machine = open_machine(
        shape or tiny(), schedule, sampling=[choice(1, **settings)], device=device, dtype=dtype
    )
    _, data = serve(machine, schedule, requests, outcomes=Outcomes(kept.append))
    return {one.request_id: one for one in kept}, data


def until(ids: list[int], stops: set[int]) -> list[int]:
    """The tokens up to the first that stops, itself included."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in stops), ids)


def check(schedule: Schedule, by_eos: bool, **options: Any) -> RunData:
    """Requests get what they get without an end, as far as the token that ends them."""
    free, _ = outcomes_of(schedule, temperature=0.9, **options)
    stops = {free["r1"].token_ids[2], free["r4"].token_ids[0], free["r5"].token_ids[5]}
    shape = options.pop("shape", tiny())
    if by_eos:
        shape = replace(shape, eos_token_ids=tuple(stops))
    settings = {"ignore_eos": False} if by_eos else {"stop_token_ids": tuple(stops)}
    got, data = outcomes_of(schedule, shape=shape, temperature=0.9, **settings, **options)
    for name, outcome in got.items():
        expected = until(free[name].token_ids, stops)
        assert outcome.token_ids == expected
        assert outcome.finish_reason == ("length" if len(expected) == 6 else "stop")
    ended = [len(one.token_ids) for one in got.values()]
    assert data.num_stopped == sum(count < 6 for count in ended) >= 2
    assert data.times.num_tokens.tolist() == [
        len(got[one.request_id].token_ids) for one in REQUESTS
    ]
    return data


@pytest.mark.parametrize("by_eos", [True, False], ids=["eos", "stop_token_ids"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_token_ends_a_request(name: str, by_eos: bool) -> None:
    data = check(SCHEDULES[name], by_eos)
    assert data.requests.num_preemptions.sum() == 0 or name == "preempted"


@pytest.mark.gpu
def test_a_token_ends_a_request_on_a_gpu() -> None:
    check(Schedule(), True, shape=tiny(64), device="cuda", dtype="float32")


def test_end_of_sequence_is_a_token_like_others_if_it_is_ignored() -> None:
    free, _ = outcomes_of(Schedule(), temperature=0)
    shape = replace(tiny(), eos_token_ids=(free["r1"].token_ids[1],))
    got, _ = outcomes_of(Schedule(), shape=shape, temperature=0)
    assert {name: one.token_ids for name, one in got.items()} == {
        name: one.token_ids for name, one in free.items()
    }


def test_a_later_prompt_quotes_what_was_said() -> None:
    """And behind it, where the trace expected more, what the trace would have had there."""
    ids = TokenIds(97, replay=False)
    first = request("s/t0", 0.0, 5, 6)
    quoting = (*first.prompt, (output_segment("s/t0"), 6), ("s/t1/user", 3))
    expected = tokens(quoting, 97).tolist()
    expected[5:8] = [11, 12, 13]
    ids.add(first)
    ids.said(first, [11, 12, 13])
    ids.add(request("s/t1", 1.0, quoting, 4))
    assert ids.ids("s/t1").tolist() == expected


def test_turns_go_on_from_what_was_said() -> None:
    """With the prefix cache, which holds it, as without."""
    first = request("s/t0", 0.0, 20, 12)
    quoting = (*first.prompt, (output_segment("s/t0"), 12), ("s/t1/user", 3))
    second = request("s/t1", 1e9, quoting, 5)
    free, _ = outcomes_of(Schedule(), [first], temperature=0.9)
    stop = free["s/t0"].token_ids[8]
    runs = [
        outcomes_of(
            Schedule(block_size=8, caching=caching),
            [first, second],
            temperature=0.9,
            stop_token_ids=(stop,),
        )
        for caching in (True, False)
    ]
    (cached, data), (plain, _) = runs
    assert len(cached["s/t0"].token_ids) < 12
    assert cached["s/t1"].token_ids == plain["s/t1"].token_ids
    assert data.requests.cached_tokens[1] >= 24, "a block of the output is found"
