from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.cost.features import UNITS, Features, extract, query_key_pairs
from simserve.types import StepRun


def test_counts_of_a_mixed_step(step: Callable[..., StepRun]) -> None:
    run = step((9, 1), (0, 4), (99, 1), (16, 3))
    run.plan.num_shared_kv_tokens = 8
    assert extract(run) == Features(
        num_tokens=9,
        num_reqs=4,
        num_decodes=2,
        decode_kv_tokens=10 + 100,
        num_prefills=2,
        prefill_tokens=7,
        prefill_pairs=(1 + 2 + 3 + 4) + (17 + 18 + 19),
        prefill_kv_tokens=4 + 19,
        num_logits_rows=4,
        num_samples=4,
        shared_kv_tokens=8,
    )
    assert set(UNITS) == set(Features._fields)


def test_drafts_and_thrown_away_samples(step: Callable[..., StepRun]) -> None:
    run = step((9, 4), (9, 1), samples=False)
    features = extract(StepRun(replace(run.plan, draft_tokens={"0": [1, 2, 3]})))
    assert (features.num_logits_rows, features.num_samples) == (5, 0)


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@given(
    requests=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), max_size=6),
    k=st.integers(0, 5),
)
def test_counts_are_those_of_attention_masks(
    window: int | None,
    step: Callable[..., StepRun],
    requests: list[tuple[int, int]],
    k: int,
) -> None:
    """Query at position p sees keys max(0, p - window + 1) … p."""
    decode = pairs = read = 0
    for start, n in ((start + k * n, n) for start, n in requests):
        first = [max(0, p - window + 1) if window else 0 for p in range(start, start + n)]
        seen = sum(p - low + 1 for p, low in zip(range(start, start + n), first, strict=True))
        if n == 1:
            decode += seen
        else:
            pairs += seen
            read += start + n - first[0]
    moved = [(start + k * n, n) for start, n in requests]
    one = extract(step(*moved), window)
    assert (one.decode_kv_tokens, one.prefill_pairs, one.prefill_kv_tokens) == (decode, pairs, read)
    run = extract(step(*requests, count=k + 2), window)
    for name in ("decode_kv_tokens", "prefill_pairs", "prefill_kv_tokens"):
        value = getattr(run, name)
        assert (value if isinstance(value, int) else int(value[k])) == getattr(one, name)


@given(
    chunks=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    start=st.integers(0, 100_000),
    window=st.one_of(st.none(), st.integers(1, 8000)),
)
def test_pairs_do_not_depend_on_the_chunking(
    chunks: list[int], start: int, window: int | None
) -> None:
    pairs, at = 0, start
    for n in chunks:
        pairs += query_key_pairs(at, n, window)
        at += n
    assert pairs == query_key_pairs(start, sum(chunks), window)
    if window is None and start == 0:
        assert pairs == at * (at + 1) // 2
