"""How attention is dealt out to a GPU's processors, for engines whose kernels say so.

A launch is a list of programs. Each part of the GPU takes the next one when it is done with its
last, which is list scheduling (Graham, Bounds on multiprocessing timing anomalies, 1969), and the
launch is over when the busiest part is. Contexts that fill a round and a third take two rounds, and
a long one that begins last is waited for: sums and maxima of contexts cannot tell that.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import compress
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from simserve.types import ModelShape, StepRun

__all__ = ["AttentionPlan", "Dealer", "Dealt", "MixedLaunches", "SplitDecodes", "Tiles"]

Number = Any
OfGPU = Annotated[PositiveInt, Field(le=2**16)]
"""What a GPU does at a time: tiles have up to 256 tokens today, and some thousand programs run."""
Threshold = Annotated[PositiveInt, Field(le=10**9)]

_TOGETHER = 16
"""Steps of decodes that are dealt out as the first of them: few contexts need a tile more."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SplitDecodes(_Strict):
    """A launch for decodes alone, whose contexts are cut to fill the GPU.

    With `spans` the contexts in tiles and `slots` chunks at a time, contexts of at most
    coarse = ⌈Σ spans / slots⌉ tiles stay whole. Longer ones are cut evenly into chunks of at most
    ⌈Σ spans / (2 slots)⌉ tiles, but not below `fine_tokens` unless coarse is.
    """

    tile: OfGPU
    """Tokens."""
    programs: OfGPU
    """That the GPU runs at a time. A program has a chunk and a KV head."""
    fine_tokens: Threshold


class Tiles(_Strict):
    """A launch for queries in tiles of some rows: tokens times the query heads of a KV head."""

    rows: OfGPU
    keys: OfGPU
    """That a program takes at a time."""
    programs: OfGPU
    """That the GPU runs at a time. A program has a tile and a KV head."""


class MixedLaunches(_Strict):
    """The two launches of a step with prefills, side by side."""

    tall: Tiles
    whole: Tiles
    """For requests of one tile, as decodes are: it reads their whole context."""


class AttentionPlan(_Strict):
    """The launches of an engine's attention, and which batch gets which."""

    few_decodes: SplitDecodes
    many_decodes: SplitDecodes
    many_decodes_from: Threshold
    """Decodes, padded to the graph."""
    short: MixedLaunches
    long: MixedLaunches
    long_from: Threshold
    """Tokens of the longest context of the batch."""


class Dealt(NamedTuple):
    """The attention of one step (numbers), or of several (arrays): decodes alone or all mixed."""

    num_chunks: Number
    """Of decodes alone, as is the next; 0 in other steps."""
    idle_kv_tokens: Number
    """KV tokens that could have been read besides until the last chunk is done."""
    whole_kv_tokens: Number
    """Of requests that are not cut, in steps with prefills: the sum of their contexts."""
    busiest_kv_tokens: Number
    """Of those, what one part of the GPU reads at most, one context after another."""
    busiest_rounds: Number
    """In so many rounds of a tile's keys."""
    bound_pairs: Number
    """Query-key pairs that all of the GPU could have computed when the last tile is done."""
    taken_kv_tokens: Number
    """What is not cut keeps the places for tiles for so many KV tokens, on average."""
    taken_rounds: Number
    """In so many rounds of a tile's keys."""


class Dealer:
    """Deals out the attention of a model's steps.

    Args:
        plan: of the engine.
        model: its KV heads are programs of their own; its window bounds contexts.
    """

    def __init__(self, plan: AttentionPlan, model: ModelShape) -> None:
        self._plan = plan
        self._kv_heads = model.num_key_value_heads
        self._group = model.num_attention_heads // model.num_key_value_heads
        self._window = model.sliding_window
        self._last: tuple[list[int], SplitDecodes, tuple[int, int]] | None = None
        """The decodes dealt out last, and what came of it: they come again, step after step."""

    def deal(self, run: StepRun, num_padded_tokens: int) -> Dealt:
        """The attention of each step of a run."""
        starts, num_tokens, count = run.plan.starts, run.plan.num_tokens, run.count
        if 0 in num_tokens:
            starts = list(compress(starts, num_tokens))
            num_tokens = list(filter(None, num_tokens))
        if num_tokens.count(1) == len(num_tokens):
            return self._decodes(starts, count, num_padded_tokens)
        steps = [
            self._mixed([s + k * n for s, n in zip(starts, num_tokens, strict=True)], num_tokens)
            for k in range(count)
        ]
        return steps[0] if count == 1 else Dealt(*map(np.array, zip(*steps, strict=True)))

    def _decodes(self, starts: Sequence[int], count: int, padded: int) -> Dealt:
        many = padded >= self._plan.many_decodes_from
        split = self._plan.many_decodes if many else self._plan.few_decodes
        first = starts[0] % _TOGETHER
        found = [
            self._chunks([start + 1 + since for start in starts], split)
            for since in range(-first, count, _TOGETHER)
        ]
        if count == 1:
            return Dealt(*found[0], 0, 0, 0, 0, 0, 0)
        place = (first + np.arange(count)) // _TOGETHER
        chunks, idle = np.array(found)[place].T
        return Dealt(chunks, idle, 0, 0, 0, 0, 0, 0)

    def _chunks(self, contexts: list[int], split: SplitDecodes) -> tuple[int, int]:
        """How many chunks there are, and the KV tokens for which parts of the GPU are idle."""
        if self._last is not None and self._last[:2] == (contexts, split):
            return self._last[2]
        slots = self._slots(split)
        chunks = _cut(self._seen(contexts), split, slots)
        found = len(chunks), slots * _busiest(chunks, slots) - sum(chunks)
        self._last = contexts, split, found
        return found

    def _mixed(self, starts: Sequence[int], num_tokens: Sequence[int]) -> Dealt:
        rows = list(zip(starts, num_tokens, strict=True))
        is_long = max(start + n for start, n in rows) >= self._plan.long_from
        launches = self._plan.long if is_long else self._plan.short
        tall, whole = launches.tall, launches.whole
        seen = self._seen([start + n for start, n in rows if n * self._group <= whole.rows])
        tiles = [
            tile
            for start, n in rows
            if n * self._group > whole.rows
            for tile in self._tiles(start, n, tall)
        ]
        busiest = _busiest(seen, self._slots(whole))
        taken = sum(seen) * self._kv_heads / tall.programs
        pairs_at_a_time = tall.rows / self._group * tall.programs / self._kv_heads
        return Dealt(
            0,
            0,
            sum(seen),
            busiest,
            -(-busiest // whole.keys),
            pairs_at_a_time * self._last_tile(tiles[::-1], tall.programs),
            taken,
            taken / whole.keys,
        )

    def _tiles(self, start: int, num_tokens: int, kind: Tiles) -> list[int]:
        """The keys that each tile of a request takes."""
        rows = num_tokens * self._group
        ends = (min(first + kind.rows, rows) - 1 for first in range(0, rows, kind.rows))
        keys = [start + end // self._group + 1 for end in ends]
        if self._window is not None:
            most = self._window + kind.rows // self._group
            keys = [min(one, most) for one in keys]
        return [-(-one // kind.keys) * kind.keys for one in keys]

    def _last_tile(self, tiles: list[int], programs: int) -> int:
        """Keys until the last tile is done. Tiles of all KV heads are programs of their own."""
        if programs % self._kv_heads == 0:
            return _busiest(tiles, programs // self._kv_heads)
        return _busiest([tile for tile in tiles for _ in range(self._kv_heads)], programs)

    def _slots(self, launch: SplitDecodes | Tiles) -> int:
        """Chunks, or tiles, at a time: each has a program a KV head."""
        return max(1, launch.programs // self._kv_heads)

    def _seen(self, contexts: list[int]) -> list[int]:
        most = self._window
        return [max(one, 1) if most is None else min(max(one, 1), most) for one in contexts]


def _cut(contexts: list[int], split: SplitDecodes, slots: int) -> list[int]:
    """The chunks of contexts (tokens), in the order of the launch."""
    tile = split.tile
    spans = [-(-one // tile) for one in contexts]
    total = sum(spans)
    coarse = -(-total // slots)
    if max(spans) <= coarse:
        return contexts
    fine = max(-(-total // (2 * slots)), min(coarse, -(-split.fine_tokens // tile)))
    chunks: list[int] = []
    for context, span in zip(contexts, spans, strict=True):
        if span <= coarse:
            chunks.append(context)
            continue
        pieces = -(-span // fine)
        size = -(-span // pieces) * tile
        chunks += [size] * (context // size)
        if context % size:
            chunks.append(context % size)
    return chunks


def _busiest(sizes: list[int], slots: int) -> int:
    """What the busiest of `slots` has in the end, if each takes the next when it is done."""
    if len(sizes) <= slots:
        return max(sizes, default=0)
    loads = sizes[:slots]
    heapify(loads)
    for size in sizes[slots:]:
        heapreplace(loads, loads[0] + size)
    return max(loads)
