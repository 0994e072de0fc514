"""Profiles that ship: more work never takes less time on the same kernel path and graph size."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simserve.config.presets import load_gpu, load_model
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


def seconds(cost: ProfileCost, rows: Rows) -> float:
    return cost.price(run(rows)).durations_s[0]


def path(cost: ProfileCost, rows: Rows) -> object:
    """Kernel path, and graph size if there is one."""
    graphs, features = cost.profile.graphs, extract(run(rows), None)
    sizes = graphs.of_prefills if features.num_prefills else graphs.sizes
    padded = step_work(run(rows), features, sizes, None, {}).num_padded_tokens
    in_graph = padded <= sizes[-1]
    return features.num_prefills > 0, padded if in_graph else None


def run(rows: Rows) -> StepRun:
    plan = StepPlan(0)
    for i, (tokens, before) in enumerate(rows):
        plan.request_ids.append(str(i))
        plan.num_tokens.append(tokens)
        plan.starts.append(before)
        plan.samples.append(True)
    return StepRun(plan)
