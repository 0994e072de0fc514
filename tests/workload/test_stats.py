"""Statistics of a trace: by hand, and the prefix-hit bound against a cache of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.segments import Segments, split_blocks, total_len
from simserve.types import TraceRequest
from simserve.workload.prefix_tree import PrefixTree
from simserve.workload.stats import LengthStats, read_columns


def request(
    arrival_s: float = 0.0, prompt: Segments = (("a", 10),), output_len: int = 1, **more: object
) -> TraceRequest:
    arguments: dict[str, object] = {"request_id": f"{arrival_s}", **more}
    return TraceRequest(
        arrival_s=arrival_s,
        prompt=prompt,
        output_len=output_len,
        **arguments,  # type: ignore[arg-type]
    )


def test_rate_variation_and_ties() -> None:
    stats = read_columns(request(t) for t in (2.0, 3.0, 3.0, 6.0)).stats()
    assert stats.num_requests == 4
    assert stats.span_s == 4
    assert stats.rate_rps == 0.75
    assert stats.num_ties == 1
    gaps = np.array([1, 0, 3])
    assert stats.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    # Arrivals in the four whole seconds: 1, 2, 0, 0.
    assert stats.iod == pytest.approx(np.var([1, 2, 0, 0]) / 0.75)


def test_poisson_arrivals_have_variation_and_dispersion_one() -> None:
    times_s = np.cumsum(np.random.default_rng(0).exponential(0.1, 20_000))
    stats = read_columns(request(t) for t in times_s.tolist()).stats()
    assert stats.gap_cv == pytest.approx(1, abs=0.03)
    assert stats.iod == pytest.approx(1, abs=0.1)


def test_what_is_not_defined_is_none() -> None:
    for times_s in ([3.0], [3.0, 3.0]):
        stats = read_columns(request(t) for t in times_s).stats()
        assert (stats.rate_rps, stats.gap_cv, stats.iod) == (None, None, None)
    with pytest.raises(ValueError, match="no requests"):
        read_columns([]).stats()


def test_length_statistics() -> None:
    stats = LengthStats.of(np.arange(1, 102))
    assert stats == LengthStats(mean=51.0, p50=51.0, p90=91.0, p99=100.0, max=101)


def test_salt_and_adapter_keep_prompts_apart_and_logprobs_look_nothing_up() -> None:
    tree = PrefixTree(block_size=4)
    assert tree.hit_len(request()) == 0
    assert tree.hit_len(request()) == 8
    assert tree.hit_len(request(cache_salt="s")) == 0
    assert tree.hit_len(request(lora_id=1)) == 0
    assert tree.hit_len(request(lora_id=1)) == 8
    assert tree.hit_len(request(prompt_logprobs=True)) == 0


@pytest.mark.parametrize(("one", "other"), [(-1, -2), (7, 7 + 2**61 - 1), (0, 2**61 - 1)])
def test_whole_numbers_that_python_hashes_alike_are_different_segments(
    one: int, other: int
) -> None:
    assert hash(one) == hash(other)
    tree = PrefixTree(block_size=4)
    for prompt in (((one, 10),), ((other, 10),)):
        assert tree.common_len(request(prompt=prompt)) == 0
    assert tree.common_len(request(prompt=((one, 10),), lora_id=one)) == 0
    assert tree.common_len(request(prompt=((one, 10),), lora_id=other)) == 0
    assert tree.common_len(request(prompt=((other, 10),))) == 10


def test_a_full_repeat_keeps_a_token_to_compute() -> None:
    tree = PrefixTree(block_size=16)
    assert [tree.hit_len(request(prompt=(("a", n),))) for n in (32, 32, 33)] == [0, 16, 32]


def test_literal_token_ids_are_compared_token_by_token() -> None:
    tree = PrefixTree(block_size=4)
    ids = tuple(range(100, 120))
    tree.hit_len(request(prompt=(("system", 6), (ids, 12))))
    other = (*ids[:9], 7, 7, 7)
    # The prompts agree in 6 + 9 tokens: three full blocks.
    assert tree.hit_len(request(prompt=(("system", 6), (other, 12)))) == 12


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=4),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_the_bound_is_what_a_cache_of_blocks_without_limit_finds(
    prompts: list[list[tuple[str, int]]], block_size: int, output_len: int
) -> None:
    tree = PrefixTree(block_size)
    seen: set[tuple[object, ...]] = set()
    for i, parts in enumerate(prompts):
        # Equal neighbours would be other tokens than one longer part; so it is for the tree.
        asked = request(float(i), tuple(parts), output_len)
        blocks = list(split_blocks(asked.prompt + asked.output_parts, block_size))
        num_computed = asked.prompt_len + asked.output_len - 1
        chains = [tuple(blocks[: k + 1]) for k in range(num_computed // block_size)]
        num_hits = 0
        while num_hits < len(chains) and chains[num_hits] in seen:
            num_hits += 1
        usable = min(num_hits, (total_len(parts) - 1) // block_size)
        assert tree.hit_len(asked) == usable * block_size
        seen.update(chains)
