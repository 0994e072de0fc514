"""Profiles that ship: more work never takes less time on the same kernel path and graph size."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simserve.config.presets import load_gpu, load_model
from simserve.cost.dealing import AttentionPlan, _cut
from simserve.cost.features import extract
from simserve.cost.profile import ProfileCost
from simserve.cost.step_work import step_work
from simserve.types import StepPlan, StepRun

Rows = list[tuple[int, int]]
"""Tokens, and tokens before them, of each request."""

contexts = st.integers(1, 2**18)
decodes = st.lists(st.tuples(st.just(1), contexts), max_size=100)
prefills = st.lists(st.tuples(st.integers(2, 2**14), st.integers(0, 2**17)), max_size=4)


@pytest.mark.parametrize("name", ["h200-llama-3.1-8b-vllm", "h200-llama-3.2-1b-vllm"])
@settings(max_examples=30)
@given(decodes, prefills, st.data())
def test_more_work_takes_no_less(name: str, ones: Rows, chunks: Rows, data: st.DataObject) -> None:
    """Far beyond what was measured, and of a model that was not: contexts, tokens, requests."""
    model = data.draw(st.sampled_from(["llama-3.1-8b", "llama-3.2-1b", "qwen3-32b"]))
    cost = ProfileCost(load_model(model), load_gpu("h200"), name=name)
    rows = ones + chunks
    assume(rows)
    at = data.draw(st.integers(0, len(rows) - 1))
    tokens, before = rows[at]
    longer = (tokens, before + data.draw(contexts)) if before else (tokens, before)
    larger = (tokens + data.draw(st.integers(1, 2000)), before) if tokens > 1 else (tokens, before)
    for more in (
        [*rows[:at], longer, *rows[at + 1 :]],
        [*rows[:at], larger, *rows[at + 1 :]],
        [*rows, (1, data.draw(contexts))],
    ):
        if path(cost, more) == path(cost, rows):
            assert seconds(cost, more) >= seconds(cost, rows) * (1 - 1e-12)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-32b"])
def test_more_work_takes_no_less_where_the_same_pieces_are_dealt_out(model: str) -> None:
    """Whether a context is longer, a prompt has more tokens, or one more request decodes.

    A context may be cut into fewer pieces when another one grows, or into as many of which the last
    is smaller: the kernels then take less time, and so does the price.
    """
    cost = ProfileCost(load_model(model), load_gpu("h200"), name="h200-llama-3.1-8b-simserve")
    rng = np.random.default_rng(5)
    compared = {"longer": 0, "cut": 0, "mixed": 0, "tokens": 0, "requests": 0}
    for _ in range(250):
        rows = drawn(rng)
        for kind, more in grown(rng, rows).items():
            if path(cost, more) != path(cost, rows):
                continue
            before, after = pieces(cost, rows), pieces(cost, more)
            if not all(map(is_no_smaller, after, before)):
                continue
            assert seconds(cost, more) >= seconds(cost, rows) * (1 - 1e-12), (rows, more)
            compared[kind] += 1
            compared["cut"] += any(len(one) > 1 for one in before)
            compared["mixed"] += not before
    assert min(compared.values()) > 20, compared


def is_no_smaller(after: list[int], before: list[int]) -> bool:
    """Whether there are as many pieces, each of which is at least as large."""
    return len(after) == len(before) and all(b >= a for a, b in zip(before, after, strict=True))


def drawn(rng: np.random.Generator) -> Rows:
    """Decodes of unlike contexts, behind some of them prompts or chunks of more than one tile."""
    number, median = int(rng.integers(1, 100)), np.exp(rng.uniform(2.0, 9.5))
    contexts = rng.lognormal(np.log(median), rng.uniform(0.0, 1.5), number)
    rows = [(1, int(one)) for one in contexts]
    if rng.random() < 0.4:
        new, before = rng.integers(5, 2000, 4), rng.integers(0, 20_000, 4)
        rows += list(zip(new.tolist(), before.tolist(), strict=True))[: rng.integers(1, 5)]
    return rows


def grown(rng: np.random.Generator, rows: Rows) -> dict[str, Rows]:
    """The first one grows by sixteen tokens at a time: by as many steps decodes are dealt out."""
    at = int(rng.integers(len(rows)))
    tokens, before = rows[at]
    longer = int(np.exp(rng.uniform(0.0, 8.0)))
    longer = longer if at else 16 * longer
    found = {
        "longer": [*rows[:at], (tokens, before + longer), *rows[at + 1 :]],
        "requests": [*rows, (1, int(np.exp(rng.uniform(0.0, 11.0))))],
    }
    if rows[-1][0] > 1:
        tokens, before = rows[-1]
        found["tokens"] = [*rows[:-1], (tokens + int(rng.integers(1, 500)), before)]
    return found


def pieces(cost: ProfileCost, rows: Rows) -> list[list[int]]:
    """Of each decode, the chunks that its context is cut into; nothing beside prefills."""
    if rows[-1][0] > 1 or any(tokens > 1 for tokens, _ in rows):
        return []
    plan, since = plan_of(cost), rows[0][1] % 16
    contexts = [max(before + 1 - since, 1) for _, before in rows]
    padded = step_work(run(rows), extract(run(rows), None), cost.profile.graphs.sizes, None)
    many = padded.num_padded_tokens >= plan.many_decodes_from
    split = plan.many_decodes if many else plan.few_decodes
    chunks = _cut(contexts, split, split.programs // 8)
    ends = list(accumulate(chunks))
    places = [0, *(ends.index(end) + 1 for end in accumulate(contexts))]
    return [chunks[first:end] for first, end in pairwise(places)]


def plan_of(cost: ProfileCost) -> AttentionPlan:
    assert cost.profile.attention_plan is not None
    return cost.profile.attention_plan


def seconds(cost: ProfileCost, rows: Rows) -> float:
    return cost.price(run(rows)).durations_s[0]


def path(cost: ProfileCost, rows: Rows) -> object:
    """Kernel path, and graph size if there is one; of known kernels, which variant."""
    graphs, features = cost.profile.graphs, extract(run(rows), None)
    sizes = graphs.of_prefills if features.num_prefills else graphs.sizes
    padded = step_work(run(rows), features, sizes, None).num_padded_tokens
    in_graph = padded <= sizes[-1]
    graph = padded if in_graph else None
    if cost.profile.attention_plan is None or not features.num_prefills:
        return features.num_prefills > 0, graph
    return True, graph, max(map(sum, rows)) >= plan_of(cost).long_from


def run(rows: Rows) -> StepRun:
    plan = StepPlan(0)
    for i, (tokens, before) in enumerate(rows):
        plan.request_ids.append(str(i))
        plan.num_tokens.append(tokens)
        plan.starts.append(before)
        plan.samples.append(True)
    return StepRun(plan)
