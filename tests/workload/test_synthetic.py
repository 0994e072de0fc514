"""Synthetic open-loop workloads: exact counts, shared prefixes, one random stream a purpose."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from simserve.types import TraceRequest
from simserve.workload.arrivals import ConstantArrivals, PoissonArrivals
from simserve.workload.lengths import (
    ConstantLength,
    IndependentLengths,
    LognormalLength,
    UniformLength,
)
from simserve.workload.prefix_tree import PrefixTree
from simserve.workload.synthetic import (
    RequestClass,
    SharedPrefix,
    Synthetic,
    apportion,
    generate,
)

CHAT = IndependentLengths(
    prompt_len=LognormalLength(mean=1005, sigma=0.8, min=16, max=6000),
    output_len=LognormalLength(mean=250.75, sigma=0.7, min=4, max=2000),
)
TINY = IndependentLengths(prompt_len=ConstantLength(value=32), output_len=ConstantLength(value=8))


def chat(num_requests: int = 10_000, seed: int = 0) -> Synthetic:
    return Synthetic(
        num_requests=num_requests,
        arrival=PoissonArrivals(rate=6.5),
        classes=(RequestClass(lengths=CHAT),),
        seed=seed,
    )


def test_the_chat_workload_has_the_means_that_were_asked_for() -> None:
    requests = list(generate(chat()))
    assert len(requests) == 10_000
    # Four standard errors, plus what clipping takes away (below 0.5 %).
    prompts = np.array([r.prompt_len for r in requests])
    outputs = np.array([r.output_len for r in requests])
    assert abs(prompts.mean() - 1005) < 4 * prompts.std() / 100 + 5
    assert abs(outputs.mean() - 250.75) < 4 * outputs.std() / 100 + 1.5
    assert prompts.min() >= 16
    assert prompts.max() <= 6000
    assert requests[0].arrival_s == 0
    assert 9_999 / requests[-1].arrival_s == pytest.approx(6.5, rel=0.04)


def test_same_seed_same_requests_in_every_process() -> None:
    code = (
        "import hashlib\n"
        "from simserve.workload.arrivals import PoissonArrivals\n"
        "from simserve.workload.lengths import *\n"
        "from simserve.workload.synthetic import *\n"
        "lengths = IndependentLengths(prompt_len=UniformLength(min=1, max=99),"
        " output_len=ZipfLength(alpha=1, min=2, max=50))\n"
        "spec = Synthetic(num_requests=300, arrival=PoissonArrivals(rate=2),"
        " classes=(RequestClass(lengths=lengths),), seed=7,"
        " shared_prefix=SharedPrefix(num_groups=3, prefix_len=ConstantLength(value=8)))\n"
        "print(hashlib.sha256(repr(list(generate(spec))).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


def test_another_seed_changes_every_stream() -> None:
    one, two = (list(generate(chat(500, seed))) for seed in (0, 1))
    assert [r.arrival_s for r in one] != [r.arrival_s for r in two]
    assert [r.prompt_len for r in one] != [r.prompt_len for r in two]
    assert [r.output_len for r in one] != [r.output_len for r in two]


def test_changing_one_distribution_leaves_the_others_alone() -> None:
    other = IndependentLengths(prompt_len=UniformLength(min=1, max=9), output_len=CHAT.output_len)
    spec = Synthetic(
        num_requests=500,
        arrival=PoissonArrivals(rate=6.5),
        classes=(RequestClass(lengths=other),),
        shared_prefix=SharedPrefix(num_groups=2, prefix_len=UniformLength(min=1, max=9)),
    )
    one, two = list(generate(chat(500))), list(generate(spec))
    assert [r.arrival_s for r in one] == [r.arrival_s for r in two]
    assert [r.output_len for r in one] == [r.output_len for r in two]
    assert [r.prompt_len for r in one] != [r.prompt_len for r in two]


def test_a_longer_workload_begins_like_a_shorter_one() -> None:
    short = list(generate(chat(100)))
    assert list(islice(generate(chat(70_000)), 100)) == short


def test_requests_are_made_as_they_are_asked_for() -> None:
    class Counted(ConstantArrivals):
        num_chunks = 0

        def times(
            self, rng: np.random.Generator, num_requests: int
        ) -> Iterator[NDArray[np.float64]]:
            for chunk in super().times(rng, num_requests):
                Counted.num_chunks += 1
                yield chunk

    spec = Synthetic(
        num_requests=10**6, arrival=Counted(rate=1), classes=(RequestClass(lengths=TINY),)
    )
    assert next(generate(spec)).request_id == "r0"
    assert Counted.num_chunks == 1


def test_weights_and_counts_give_exact_totals() -> None:
    classes = (
        RequestClass(lengths=TINY, name="long", count=10, priority=1),
        RequestClass(lengths=TINY, name="a", weight=1),
        RequestClass(lengths=TINY, name="b", weight=2),
    )
    spec = Synthetic(num_requests=110, arrival=ConstantArrivals(rate=1), classes=classes)
    requests = list(generate(spec))
    assert Counter(r.class_ for r in requests) == {"long": 10, "a": 33, "b": 67}
    assert {r.priority for r in requests if r.class_ == "long"} == {1}
    # Mixed, not one class after the other.
    assert len({r.class_ for r in requests[:30]}) == 3


def test_the_number_of_requests_may_follow_from_counts_or_groups() -> None:
    counted = (RequestClass(lengths=TINY, count=3), RequestClass(lengths=TINY, count=4))
    assert Synthetic(arrival=ConstantArrivals(rate=1), classes=counted).total == 7
    grouped = Synthetic(
        arrival=ConstantArrivals(rate=1),
        classes=(RequestClass(lengths=TINY),),
        shared_prefix=SharedPrefix(
            num_groups=3, prompts_per_group=5, prefix_len=ConstantLength(value=16)
        ),
    )
    assert len(list(generate(grouped))) == 15


@given(st.integers(0, 10**6), st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_apportioned_parts_add_up_and_stay_near_their_share(
    total: int, weights: list[float]
) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-6


def prefixed(num_requests: int, num_groups: int, zipf_alpha: float = 0.0) -> list[TraceRequest]:
    return list(
        generate(
            Synthetic(
                num_requests=num_requests,
                arrival=ConstantArrivals(rate=1),
                classes=(RequestClass(lengths=TINY),),
                shared_prefix=SharedPrefix(
                    num_groups=num_groups,
                    zipf_alpha=zipf_alpha,
                    prefix_len=ConstantLength(value=32),
                ),
            )
        )
    )


def test_a_prefix_stands_before_the_prompt_and_is_all_that_is_shared() -> None:
    requests = prefixed(2, 1)
    assert [r.prompt_len for r in requests] == [64, 64]
    tree = PrefixTree(block_size=16)
    assert [tree.hit_len(r) for r in requests] == [0, 32]


def test_ten_requests_over_three_prefixes_stay_ten() -> None:
    counts = Counter(r.prompt[0] for r in prefixed(10, 3))
    assert sorted(counts.values()) == [3, 3, 4]


def test_zipf_groups_fall_off_with_their_rank() -> None:
    counts = Counter(r.prompt[0][0] for r in prefixed(1100, 3, zipf_alpha=1.0))
    assert counts == {"prefix0": 600, "prefix1": 300, "prefix2": 200}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: chat(0), "num_requests"),
        (lambda: chat(seed=-1), "seed"),
        (lambda: RequestClass(lengths=TINY, weight=-1), "weight"),
        (lambda: RequestClass(lengths=TINY, weight=float("nan")), "weight"),
        (lambda: RequestClass(lengths=TINY, count=-1), "count"),
        (lambda: SharedPrefix(num_groups=0, prefix_len=ConstantLength(value=1)), "num_groups"),
        (
            lambda: SharedPrefix(
                num_groups=1, prefix_len=ConstantLength(value=1), zipf_alpha=float("nan")
            ),
            "zipf_alpha",
        ),
        (
            lambda: SharedPrefix(
                num_groups=1, prefix_len=ConstantLength(value=1), prompts_per_group=0
            ),
            "prompts_per_group",
        ),
        (
            lambda: Synthetic(
                arrival=ConstantArrivals(rate=1), classes=(RequestClass(lengths=TINY),)
            ),
            "num_requests",
        ),
        (
            lambda: Synthetic(
                num_requests=4,
                arrival=ConstantArrivals(rate=1),
                classes=(RequestClass(lengths=TINY, count=5),),
            ),
            "counts",
        ),
        (
            lambda: Synthetic(
                num_requests=4,
                arrival=ConstantArrivals(rate=1),
                classes=(RequestClass(lengths=TINY, weight=0),),
            ),
            "counts",
        ),
        (
            lambda: Synthetic(num_requests=1, arrival=ConstantArrivals(rate=1), classes=()),
            "classes",
        ),
    ],
)
def test_bad_values_are_named(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=field):
        make()
