"""How attention is dealt out to a GPU: by hand, and recounted program by program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from operator import getitem

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from simserve.config.presets import load_model
from simserve.cost.dealing import (
    AttentionPlan,
    Dealer,
    Dealt,
    SplitDecodes,
    Tiles,
    _busiest,
    _cut,
)
from simserve.cost.profile_file import load_profile
from simserve.types import ModelShape, StepRun

Rows = list[tuple[int, int]]
"""Tokens computed before, and new ones, of each request."""

LLAMA = load_model("llama-3.1-8b")
"""Eight KV heads, each with four query heads."""
MODELS = {
    "llama": LLAMA,
    "window": load_model("mistral-7b-v0.1"),
    "one KV head": replace(LLAMA, num_key_value_heads=1),
    "group of 16": replace(LLAMA, num_key_value_heads=2),
    "no groups, small heads": replace(LLAMA, num_key_value_heads=32, head_dim=64),
    "odd": replace(LLAMA, num_attention_heads=15, num_key_value_heads=5, sliding_window=100),
    "more heads than programs": replace(LLAMA, num_attention_heads=600, num_key_value_heads=600),
}
sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=200)
starts = st.one_of(st.integers(0, 40), st.integers(0, 20_000))
decodes = st.lists(st.tuples(starts, st.just(1)), min_size=1, max_size=80)
prefills = st.lists(st.tuples(starts, st.integers(2, 700)), min_size=1, max_size=3)


def shipped() -> AttentionPlan:
    plan = load_profile("h200-llama-3.1-8b-simserve").attention_plan
    assert plan is not None
    return plan


PLAN = shipped()


@pytest.fixture
def dealer() -> Dealer:
    return Dealer(PLAN, LLAMA)


@pytest.mark.parametrize(
    ("where", "largest"),
    [
        (("few_decodes", "tile"), 2**16),
        (("many_decodes", "programs"), 2**16),
        (("few_decodes", "fine_tokens"), 10**9),
        (("many_decodes_from",), 10**9),
        (("short", "tall", "rows"), 2**16),
        (("long", "whole", "keys"), 2**16),
        (("long", "tall", "programs"), 2**16),
        (("long_from",), 10**9),
    ],
)
def test_a_plan_is_one_that_a_gpu_could_have(where: tuple[str, ...], largest: int) -> None:
    document = PLAN.model_dump()
    *outer, last = where
    place = reduce(getitem, outer, document)
    for value, refused in ((largest, False), (largest + 1, True), (1, False), (0, True)):
        place[last] = value
        with pytest.raises(ValidationError) if refused else nullcontext() as error:
            AttentionPlan(**document)
        if refused:
            [one] = error.value.errors()
            assert (one["loc"], one["input"]) == (where, value)


def test_alike_contexts_fill_a_round_or_begin_another(
    dealer: Dealer, step: Callable[..., StepRun]
) -> None:
    """A GPU that runs 264 programs has room for 33 contexts of 8 KV heads."""
    one, two = (dealer.deal(step(*[(512, 1)] * n), 40) for n in (33, 34))
    assert one == Dealt(33, 0, 0, 0, 0, 0, 0, 0)
    assert two == Dealt(34, (2 * 33 - 34) * 513, 0, 0, 0, 0, 0, 0)


def test_a_long_context_among_short_ones_is_cut(
    dealer: Dealer, step: Callable[..., StepRun]
) -> None:
    """256 tiles of 288 in all, for 66 parts of the GPU: chunks of 5 tiles, and one of what is left.

    The short ones have 4 tiles and stay whole; 60 chunks are less than a round.
    """
    long, short = (16_383 // 16 * 16, 1), (240, 1)
    found = dealer.deal(step(*[short] * 4, long, *[short] * 4), 16)
    read = 8 * 241 + 16_369
    assert found == Dealt(8 + 52, 66 * 320 - read, 0, 0, 0, 0, 0, 0)


def test_a_context_alone_is_cut_to_fill_the_gpu(
    dealer: Dealer, step: Callable[..., StepRun]
) -> None:
    """Into single tiles, then into eight if that fills it, at last so that two rounds are full."""
    chunks = {
        start + 1: dealer.deal(step((start, 1)), 1).num_chunks
        for start in (0, 48, 1008, 66 * 64 - 16, 66 * 512 - 16, 99 * 512 - 16, 128_000)
    }
    assert list(chunks.values()) == [1, 1, 16, 66, 66, 99, 126]


def test_a_decode_beside_a_chunk_is_not_cut(dealer: Dealer, step: Callable[..., StepRun]) -> None:
    """512 tokens of 4 query heads a KV head are 32 tiles of 64 rows, for which there are 33 places:
    on average the decode takes each for a 33rd of its tokens."""
    found = dealer.deal(step((999, 1), (0, 512)), 520)
    assert found == Dealt(0, 0, 1000, 1000, 32, 16 * 33 * 512, 1000 / 33, 1000 / 33 / 32)


def test_beside_a_long_context_tiles_are_large(
    dealer: Dealer, step: Callable[..., StepRun]
) -> None:
    """512 tokens are 16 tiles of 128 rows, for each of 8 KV heads: 128 of 132 programs.

    Four tokens of a short prompt fit one tile of 16 rows, and five do not.
    """
    pairs, places = 32 * 132 / 8, 132 / 8
    found = dealer.deal(step((4999, 1), (0, 4), (0, 512)), 517)
    taken = 5004 / places
    assert found == pytest.approx(Dealt(0, 0, 5004, 5000, 79, pairs * 512, taken, taken / 64))
    found = dealer.deal(step((4999, 1), (0, 5), (0, 512)), 518)
    taken = 5000 / places
    assert found == pytest.approx(Dealt(0, 0, 5000, 5000, 79, pairs * 512, taken, taken / 64))


def test_the_first_long_context_makes_the_launch_a_long_one(
    dealer: Dealer, step: Callable[..., StepRun]
) -> None:
    rounds = [
        dealer.deal(step((context - 1, 1), (0, 64)), 72).busiest_rounds for context in (4096, 4097)
    ]
    assert rounds == [4096 // 32, -(-4097 // 64)]


def test_a_batch_begins_with_its_first_request(
    dealer: Dealer, step: Callable[..., StepRun]
) -> None:
    """66 contexts are read at a time. One of 6,000 tokens at the front is read beside all others;
    at the end it waits for the first of them."""
    long, short, chunk = (5999, 1), [(99, 1)] * 66, (0, 64)
    front, end = (
        dealer.deal(step(*requests), 136).busiest_kv_tokens
        for requests in ((long, *short, chunk), (*short, long, chunk))
    )
    assert (front, end) == (6000, 100 + 6000)


@given(sizes=sizes, slots=st.integers(1, 70))
def test_each_part_takes_the_next_when_it_is_done(sizes: list[int], slots: int) -> None:
    loads = [0] * slots
    for size in sizes:
        loads[min(range(slots), key=loads.__getitem__)] += size
    found = _busiest(sizes, slots)
    assert found == max(loads)
    assert max(*sizes, sum(sizes) / slots) <= found <= sum(sizes) / slots + max(sizes)


@given(sizes=sizes, slots=st.integers(1, 70), data=st.data())
def test_more_to_do_is_never_done_earlier(
    sizes: list[int], slots: int, data: st.DataObject
) -> None:
    """Pieces do not wait for each other, so that none of Graham's anomalies comes up."""
    at = data.draw(st.integers(0, len(sizes) - 1))
    found, more = _busiest(sizes, slots), data.draw(st.integers(1, 5000))
    larger = [*sizes[:at], sizes[at] + more, *sizes[at + 1 :]]
    assert _busiest(larger, slots) >= found
    assert _busiest([*sizes[:at], more, *sizes[at:]], slots) >= found
    assert _busiest(sizes, slots + 1) <= found


@given(contexts=sizes, tile=st.sampled_from([16, 32, 64, 128]), slots=st.integers(1, 600))
def test_chunks_are_whole_tiles_that_add_up(contexts: list[int], tile: int, slots: int) -> None:
    split = SplitDecodes(tile=tile, programs=slots, fine_tokens=512)
    chunks = _cut(contexts, split, slots)
    spans = [-(-one // tile) for one in contexts]
    coarse = -(-sum(spans) // slots)
    assert sum(chunks) == sum(contexts)
    assert min(chunks) >= 1
    assert max(chunks) <= coarse * tile
    assert len(chunks) <= 2 * slots + len(contexts)
    place = 0
    for context, span in zip(contexts, spans, strict=True):
        left = context
        while left:
            assert chunks[place] == left or chunks[place] % tile == 0
            assert span > coarse or chunks[place] == context
            left -= chunks[place]
            place += 1


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20)
@given(rows=st.one_of(decodes, st.tuples(decodes, prefills).map(lambda two: two[0] + two[1])))
def test_what_is_dealt_out_is_what_programs_do(
    name: str, step: Callable[..., StepRun], rows: Rows
) -> None:
    """Of contexts counted as the first of sixteen steps has them, where there are decodes alone."""
    model = MODELS[name]
    padded = 8 * -(-sum(n for _, n in rows) // 8)
    found = Dealer(PLAN, model).deal(step(*rows), padded)
    if all(n == 1 for _, n in rows):
        since = rows[0][0] % 16
        contexts = [max(start + 1 - since, 1) for start, _ in rows]
        split = PLAN.many_decodes if padded >= 32 else PLAN.few_decodes
        slots = max(1, split.programs // model.num_key_value_heads)
        chunks = _cut([min(one, model.sliding_window or one) for one in contexts], split, slots)
        assert found == Dealt(len(chunks), slots * _busiest(chunks, slots) - sum(chunks), *[0] * 6)
    else:
        assert found == pytest.approx(recounted(model, rows))


def recounted(model: ModelShape, rows: Rows) -> Dealt:
    """Two launches, each program of which is a tile of one KV head: contexts that are not cut in
    the order of the batch, and tiles, of which the last come first."""
    heads, window = model.num_key_value_heads, model.sliding_window
    group = model.num_attention_heads // heads
    kind = PLAN.long if max(map(sum, rows)) > 4096 else PLAN.short
    contexts = [start + n for start, n in rows if n * group <= kind.whole.rows]
    seen = [min(one, window or one) for one in contexts]
    programs = [
        keys
        for start, n in rows
        if n * group > kind.whole.rows
        for keys in tiles_of(start, n, kind.tall, group, window)
        for _ in range(heads)
    ]
    busiest = _busiest(seen, max(1, kind.whole.programs // heads))
    last = _busiest(programs[::-1], kind.tall.programs)
    return Dealt(
        num_chunks=0,
        idle_kv_tokens=0,
        whole_kv_tokens=sum(seen),
        busiest_kv_tokens=busiest,
        busiest_rounds=-(-busiest // kind.whole.keys),
        bound_pairs=last * kind.tall.programs * kind.tall.rows / group / heads,
        taken_kv_tokens=sum(seen) * heads / kind.tall.programs,
        taken_rounds=sum(seen) * heads / kind.tall.programs / kind.whole.keys,
    )


def tiles_of(start: int, n: int, kind: Tiles, group: int, window: int | None) -> list[int]:
    """Keys that each tile of a request takes: whole blocks of them, as far as any row sees."""
    found = []
    for first in range(0, n * group, kind.rows):
        rows = range(first, min(first + kind.rows, n * group))
        last_key = max(start + row // group for row in rows)
        keys = last_key + 1
        if window is not None:
            keys = min(keys, window + kind.rows // group)
        found.append(len(range(0, keys, kind.keys)) * kind.keys)
    return found


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20)
@given(start=starts, n=st.integers(2, 400), kind=st.sampled_from([PLAN.short.tall, PLAN.long.tall]))
def test_a_tile_takes_the_blocks_of_keys_that_its_rows_see(
    name: str, start: int, n: int, kind: Tiles
) -> None:
    """Where a window ends inside of a block, that is off by a block at most."""
    model = MODELS[name]
    group, window = model.num_attention_heads // model.num_key_value_heads, model.sliding_window
    found = Dealer(PLAN, model)._tiles(start, n, kind)
    positions = [start + row // group for row in range(n * group)]
    for i, keys in enumerate(found):
        rows = positions[i * kind.rows : (i + 1) * kind.rows]
        first = max(rows[0] - window + 1, 0) if window else 0
        blocks = {key // kind.keys for key in range(first, rows[-1] + 1)}
        assert abs(keys - len(blocks) * kind.keys) <= (kind.keys if first else 0)
    assert len(found) == -(-n * group // kind.rows)


@pytest.mark.parametrize("name", ["llama", "window", "odd"])
@settings(max_examples=20)
@given(rows=st.one_of(decodes, st.tuples(decodes, prefills).map(lambda two: two[0] + two[1])))
def test_a_run_is_dealt_out_as_its_steps_are(
    name: str, step: Callable[..., StepRun], rows: Rows
) -> None:
    count, padded = 40, 8 * -(-sum(n for _, n in rows) // 8)
    dealer = Dealer(PLAN, MODELS[name])
    at_once = [np.broadcast_to(one, count) for one in dealer.deal(step(*rows, count=count), padded)]
    for k in range(count):
        alone = Dealer(PLAN, MODELS[name]).deal(step(*[(s + k * n, n) for s, n in rows]), padded)
        assert list(alone) == [column[k] for column in at_once]


def test_the_same_dealer_gives_the_same_in_any_order(step: Callable[..., StepRun]) -> None:
    """It keeps what it found last, for the batch and the launch that it found it for."""
    few, many = step(*[(900, 1)] * 20, (8000, 1)), step(*[(900, 1)] * 34)
    asked = [(few, 24), (few, 32), (many, 40), (few, 32), (few, 24), (many, 40), (few, 24)]
    dealer = Dealer(PLAN, LLAMA)
    for run, padded in asked:
        assert dealer.deal(run, padded) == Dealer(PLAN, LLAMA).deal(run, padded)
