"""With real drafts that the model verifies, requests get the tokens that they get without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from simserve.executor.drafts import DraftWindow  # noqa: E402
from simserve.executor.ngram import NgramProposer  # noqa: E402
from simserve.executor.real.attention import AttentionPath  # noqa: E402
from simserve.executor.real.choices import SamplingChoice  # noqa: E402
from simserve.executor.real.outcomes import Outcome, Outcomes  # noqa: E402
from simserve.executor.real.speculation import LookupDrafts  # noqa: E402
from simserve.metrics.recorder import RunData  # noqa: E402
from simserve.types import StepPlan, TraceRequest  # noqa: E402
from tests.executor.served import Schedule, open_machine, serve  # noqa: E402
from tests.executor.test_real_sampling import choice  # noqa: E402
from tests.executor.test_real_schedules import (  # noqa: E402
    REQUESTS,
    recomputed,
    schedules,
    sharpen,
    tiny,
    workloads,
)


class KnowingDrafts:
    """Drafts from the tokens that requests will get, some of them spoilt: any number is right."""

    def __init__(self, expected: dict[str, list[int]], k: int, max_model_len: int) -> None:
        self._expected = expected
        self._k = k
        self._window = DraftWindow(k, max_model_len)

    def draft(self, plan: StepPlan, emitted: Sequence[int], known: Any) -> Any:
        if not self._window.fits(plan):
            return None
        drafts = {}
        for request_id, count in zip(plan.request_ids, emitted, strict=True):
            so_far = len(known.outcomes.of(request_id).token_ids)
            right = self._expected[request_id][so_far : so_far + self._k] if count else []
            spoilt = (7 * so_far + len(request_id)) % (self._k + 1)
            drafts[request_id] = [
                (token + (place == spoilt)) % 53 for place, token in enumerate(right)
            ]
        return drafts


def speculated(
    schedule: Schedule,
    requests: Sequence[TraceRequest],
    k: int,
    sampling: Sequence[SamplingChoice] = (),
    quirks: Any = "fixed",
    knows: bool = False,
    **options: Any,
) -> tuple[dict[str, Outcome], RunData]:
    kept: list[Outcome] = []
    path = AttentionPath(schedule.attention, schedule.kv_layout, schedule.mixed, k)
    shape = options.pop("shape", tiny())
    machine = open_machine(shape, schedule, path=path, sampling=sampling, **options)
    sharpen(machine.decoder)
    proposer = NgramProposer(1, 3, k, schedule.max_model_len, quirks)
    drafts: Any = LookupDrafts(proposer)
    if knows:
        expected = {one.request_id: recomputed(shape, one) for one in requests}
        drafts = KnowingDrafts(expected, k, schedule.max_model_len)
    _, data = serve(
        machine,
        schedule,
        requests,
        outcomes=Outcomes(kept.append),
        speculation=drafts,
    )
    return {one.request_id: one for one in kept}, data


@settings(max_examples=15)
@given(
    schedule=schedules,
    requests=workloads(),
    spare_blocks=st.integers(0, 8),
    k=st.integers(1, 4),
    quirks=st.sampled_from(["fixed", "as_engine"]),
    knows=st.booleans(),
)
def test_greedy_tokens_are_those_without_drafts(
    schedule: Schedule,
    requests: list[TraceRequest],
    spare_blocks: int,
    k: int,
    quirks: str,
    knows: bool,
) -> None:
    longest = max(one.prompt_len + one.output_len for one in requests) + k
    changed = {
        "num_gpu_blocks": -(-longest // schedule.block_size) + 1 + spare_blocks,
        "max_num_batched_tokens": max(schedule.max_num_batched_tokens, schedule.max_num_seqs),
        "plans_ahead": False,
    }
    schedule = Schedule(**{**vars(schedule), **changed})
    got, _ = speculated(schedule, requests, k, quirks=quirks, knows=knows)
    for one in requests:
        assert got[one.request_id].token_ids == recomputed(tiny(), one)


@pytest.mark.parametrize("num_gpu_blocks", [64, 14])
def test_drawn_tokens_are_those_without_drafts(num_gpu_blocks: int) -> None:
    """Drafts are right where they are what is drawn anyway, with the place's random numbers."""
    schedule = Schedule(num_gpu_blocks=num_gpu_blocks, block_size=4, max_num_batched_tokens=20)
    sampling = [choice(1, temperature=0.3), choice(1, top_p=0.5), choice(1, min_p=0.2)]
    got, data = speculated(schedule, REQUESTS, 3, sampling)
    kept: list[Outcome] = []
    machine = open_machine(tiny(), schedule, sampling=sampling)
    sharpen(machine.decoder)
    serve(machine, schedule, REQUESTS, outcomes=Outcomes(kept.append))
    assert {name: one.token_ids for name, one in got.items()} == {
        one.request_id: one.token_ids for one in kept
    }
    assert (data.requests.num_preemptions.sum() > 0) == (num_gpu_blocks < 64)


@pytest.mark.gpu
@pytest.mark.parametrize("max_num_batched_tokens", [9, 64])
def test_tokens_on_a_gpu_are_those_without_drafts(max_num_batched_tokens: int) -> None:
    schedule = Schedule(max_num_batched_tokens=max_num_batched_tokens)
    shape, sampling = tiny(64), [choice(1, temperature=0), choice(1, top_p=0.9)]
    on_gpu = {"shape": shape, "device": "cuda", "dtype": "float32"}
    got, data = speculated(schedule, REQUESTS, 3, sampling, **on_gpu)
    expected, _ = speculated(schedule, REQUESTS, 3, sampling, shape=shape)
    assert {name: one.token_ids for name, one in got.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    assert data.spec_decode.num_drafts > 0


def test_some_drafts_are_accepted() -> None:
    """Or the tests above would hold without any being verified."""
    _, data = speculated(Schedule(), REQUESTS, 3, knows=True)
    found = data.spec_decode
    assert min(found.accepted_per_pos) > 2
    assert sum(found.accepted_per_pos) < sum(found.draft_tokens_per_pos)
    assert data.steps.num_steps < 10
    steps = data.steps
    assert steps.parts["draft_s"].sum() == pytest.approx(found.draft_s)
    parts = [steps.parts[name] for name in steps.parts if name != "first_shape"]
    assert sum(parts) == pytest.approx(steps.duration_s)


def test_a_stop_among_accepted_drafts_ends_a_request() -> None:
    free, _ = speculated(Schedule(), REQUESTS, 3, [choice(1, temperature=0)])
    stop = free["e"].token_ids[5]
    ends = [choice(1, temperature=0, stop_token_ids=(stop,))]
    got, data = speculated(Schedule(), REQUESTS, 3, ends, knows=True)
    assert data.num_stopped > 0
    for name, one in got.items():
        ids = free[name].token_ids
        end = ids.index(stop) + 1 if stop in ids else len(ids)
        assert one.token_ids == ids[:end]
