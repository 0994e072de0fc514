"""A second, deliberately plain model of the scheduler and its prefix cache, to compare ours with.

This part: requests, blocks, block tables and the cache.

It knows nothing of `simserve`: cases are dicts in the format of the recorded ones, queues and pools
are Python lists, everything is recomputed at every step, and nothing is fast. Block keys are exact:
a number for each different (key of the block before, tokens of the block, salt).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EngineWouldCrash", "Pool", "Request", "output_token"]

NULL = 0
VOCABULARY = 32000


class EngineWouldCrash(Exception):
    """The modelled engine fails an assertion of its own here: there is nothing to compare with."""


def output_token(request: int, j: int) -> int:
    """Token j that request generates, whatever the schedule does."""
    return (request * 7919 + j * 104729) % VOCABULARY


@dataclass(eq=False)
class Request:
    """What scheduler, runner and statistics know of one request."""

    id: int
    arrival: float
    tokens: list[int]
    max_tokens: int
    priority: int
    salt: str | None
    prompt_logprobs: bool
    status: str = "waiting"
    computed: int = 0
    drafts: int = 0
    placeholders: int = 0
    cached: int = -1
    keys: list[int] = field(default_factory=list)
    runner_computed: int = 0
    runner_tokens: int = 0
    preemptions: int = 0
    reason: str | None = None
    queued: float = 0.0
    scheduled: float | None = None
    finished: float | None = None
    token_steps: list[tuple[int, int]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = self.runner_tokens = len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens known to the scheduler."""
        return len(self.tokens) - self.prompt_len

    @property
    def rank(self) -> tuple[int, float]:
        """Order under policy priority, smaller first."""
        return (self.priority, self.arrival)


class Pool:
    """Blocks, block tables and the prefix cache."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.bs: int = config["block_size"]
        self.max_len: int = config["max_model_len"]
        self.caching: bool = config["enable_prefix_caching"]
        groups = config["kv_groups"] or [{"type": "full"}]
        self.windows: list[int | None] = [group.get("window") for group in groups]
        self.eagle = bool(config["spec"]) and config["spec"]["method"] == "eagle"
        self.free_queue = list(range(1, config["num_gpu_blocks"]))
        self.num_usable = len(self.free_queue)
        self.count = [0] * config["num_gpu_blocks"]
        self.entry: list[tuple[int, int] | None] = [None] * config["num_gpu_blocks"]
        self.cache: dict[tuple[int, int], list[int]] = {}
        self.numbers: dict[Any, int] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.committed: dict[int, list[int]] = {}

    def extend_keys(self, r: Request) -> None:
        """Number the blocks of `r` that are full by now."""
        while (len(r.keys) + 1) * self.bs <= len(r.tokens):
            i = len(r.keys)
            before = r.keys[-1] if r.keys else None
            extra = (r.salt or None) if i == 0 else None
            block = (before, tuple(r.tokens[i * self.bs : (i + 1) * self.bs]), extra)
            r.keys.append(self.numbers.setdefault(block, len(self.numbers)))

    # -- lookup ----------------------------------------------------------------------------------

    def lookup(self, r: Request) -> tuple[list[list[int]], int]:
        """Hit blocks per group, and hit tokens."""
        full = [g for g, window in enumerate(self.windows) if window is None]
        sliding = [g for g, window in enumerate(self.windows) if window is not None]
        limit = len(r.tokens) - 1
        hit: dict[int, list[int]] = {}
        if full:
            num_blocks = 0
            while num_blocks < limit // self.bs and self.has(r.keys[num_blocks], full):
                num_blocks += 1
            if self.eagle:
                num_blocks = max(num_blocks - 1, 0)
            limit = num_blocks * self.bs
            hit = {g: [self.cache[key, g][0] for key in r.keys[:num_blocks]] for g in full}
        if sliding:
            first, end = self.window_run(r, sliding, limit // self.bs)
            if self.eagle and end:
                end -= 1
            for g in sliding:
                held = range(first, end)
                hit[g] = [self.cache[r.keys[i], g][0] if i in held else NULL for i in range(end)]
            hit.update({g: hit[g][:end] for g in full})
        return [hit[g] for g in range(len(self.windows))], len(hit[0]) * self.bs

    def has(self, key: int, groups: list[int]) -> bool:
        """Whether all of these groups have the key cached."""
        return all((key, g) in self.cache for g in groups)

    def window_run(self, r: Request, groups: list[int], num_blocks: int) -> tuple[int, int]:
        """First and end of the rightmost run of hits as long as the window, else from block 0."""
        window = self.windows[groups[0]]
        assert window is not None
        wanted = -(-(window - 1) // self.bs) + self.eagle
        for end in range(num_blocks, 0, -1):
            first = end - wanted
            if first >= 0 and all(self.has(r.keys[i], groups) for i in range(first, end)):
                return first, end
        end = 0
        while end < num_blocks and self.has(r.keys[end], groups):
            end += 1
        return 0, end

    # -- allocation ------------------------------------------------------------------------------

    def allocate(
        self, r: Request, n: int, hit: list[list[int]], num_hit: int, lookahead: int
    ) -> list[list[int]] | None:
        """New blocks per group, or None if there is no room."""
        groups = range(len(self.windows))
        tables = self.tables.get(r.id) or [[] for _ in groups]
        self.drop_out_of_window(r, tables)
        hit = hit or [[] for _ in groups]
        slots = min(r.computed + num_hit + n + lookahead, self.max_len)
        wanted = -(-slots // self.bs)
        need = 0
        for g in groups:
            reused = sum(1 for b in hit[g] if b != NULL and self.count[b] == 0)
            need += wanted - len(hit[g]) - len(tables[g]) + reused
        if need > len(self.free_queue):
            return None
        for g in groups:
            for b in hit[g]:
                if b != NULL:
                    if self.count[b] == 0:
                        self.free_queue.remove(b)
                    self.count[b] += 1
        if r.id not in self.tables:
            self.tables[r.id] = tables = [list(hit[g]) for g in groups]
            self.committed[r.id] = [len(hit[g]) for g in groups]
        added: list[list[int]] = []
        for g in groups:
            added.append([self.hand_out() for _ in range(wanted - len(tables[g]))])
            tables[g] += added[g]
        if self.caching:
            self.commit(r, min(r.computed + num_hit + n, len(r.tokens)))
        return added

    def drop_out_of_window(self, r: Request, tables: list[list[int]]) -> None:
        """Replace blocks that no later token can see by the null block."""
        for g, window in enumerate(self.windows):
            if window is None:
                continue
            for i in range((r.computed - window + 1) // self.bs - 1, -1, -1):
                if i >= len(tables[g]):
                    raise EngineWouldCrash("a ghost's window reaches beyond its empty table")
                if tables[g][i] == NULL:
                    break
                self.release(tables[g][i])
                tables[g][i] = NULL

    def hand_out(self) -> int:
        """The block at the head of the free queue, forgotten by the cache."""
        b = self.free_queue.pop(0)
        entry = self.entry[b]
        if entry is not None:
            self.cache[entry].remove(b)
            if not self.cache[entry]:
                del self.cache[entry]
            self.entry[b] = None
        self.count[b] = 1
        return b

    def commit(self, r: Request, num_tokens: int) -> None:
        """Enter the full blocks of the first tokens into the cache."""
        for g, table in enumerate(self.tables[r.id]):
            for i in range(self.committed[r.id][g], num_tokens // self.bs):
                b = table[i]
                if b == NULL:
                    raise EngineWouldCrash("a block left the window before it was committed")
                assert self.entry[b] is None
                self.entry[b] = (r.keys[i], g)
                self.cache.setdefault((r.keys[i], g), []).append(b)
                self.committed[r.id][g] = i + 1

    def release(self, b: int) -> None:
        """One holder fewer; to the tail of the free queue if that was the last."""
        self.count[b] -= 1
        assert self.count[b] >= 0
        if self.count[b] == 0:
            self.free_queue.append(b)

    def free(self, r: Request) -> None:
        """Give all blocks back, last first."""
        for table in self.tables.pop(r.id, []):
            for b in reversed(table):
                if b != NULL:
                    self.release(b)
        self.committed.pop(r.id, None)

    def common_prefix(self, r: Request, num_running: int) -> list[int]:
        """Leading blocks that all running requests hold, per group."""
        result = []
        for table, window in zip(self.tables[r.id], self.windows, strict=True):
            num_blocks = 0
            if self.caching and window is None:
                while num_blocks < len(table) and self.count[table[num_blocks]] == num_running:
                    num_blocks += 1
            result.append(num_blocks)
        return result

    def reset(self) -> bool:
        """Forget all keys if nothing is held."""
        if len(self.free_queue) < self.num_usable:
            return False
        self.cache.clear()
        self.entry = [None] * len(self.entry)
        return True
