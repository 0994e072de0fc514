"""KV groups: layers of one attention kind that share a block table, and how a hit is found in each.

All groups share the pool and the block size; a cached block counts for the group it was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simserve.kv.free_queue import Blocks
from simserve.kv.identity import Chain, Stretch

__all__ = ["FullAttention", "Group", "SlidingWindow", "find_hit"]


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token stays visible."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Only the last `window` tokens stay visible; blocks before them are given back."""

    window: int

    def last_useful_block(self, num_computed_tokens: int, block_size: int) -> int:
        """First block that the token after `num_computed_tokens` can still see."""
        return (num_computed_tokens - self.window + 1) // block_size


Group = FullAttention | SlidingWindow


class Cached(Protocol):
    """Blocks cached under identities of a stretch, as `BlockPool.cached` has it."""

    def __call__(self, stretch: Stretch, group: int, start: int, stop: int, /) -> Blocks: ...


def find_hit(
    cached: Cached,
    chain: Chain,
    groups: Sequence[Group],
    max_num_tokens: int,
    block_size: int,
    drop_last: bool,
) -> list[Blocks]:
    """Blocks of the longest cached prefix, per group; 0 where a window needs no block.

    `drop_last`: drafters that need the last hidden states (eagle) recompute the last hit block. In
    a hybrid both kinds drop one, so that two blocks are lost; this is how vLLM v0.11.0 has it.
    """
    full = [g for g, group in enumerate(groups) if isinstance(group, FullAttention)]
    sliding = [g for g, group in enumerate(groups) if isinstance(group, SlidingWindow)]
    limit = min(max_num_tokens // block_size, chain.num_blocks)
    found: dict[int, Blocks] = {}
    if full:
        hit = _leading_hit(cached, chain, full, limit)
        limit = len(hit[0])
        if drop_last and limit:
            limit -= 1
        found.update(zip(full, hit, strict=True))
    if sliding:
        window = groups[sliding[0]]
        assert isinstance(window, SlidingWindow)
        hit = _window_hit(cached, chain, sliding, limit, window.window, block_size, drop_last)
        limit = len(hit[0])
        found.update(zip(sliding, hit, strict=True))
    return [found[g][:limit] for g in range(len(groups))]


def _leading_hit(cached: Cached, chain: Chain, members: Sequence[int], limit: int) -> list[Blocks]:
    """Blocks from the start up to the first that one of the groups lacks."""
    pieces: list[list[Blocks]] = []
    for stretch, start, stop in chain.between(0, limit):
        views = [cached(stretch, g, start, stop) for g in members]
        count = min(map(_leading_nonzero, views))
        pieces.append([view[:count] for view in views])
        if count < stop - start:
            break
    return [_join(of_group) for of_group in zip(*pieces, strict=True)] or [_join(())] * len(members)


def _window_hit(
    cached: Cached,
    chain: Chain,
    members: Sequence[int],
    limit: int,
    window: int,
    block_size: int,
    drop_last: bool,
) -> list[Blocks]:
    """The rightmost run of hits that fills a window, else the run that reaches down to block 0."""
    table = _cached_table(cached, chain, members, limit)
    present: list[bool] = np.all(table > 0, axis=0).tolist()
    wanted = -(-(window - 1) // block_size) + (1 if drop_last else 0)
    start = run = 0
    for block in range(limit - 1, -1, -1):
        run = run + 1 if present[block] else 0
        if run and run >= wanted:
            start = block
            break
    stop = start + run
    blocks = table[:, :stop].copy()
    blocks[:, :start] = 0
    if drop_last and stop:
        blocks = blocks[:, :-1]
    return list(blocks)


def _cached_table(
    cached: Cached, chain: Chain, members: Sequence[int], limit: int
) -> NDArray[np.int64]:
    """Cached block under each identity, shape [groups, limit]; 0: none."""
    table = np.zeros((len(members), limit), dtype=np.int64)
    at = 0
    for stretch, start, stop in chain.between(0, limit):
        for row, g in enumerate(members):
            view = cached(stretch, g, start, stop)
            table[row, at : at + len(view)] = view
        at += stop - start
    return table


def _leading_nonzero(view: Blocks) -> int:
    """How many entries come before the first 0."""
    if np.count_nonzero(view) == len(view):
        return len(view)
    return int(view.argmin())


def _join(pieces: Sequence[Blocks]) -> Blocks:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
