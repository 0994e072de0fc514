"""Block identity: equal identities mean equal whole prefixes, as vLLM's chained block hashes do.

An identity is a place in a trie of stretches. A stretch hangs below the block before it and goes on
as the first request that came there does; where another one leaves it, a stretch of its own hangs
below the last block that both have. Block i of a stretch is (stretch, i).
What a stretch holds is told run by run: a block of whatever tokens, and those that follow it inside
the segment in which it ends. So a prompt is found by its parts, not by its blocks, the identity is
exact (no collisions), and a whole stretch is looked up, committed and evicted as an array.

A stretch lives while a request, a cached block or a stretch below holds it. Whether a block does is
only looked at from time to time.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simserve.kv.free_queue import Blocks
from simserve.segments import Segment, Segments, split_blocks
from simserve.types import MmItem, TraceRequest

if TYPE_CHECKING:
    from simserve.kv.held import Held

__all__ = ["Chain", "IdentityTrie", "Stretch"]

_EMPTY: Blocks = np.zeros(0, dtype=np.int64)
_LONGER = object()
"""Content of a block that goes on with a segment where the stretch above leaves it."""


class Stretch:
    """Identities of blocks that follow upon one another, and the blocks cached under them."""

    __slots__ = (
        "cached",
        "children",
        "committer",
        "contents",
        "duplicates",
        "key",
        "lengths",
        "parent",
        "refs",
        "slot",
    )

    def __init__(self, parent: Stretch | None, key: Hashable, slot: int, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.slot = slot
        self.contents: list[Hashable] = []
        """The first block of each run; it stands for those that follow it, too."""
        self.lengths: list[int] = []
        """Blocks of each run. Only the last one may become longer."""
        self.refs = 0
        """Requests and stretches below that hold it."""
        self.children: dict[Hashable, Stretch] | None = None
        self.cached: list[Blocks] = [_EMPTY] * num_groups
        """Per KV group: the block that was cached first under each identity; 0, or beyond the end:
        none. It may have been evicted since, as may the next ones: see `BlockPool.cached`."""
        self.duplicates: dict[tuple[int, int], list[int]] | None = None
        """Further blocks under (group, index), in order of insertion."""
        self.committer: Held | None = None
        """A decode that completes blocks here and has not committed all of them yet."""

    def follow(self, contents: list[Hashable], lengths: list[int], at: int) -> tuple[int, int]:
        """Go along it with a request's runs from `at` on. A new one goes along with them.

        Returns how many blocks they have in common and the run that comes behind these, which may
        be what is left of a run.
        """
        if not self.contents:
            self.contents, self.lengths = contents[at:], lengths[at:]
            return sum(self.lengths), len(contents)
        num_blocks, last = 0, len(self.contents) - 1
        for i, (content, own) in enumerate(zip(self.contents, self.lengths, strict=True)):
            if at == len(contents) or contents[at] != content:
                break
            wanted = lengths[at]
            if wanted > own and i < last:
                contents[at], lengths[at] = _LONGER, wanted - own
                return num_blocks + own, at
            num_blocks, at = num_blocks + wanted, at + 1
            if wanted < own:
                break
            self.lengths[i] = wanted
        return num_blocks, at

    def was_cached(self) -> bool:
        """Whether a block was ever cached under one of the identities."""
        return any(map(len, self.cached))

    def room_for(self, group: int, count: int) -> Blocks:
        """The group's array of cached blocks, at least `count` long."""
        cached = self.cached[group]
        if len(cached) < count:
            grown = np.zeros(min(sum(self.lengths), 4 * count + 64), dtype=np.int64)
            grown[: len(cached)] = cached
            self.cached[group] = cached = grown
        return cached


class Span(NamedTuple):
    """Part of a chain: `num_blocks` blocks of a request, from `first` on, are a stretch's first."""

    first: int
    stretch: Stretch
    num_blocks: int


class Chain:
    """Identities of all full blocks a request may come to have, prompt and output."""

    __slots__ = ("_firsts", "num_blocks", "spans")

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self._firsts = [span.first for span in spans]
        self.num_blocks = spans[-1].first + spans[-1].num_blocks if spans else 0

    def at(self, block: int) -> tuple[Stretch, int]:
        """(stretch, index) of one block."""
        first, stretch, _ = self.spans[-1]
        if block < first:
            first, stretch, _ = self.spans[bisect_right(self._firsts, block) - 1]
        return stretch, block - first

    def between(self, start: int, stop: int) -> list[tuple[Stretch, int, int]]:
        """(stretch, first index, end index) of blocks `start` ... `stop - 1`, piece by piece."""
        if start >= stop:
            return []
        first, stretch, _ = self.spans[-1]
        if start >= first:  # most often: what is new comes last
            return [(stretch, start - first, stop - first)]
        pieces = []
        i = bisect_right(self._firsts, start) - 1
        while start < stop:
            first, stretch, count = self.spans[i]
            end = min(stop, first + count)
            pieces.append((stretch, start - first, end - first))
            start = end
            i += 1
        return pieces


class IdentityTrie:
    """Makes chains, and drops stretches nobody holds any more."""

    def __init__(self, block_size: int, num_groups: int) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._roots: dict[Hashable, Stretch] = {}
        self.stretches: list[Stretch | None] = [None]
        """By slot number; slot 0 is nobody's."""
        self._free_slots: list[int] = []

    def chain(self, request: TraceRequest) -> Chain:
        """The chain of a request. It holds its stretches until `release`."""
        stretch, first, index = self._root(request), 0, -1
        spans: list[Span] = []
        contents, lengths = self._runs(request)
        at = 0
        while at < len(contents):
            stretch = self._child(stretch, index, contents[at])
            count, at = stretch.follow(contents, lengths, at)
            spans.append(Span(first, stretch, count))
            first, index = first + count, count - 1
        if spans:
            stretch.refs += 1
        else:
            self._drop_unheld(stretch, Stretch.was_cached)
        return Chain(spans)

    def release(self, chain: Chain) -> None:
        """A request is over: its chain is not needed any more."""
        if chain.spans:
            last = chain.spans[-1].stretch
            last.refs -= 1
            self._drop_unheld(last, Stretch.was_cached)

    def drop_unheld(self, has_blocks: Sequence[bool]) -> None:
        """Drop all stretches that nothing holds; `has_blocks`: whether a block does, by slot."""
        for stretch, has_block in zip(self.stretches, has_blocks, strict=True):
            if stretch is not None and not has_block:
                self._drop_unheld(stretch, lambda held: has_blocks[held.slot])

    def _drop_unheld(self, stretch: Stretch, has_blocks: Callable[[Stretch], bool]) -> None:
        """Drop a stretch that nothing holds, and those above that nothing holds then."""
        while not stretch.refs and not has_blocks(stretch):
            self.stretches[stretch.slot] = None
            self._free_slots.append(stretch.slot)
            parent = stretch.parent
            if parent is None:
                del self._roots[stretch.key]
                return
            assert parent.children is not None
            del parent.children[stretch.key]
            parent.refs -= 1
            stretch = parent

    def _root(self, request: TraceRequest) -> Stretch:
        # LoRA is part of every block's key and the salt of the first one's; both separate whole
        # prefixes, so that a root of its own says the same. An empty salt equals none.
        key = (request.lora_id, request.cache_salt or None)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = self._new(None, key)
        return root

    def _runs(self, request: TraceRequest) -> tuple[list[Hashable], list[int]]:
        """Contents and lengths of a request's runs; a partial last block has no identity."""
        parts = request.prompt + request.output_parts
        items = sorted(request.mm_items, key=lambda item: item.offset)
        if not items:
            return self._plain_runs(parts, sys.maxsize)
        plain = items[0].offset // self._block_size
        contents, lengths = self._plain_runs(parts, plain)
        contents += self._item_contents(parts, plain, request.prompt_len, items)
        return contents, lengths + [1] * (len(contents) - len(lengths))

    def _plain_runs(self, parts: Segments, left: int) -> tuple[list[Hashable], list[int]]:
        """Contents and lengths of the runs along `parts`, at most `left` blocks.

        A block of several segments, or of literal tokens alone, is named by its pieces; one inside
        a segment by that.
        """
        size = self._block_size
        contents: list[Hashable] = []
        lengths: list[int] = []
        pieces: list[tuple[Hashable, ...]] = []
        room = size
        for segment, length in parts:
            offset, literal = 0, isinstance(segment, tuple)
            if pieces and length >= room and left:
                pieces.append(_piece(segment, 0, room))
                offset = room
                count = 1 if literal else min(1 + (length - offset) // size, left)
                contents.append(_content(pieces))
                lengths.append(count)
                offset += (count - 1) * size
                pieces, room, left = [], size, left - count
            if not pieces and (count := min((length - offset) // size, left)):
                left -= count
                end = offset + count * size
                if isinstance(segment, tuple):
                    contents += [(segment[i : i + size],) for i in range(offset, end, size)]
                    lengths += [1] * count
                else:
                    contents.append(segment)
                    lengths.append(count)
                offset = end
            if not left:
                break
            if offset < length:
                pieces.append(_piece(segment, offset, length - offset))
                room -= length - offset
        return contents, lengths

    def _item_contents(
        self, parts: Segments, first: int, prompt_len: int, items: Sequence[MmItem]
    ) -> Iterator[Hashable]:
        """Those of blocks from block `first` on: the items that a block touches belong to it.

        As the engine has it, a block behind the first one that the prompt does not fill is only
        asked for the last item, which then also counts if it ends where the block starts.
        """
        size = self._block_size
        for number, block in enumerate(islice(split_blocks(parts, size), first, None), first):
            start = number * size
            end = start + size
            asked, behind = items, start + 1
            if start and end > prompt_len:
                asked, behind = items[-1:], start
            touching = tuple(
                item.identifier
                for item in asked
                if item.offset < end and item.offset + item.length >= behind
            )
            yield touching, _content([_piece(*piece) for piece in block])

    def _child(self, parent: Stretch, index: int, key: Hashable) -> Stretch:
        if parent.children is None:
            parent.children = {}
        child = parent.children.get((index, key))
        if child is None:
            child = parent.children[index, key] = self._new(parent, (index, key))
            parent.refs += 1
        return child

    def _new(self, parent: Stretch | None, key: Hashable) -> Stretch:
        slot = self._free_slots.pop() if self._free_slots else len(self.stretches)
        stretch = Stretch(parent, key, slot, self._num_groups)
        if slot == len(self.stretches):
            self.stretches.append(stretch)
        else:
            self.stretches[slot] = stretch
        return stretch


def _piece(segment: Segment, offset: int, count: int) -> tuple[Hashable, ...]:
    """Contents of part of a block: a literal's tokens, or a name and a place in its segment."""
    if isinstance(segment, tuple):
        return segment[offset : offset + count]
    return "of", segment, offset, count


def _content(pieces: list[tuple[Hashable, ...]]) -> Hashable:
    """Contents of one block. Neighbouring literals are joined: where they met does not matter."""
    joined: list[tuple[Hashable, ...]] = []
    for piece in pieces:
        if joined and piece[0] != "of" and joined[-1][0] != "of":
            joined[-1] += piece
        else:
            joined.append(piece)
    return tuple(joined)
