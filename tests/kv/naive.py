"""The prefix cache written down plainly: keys that hold everything, lists for queues."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from simserve.segments import Part, Segments, total_len
from simserve.types import MmItem, Request, TraceRequest

Key = tuple[Any, ...]
"""(key of the block before, tokens, LoRA, items, salt)."""


def flat_tokens(parts: Segments) -> list[Any]:
    """Every token: a literal's id, or (segment, place in it)."""
    return [
        segment[i] if isinstance(segment, tuple) else (segment, i)
        for segment, length in parts
        for i in range(length)
    ]


def block_keys(request: TraceRequest, block_size: int) -> list[Key]:
    """Keys of all full blocks, prompt and output."""
    tokens = flat_tokens(request.prompt + request.output_parts)
    keys: list[Key] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        end = start + block_size
        items: tuple[str, ...] = tuple(
            item.identifier
            for item in request.mm_items
            if item.offset < end and item.offset + item.length > start
        )
        if request.mm_items and start > 0 and request.prompt_len < end:
            last = request.mm_items[-1]
            items = (last.identifier,) if last.offset + last.length >= start else ()
        salt = request.cache_salt if start == 0 else None
        parent = keys[-1] if keys else ()
        keys.append((parent, tuple(tokens[start:end]), request.lora_id, items, salt or None))
    return keys


BASES: tuple[Segments, ...] = (
    (("system", 14), (7, 10), ((0, 1, 0, 1, 1), 5), ("7", 9)),
    (((0, 1, 1, 0), 4), ((0, 0, 1, 0, 1, 1), 6), (1 << 70, 20)),
    (("7", 3), ("7", 12), ("system", 10)),
)
"""What prompts begin with."""


def cut(parts: Segments, length: int) -> Segments:
    """The first `length` tokens of `parts`."""
    kept = []
    for segment, count in parts:
        kept.append((segment, min(count, length)))
        length -= kept[-1][1]
        if length == 0:
            break
    return tuple(kept)


@st.composite
def recut(draw: st.DrawFn, parts: Segments) -> Segments:
    """The same tokens: literals cut in two here and there."""
    out: list[Part] = []
    for segment, length in parts:
        if isinstance(segment, tuple) and length > 1 and draw(st.booleans()):
            at = draw(st.integers(1, length - 1))
            out += [(segment[:at], at), (segment[at:], length - at)]
        else:
            out.append((segment, length))
    return tuple(out)


@st.composite
def prompts(draw: st.DrawFn, base: Segments | None = None) -> Segments:
    """A beginning that others have too, cut anywhere, and perhaps something else behind it."""
    base = draw(st.sampled_from(BASES)) if base is None else base
    total = total_len(base)
    shared = draw(st.just(total) | st.integers(1, total))
    parts = draw(recut(cut(base, shared)))
    if draw(st.booleans()):
        tail = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        parts += ((tuple(tail), len(tail)),)
    elif draw(st.booleans()):
        parts += ((draw(st.sampled_from(["system", 7, "own"])), draw(st.integers(0, 12))),)
    return parts


@st.composite
def mm_items(draw: st.DrawFn, prompt_len: int) -> tuple[MmItem, ...]:
    """Up to two items that do not overlap."""
    items: list[MmItem] = []
    at = 0
    for identifier in draw(st.lists(st.sampled_from(["cat", "dog"]), min_size=1, max_size=2)):
        if at < prompt_len:
            offset = draw(st.integers(at, prompt_len - 1))
            length = draw(st.integers(1, prompt_len - offset))
            items.append(MmItem(identifier, offset, length))
            at = offset + length
    return tuple(items)


def rarely(*values: Any) -> st.SearchStrategy[Any]:
    """None, but one time in eight."""
    return st.sampled_from([None] * 7 * len(values) + list(values))


@st.composite
def trace_requests(
    draw: st.DrawFn, request_id: str = "r", base: Segments | None = None
) -> TraceRequest:
    """A request whose blocks may equal another one's, or just not."""
    prompt = draw(prompts(base))
    items = draw(mm_items(total_len(prompt))) if draw(rarely(True)) else ()
    output = draw(rarely((("system", 20),), (("own", 3), ((1, 0, 1), 3), (7, 9))))
    return TraceRequest(
        request_id=request_id,
        arrival_s=0.0,
        prompt=prompt,
        output_len=total_len(output) if output else draw(st.integers(1, 20)),
        output=output,
        cache_salt=draw(rarely("", "salt")),
        lora_id=draw(rarely(1, "a")),
        mm_items=items,
        prompt_logprobs=draw(rarely(True)) is True,
    )


class NaiveManager:
    """What a KV cache manager decides, block by block.

    Args:
        windows: of each group; None is full attention.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        max_model_len: int,
        windows: list[int | None],
        caching: bool,
        drop_last: bool,
    ) -> None:
        self.size, self.max_model_len = block_size, max_model_len
        self.windows, self.caching, self.drop_last = windows, caching, drop_last
        self.queue = list(range(1, num_gpu_blocks))
        self.uses = [0] * num_gpu_blocks
        self.cached: dict[tuple[Key, int], list[int]] = {}
        self.key_of: dict[int, tuple[Key, int]] = {}
        self.evicted = 0
        self.keys: dict[str, list[Key]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.committed: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.keys[request.request_id] = block_keys(request.trace, self.size)
        self.free(request)

    def get_computed_blocks(self, request: Request) -> list[list[int]] | None:
        """The hit, per group."""
        if not self.caching or request.trace.prompt_logprobs:
            return None
        keys = self.keys[request.request_id][: (request.num_tokens - 1) // self.size]
        groups = range(len(self.windows))
        full = [g for g in groups if self.windows[g] is None]
        sliding = [g for g in groups if self.windows[g] is not None]
        if full:
            count = 0
            while count < len(keys) and all((keys[count], g) in self.cached for g in full):
                count += 1
            keys = keys[: max(0, count - self.drop_last)]
        first = 0
        if sliding:
            window = self.windows[sliding[0]]
            assert window is not None
            present = [all((key, g) in self.cached for g in sliding) for key in keys]
            first, stop = self._window(present, window)
            keys = keys[: max(0, stop - self.drop_last)]
        return [
            [
                self.cached[key, g][0] if g in full or index >= first else 0
                for index, key in enumerate(keys)
            ]
            for g in groups
        ]

    def _window(self, present: list[bool], window: int) -> tuple[int, int]:
        """The last place that a whole window (and the block to drop) of hits leads up to."""
        wanted = max(1, -(-(window - 1) // self.size) + self.drop_last)
        for stop in range(len(present), wanted - 1, -1):
            if all(present[stop - wanted : stop]):
                return stop - wanted, stop
        return 0, [*present, False].index(False)

    def allocate_slots(
        self, request: Request, num_new: int, hit: list[list[int]] | None, lookahead: int
    ) -> list[list[int]] | None:
        """New blocks per group, or None."""
        request_id, computed = request.request_id, request.num_computed_tokens
        tables = self.tables[request_id]
        for table, window in zip(tables, self.windows, strict=True):
            if window is not None:
                self._slide(table, (computed - window + 1) // self.size)
        hits = hit or [[] for _ in tables]
        end = computed + num_new + len(hits[0]) * self.size
        num_blocks = -(-min(end + lookahead, self.max_model_len) // self.size)
        new = [
            max(0, num_blocks - len(table) - len(found))
            for table, found in zip(tables, hits, strict=True)
        ]
        rescued = [b for found in hits for b in found if b and not self.uses[b]]
        if sum(new) + len(rescued) > len(self.queue):
            return None
        for table, found in zip(tables, hits, strict=True):
            for block in found:
                if block:
                    if not self.uses[block]:
                        self.queue.remove(block)
                    self.uses[block] += 1
            table += found
        if hit:
            self.committed[request_id] = len(hits[0])
        blocks = [[self._pop() for _ in range(count)] for count in new]
        for table, added in zip(tables, blocks, strict=True):
            table += added
        self._commit(request_id, min(end, request.num_tokens) // self.size)
        return blocks

    def free(self, request: Request) -> None:
        for table in self.tables.get(request.request_id, ()):
            for block in reversed(table):
                self._give_up(block)
        self.tables[request.request_id] = [[] for _ in self.windows]
        self.committed[request.request_id] = 0

    def reset(self) -> bool:
        if any(self.uses):
            return False
        self.cached, self.key_of = {}, {}
        return True

    def num_common_prefix_blocks(self, request: Request, num_running: int) -> tuple[int, ...]:
        common = []
        for table, window in zip(self.tables[request.request_id], self.windows, strict=True):
            shared = [
                window is None and self.caching and self.uses[b] == num_running for b in table
            ]
            common.append([*shared, False].index(False))
        return tuple(common)

    def _pop(self) -> int:
        block = self.queue.pop(0)
        key = self.key_of.pop(block, None)
        if key is not None:
            self.evicted += 1
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]
        self.uses[block] = 1
        return block

    def _give_up(self, block: int) -> None:
        if block:
            self.uses[block] -= 1
            if not self.uses[block]:
                self.queue.append(block)

    def _slide(self, table: list[int], first_visible: int) -> None:
        for index in range(min(first_visible, len(table)) - 1, -1, -1):
            self._give_up(table[index])
            table[index] = 0

    def _commit(self, request_id: str, full_blocks: int) -> None:
        if not self.caching:
            return
        for g, table in enumerate(self.tables[request_id]):
            for index in range(self.committed[request_id], full_blocks):
                key = self.keys[request_id][index], g
                self.cached.setdefault(key, []).append(table[index])
                self.key_of[table[index]] = key
        self.committed[request_id] = max(full_blocks, self.committed[request_id])
