"""Block identities: equal where vLLM v0.11.0's chained hashes are; gone when not needed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from simserve.kv.identity import Chain, IdentityTrie
from simserve.segments import Part
from simserve.types import MmItem, TraceRequest
from tests.kv.naive import block_keys, trace_requests


def identities(chain: Chain) -> list[tuple[int, int]]:
    """(stretch, index) of every block."""
    return [
        (id(stretch), index)
        for stretch, first, end in chain.between(0, chain.num_blocks)
        for index in range(first, end)
    ]


def golden() -> list[dict[str, Any]]:
    file = Path(__file__).parents[1] / "data" / "golden_functions.json.gz"
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        rows: list[dict[str, Any]] = json.load(stream)["block_hash_equality"]
    return rows


def recorded_request(request_id: str, row: dict[str, Any]) -> TraceRequest:
    prompt, output = tuple(row["prompt"]), tuple(row["out"])
    return TraceRequest(
        request_id=request_id,
        arrival_s=0.0,
        prompt=((prompt, len(prompt)),),
        output_len=len(output),
        output=((output, len(output)),),
        cache_salt=row["salt"],
        lora_id=row["lora"],
        mm_items=tuple(MmItem(*item) for item in row["mm"]),
    )


@pytest.mark.parametrize("case", golden(), ids=lambda c: f"{c['algo']}-{c['block_size']}")
def test_blocks_are_equal_where_the_recorded_hashes_are(case: dict[str, Any]) -> None:
    trie = IdentityTrie(case["block_size"], num_groups=1)
    seen: dict[int, tuple[int, int]] = {}
    for i, row in enumerate(case["requests"]):
        assert row["n_after_prompt"] == len(row["prompt"]) // case["block_size"]
        found = identities(trie.chain(recorded_request(str(i), row)))
        assert len(found) == len(row["blocks"])
        for number, identity in zip(row["blocks"], found, strict=True):
            assert seen.setdefault(number, identity) == identity, (i, number)
    assert len(seen) > 20
    assert len(set(seen.values())) == len(seen)


@settings(max_examples=150, deadline=None)
@given(requests=st.lists(trace_requests(), min_size=1, max_size=8), size=st.integers(1, 32))
def test_blocks_are_equal_where_whole_prefixes_are(requests: list[TraceRequest], size: int) -> None:
    """However a prefix is cut into parts; prompt and output count alike."""
    trie = IdentityTrie(size, num_groups=1)
    by_key: dict[Any, tuple[int, int]] = {}
    chains = []
    for request in requests:
        chain = trie.chain(request)
        chains.append(chain)
        keys = block_keys(request, size)
        assert chain.num_blocks == len(keys)
        for key, identity in zip(keys, identities(chain), strict=True):
            assert by_key.setdefault(key, identity) == identity
    assert len(set(by_key.values())) == len(by_key)
    for chain in chains:
        trie.release(chain)
    assert not any(trie.stretches)


def test_long_segments_cost_one_stretch() -> None:
    """A prompt of a million tokens is one step into the trie, not 62,500, and so is its output."""
    request = TraceRequest(
        request_id="r", arrival_s=0.0, prompt=(("system", 10**6),), output_len=10**6
    )
    chain = IdentityTrie(16, num_groups=1).chain(request)
    assert chain.num_blocks == 125_000
    assert len(chain.spans) == 1


def test_what_leaves_a_stretch_hangs_below_the_last_common_block() -> None:
    """Sooner, in another segment or in none, or later than the one that came first."""
    trie = IdentityTrie(4, num_groups=1)

    def spans(*prompt: Part) -> list[tuple[int, int]]:
        """(stretch, blocks), the stretches numbered as they came."""
        request = TraceRequest(request_id="r", arrival_s=0.0, prompt=prompt, output_len=0)
        return [(span.stretch.slot, span.num_blocks) for span in trie.chain(request).spans]

    assert spans(("a", 8), ("b", 8), ("c", 8)) == [(2, 6)]
    assert spans(("a", 8), ("b", 8), ("d", 8)) == [(2, 4), (3, 2)]
    assert spans(("a", 8), ("b", 4), ("c", 8)) == [(2, 3), (4, 2)]
    assert spans(("a", 8), ("b", 16), ("c", 8)) == [(2, 4), (5, 4)]
    assert spans(("a", 8), ("b", 12), ("c", 4)) == [(2, 4), (5, 1), (6, 1)]
    assert spans(("a", 8), ("b", 8), ("c", 20)) == [(2, 9)]
    assert spans(("a", 8), ("b", 8)) == [(2, 4)]


def test_identity_does_not_depend_on_hashes_of_numbers() -> None:
    """Tokens 1 and 257, and -1 and -2 (whose hashes are equal), are different tokens."""
    trie = IdentityTrie(4, num_groups=1)
    found = set()
    for token in (1, 257, -1, -2):
        literal = (0, 0, 0, token)
        request = TraceRequest(
            request_id=str(token), arrival_s=0.0, prompt=((literal, 4),), output_len=0
        )
        found.update(identities(trie.chain(request)))
    assert len(found) == 4


def with_items(prompt_len: int, *items: MmItem) -> list[tuple[int, int]]:
    """Identities of five blocks of 4, the same tokens however many are prompt."""
    request = TraceRequest(
        request_id="r",
        arrival_s=0.0,
        prompt=(((0,) * prompt_len, prompt_len),),
        output_len=20 - prompt_len,
        output=(((0,) * (20 - prompt_len), 20 - prompt_len),),
        mm_items=items,
    )
    return identities(ITEM_TRIE.chain(request))


ITEM_TRIE = IdentityTrie(4, num_groups=1)


def common(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    """Leading blocks that are equal."""
    return sum(a == b for a, b in zip(left, right, strict=True))


def test_an_item_that_ends_where_a_block_starts_counts_if_outputs_fill_the_block() -> None:
    item = MmItem("cat", 2, 6)  # blocks 0 and 1, up to their end
    assert common(with_items(8, item), with_items(11, item)) == 5
    assert common(with_items(12, item), with_items(20, item)) == 5
    assert common(with_items(11, item), with_items(12, item)) == 2


def test_of_several_items_in_a_block_that_outputs_fill_the_last_one_counts() -> None:
    cat, dog, bird = MmItem("cat", 4, 1), MmItem("dog", 5, 1), MmItem("bird", 4, 1)
    assert common(with_items(6, cat, dog), with_items(6, bird, dog)) == 5
    assert common(with_items(6, cat, dog), with_items(8, cat, dog)) == 1
    assert common(with_items(8, cat, dog), with_items(8, bird, dog)) == 1
    assert common(with_items(8, cat, dog), with_items(8, dog, cat)) == 5  # by their places


def test_all_items_count_in_a_first_block_that_the_prompt_does_not_fill() -> None:
    cat, dog, bird = MmItem("cat", 0, 1), MmItem("dog", 1, 1), MmItem("bird", 0, 1)
    assert common(with_items(3, cat, dog), with_items(4, cat, dog)) == 5
    assert common(with_items(3, cat, dog), with_items(3, bird, dog)) == 0
