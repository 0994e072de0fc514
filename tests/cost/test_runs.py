"""What every cost model promises, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.cost.profile import ProfileCost
from simserve.cost.step_work import padded
from simserve.protocols import CostModel
from simserve.types import StepRun
from tests.cost.columns import column

KINDS = [
    "formula",
    "roofline",
    "roofline-window",
    "roofline-experts",
    "profile",
    "profile-overlaps",
    "profile-window",
    "profile-shipped",
    "profile-dealt",
    "profile-dealt-window",
]
PLAIN_KINDS = [kind for kind in KINDS if "dealt" not in kind]
"""Those whose kernels cut no contexts: `test_monotone` has the others, which take fewer chunks of
some contexts if another one grows."""
REQUESTS = st.lists(
    st.tuples(st.integers(0, 40_000), st.one_of(st.just(1), st.integers(1, 9000))),
    min_size=1,
    max_size=12,
)


def price(model: CostModel, run: StepRun) -> float:
    return float(model.price(run).durations_s[0])


@pytest.mark.parametrize("kind", KINDS)
@given(requests=REQUESTS, count=st.integers(2, 40))
@settings(max_examples=40)
def test_a_run_costs_bit_for_bit_what_its_steps_cost(
    kind: str,
    models: dict[str, CostModel],
    step: Callable[..., StepRun],
    requests: list[tuple[int, int]],
    count: int,
) -> None:
    at_once = models[kind].price(step(*requests, count=count))
    durations_s = column(at_once.durations_s, count)
    parts = {part: column(values, count) for part, values in at_once.parts.items()}
    for k in range(count):
        alone = models[kind].price(step(*[(start + k * n, n) for start, n in requests]))
        assert column(alone.durations_s) == [durations_s[k]]
        assert {part: column(value) for part, value in alone.parts.items()} == {
            part: [values[k]] for part, values in parts.items()
        }


@pytest.mark.parametrize("kind", KINDS)
@given(requests=REQUESTS)
@settings(max_examples=40)
def test_parts_add_up_and_time_passes(
    kind: str,
    models: dict[str, CostModel],
    step: Callable[..., StepRun],
    requests: list[tuple[int, int]],
) -> None:
    result = models[kind].price(step(*requests))
    parts = [column(part)[0] for part in result.parts.values()]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(float(result.durations_s[0]), rel=1e-12, abs=0)
    assert result.durations_s[0] > 0


def have_graphs_alike(model: CostModel, *steps: list[tuple[int, int]]) -> bool:
    """Whether steps run on graphs of one size, or sizes make no difference of their own."""
    if not isinstance(model, ProfileCost) or not model.profile.size_factors:
        return True
    sizes = model.profile.graphs.sizes
    tokens = [sum(n for _, n in requests) for requests in steps]
    return len({padded(n, sizes) if n <= sizes[-1] else None for n in tokens}) == 1


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@given(requests=REQUESTS, data=st.data())
@settings(max_examples=40)
def test_more_tokens_context_or_requests_never_cost_less(
    kind: str,
    models: dict[str, CostModel],
    step: Callable[..., StepRun],
    requests: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    model, base = models[kind], price(models[kind], step(*requests))
    i = data.draw(st.integers(0, len(requests) - 1))
    more = data.draw(st.integers(1, 3000))
    start, n = requests[i]
    tolerance = 1 + 1e-12
    longer = [*requests[:i], (start + more, n), *requests[i + 1 :]]
    assert price(model, step(*longer)) * tolerance >= base
    if have_graphs_alike(model, requests, [*requests, (start, 1)]):
        assert price(model, step(*requests, (start, 1))) * tolerance >= base
    # One token and several take different kernels, so only prefills are compared with each other.
    if n > 1:
        wider = [*requests[:i], (start, n + more), *requests[i + 1 :]]
        if not have_graphs_alike(model, requests, wider):
            return
        assert price(model, step(*wider)) * tolerance >= base


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_tokens_costs_nothing(
    kind: str, models: dict[str, CostModel], step: Callable[..., StepRun]
) -> None:
    for run in (step(), step((5, 0)), step(count=3)):
        result = models[kind].price(run)
        assert column(result.durations_s, run.count) == [0.0] * run.count
        assert all(column(part, run.count) == [0.0] * run.count for part in result.parts.values())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_the_size_of_the_pool_have_no_price(
    kind: str, models: dict[str, CostModel], step: Callable[..., StepRun]
) -> None:
    """Block ids from a small and from a large pool, few and many of them."""
    run = step((1000, 1), (0, 600))
    prices = [
        price(models[kind], StepRun(replace(run.plan, new_blocks={"1": (blocks,)})))
        for blocks in ((), range(1, 39), range(900_000, 900_038), [7])
    ]
    assert len(set(prices)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_slow_down_as_their_context_grows(
    kind: str, models: dict[str, CostModel], step: Callable[..., StepRun]
) -> None:
    run = step(*[(2000, 1)] * 64, count=3000)
    durations = column(models[kind].price(run).durations_s, 3000)
    assert all(a <= b for a, b in pairwise(durations))
    if kind.endswith("-window"):
        assert durations[2500] == durations[2999] > durations[0], "beyond the window of 4096"
    else:
        assert durations[2999] > durations[2500]
