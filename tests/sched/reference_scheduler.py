"""The plain model's scheduler: two passes, preemption, update."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

from tests.sched.reference_pool import EngineWouldCrash, Pool, Request, output_token

__all__ = ["GHOST", "RESUMED", "Scheduler", "Step"]

RUNNING, NEW, RESUMED, GHOST = 0, 1, 2, 3


@dataclass(eq=False)
class Step:
    """What one schedule() decided, and what the made-up model makes of it."""

    record: dict[str, Any]
    counts: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    kinds: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    lookups: list[int] = field(default_factory=lambda: [0, 0, 0])
    tokens: dict[int, int] = field(default_factory=dict)
    new_drafts: dict[int, int] | None = None
    end: float = 0.0


class Scheduler:
    """The two passes, preemption, and the update."""

    def __init__(self, config: dict[str, Any], pool: Pool) -> None:
        self.config, self.pool = config, pool
        self.priority = config["policy"] == "priority"
        self.is_async: bool = config["async_scheduling"]
        self.max_len: int = config["max_model_len"]
        self.threshold: int = config["long_prefill_token_threshold"]
        if config["max_num_partial_prefills"] > 1 and self.threshold == 0:
            self.threshold = int(self.max_len * 0.04)
        self.lookahead: int = config["spec"]["num"] if pool.eagle else 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.known: dict[int, Request] = {}

    def add(self, r: Request) -> None:
        """A new request, to the back."""
        self.pool.extend_keys(r)
        self.known[r.id] = r
        self.waiting.append(r)
        self.sort_waiting()

    def sort_waiting(self) -> None:
        """Under policy priority the queue is always in order of rank."""
        if self.priority:
            self.waiting.sort(key=lambda r: r.rank)

    def end(self, r: Request, reason: str, now: float) -> None:
        """Nothing of the request is left but its statistics."""
        self.pool.free(r)
        r.reason, r.finished, r.status = reason, now, "finished"
        del self.known[r.id]
        self.waiting = [other for other in self.waiting if other is not r]

    def abort(self, request_id: int, now: float) -> None:
        """Unknown ids are ignored."""
        r = self.known.get(request_id)
        if r is not None:
            self.end(r, "abort", now)
            self.running = [other for other in self.running if other is not r]

    def schedule(self, now: float) -> Step:
        """Running pass, waiting pass, and what follows them."""
        step = Step({})
        budget = self.running_pass(step)
        if not step.preempted:
            self.waiting_pass(step, budget, now)
        self.record(step)
        for request_id, n in step.counts.items():
            r = self.known[request_id]
            r.computed += n
            if self.is_async and r.computed == len(r.tokens) + r.placeholders:
                r.placeholders += 1
        return step

    def running_pass(self, step: Step) -> int:
        """Returns the budget left."""
        budget: int = self.config["max_num_batched_tokens"]
        i = 0
        while i < len(self.running) and budget > 0:
            r = self.running[i]
            n = len(r.tokens) + r.drafts + r.placeholders - r.computed
            if 0 < self.threshold < n:
                n = self.threshold
            n = min(n, budget, self.max_len - 1 - r.computed)
            if n < 0:
                raise EngineWouldCrash("a prompt of max_model_len tokens")
            if n == 0:
                i += 1
                continue
            blocks = self.pool.allocate(r, n, [], 0, self.lookahead)
            while blocks is None:
                if self.preempt(step) is r:
                    return budget
                blocks = self.pool.allocate(r, n, [], 0, self.lookahead)
            step.counts[r.id], step.starts[r.id] = n, r.computed
            if any(blocks):
                step.blocks[r.id] = blocks
            budget -= n
            i += 1
            in_reach = n + r.computed - len(r.tokens)
            if r.drafts and in_reach > 0:
                r.drafts = step.drafts[r.id] = min(r.drafts, in_reach)
        return budget

    def preempt(self, step: Step) -> Request:
        """Put the least important running request back into the queue."""
        victim = max(self.running, key=lambda r: r.rank) if self.priority else self.running[-1]
        self.running.remove(victim)
        self.pool.free(victim)
        victim.status, victim.computed = "preempted", 0
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        self.sort_waiting()
        step.preempted.append(victim)
        if victim.id in step.counts:
            step.kinds[victim.id], step.starts[victim.id] = GHOST, 0
            step.blocks.pop(victim.id, None)
        return victim

    def waiting_pass(self, step: Step, budget: int, now: float) -> None:
        """Admit from the head of the queue."""
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.config["max_num_seqs"]:
            r = self.waiting[0]
            hit: list[list[int]] = []
            num_hit, start = 0, r.computed
            if r.computed == 0 and self.pool.caching and not r.prompt_logprobs:
                hit, num_hit = self.pool.lookup(r)
                start = num_hit
                for k, amount in enumerate((1, len(r.tokens), num_hit)):
                    step.lookups[k] += amount
            n = len(r.tokens) - start
            if 0 < self.threshold < n:
                n = self.threshold
            if not self.config["enable_chunked_prefill"] and n > budget:
                skipped.append(self.waiting.pop(0))
                continue
            n = min(n, budget)
            lookahead = self.lookahead if r.computed else 0
            if self.pool.allocate(r, n, hit, num_hit, lookahead) is None:
                break
            self.running.append(self.waiting.pop(0))
            step.kinds[r.id] = NEW if r.status == "waiting" else RESUMED
            if r.status == "waiting":
                r.scheduled = now
            r.status, r.computed = "running", start
            if r.cached < 0:
                r.cached = start
            step.counts[r.id], step.starts[r.id] = n, start
            step.blocks[r.id] = [list(table) for table in self.pool.tables[r.id]]
            budget -= n
        self.waiting = skipped[::-1] + self.waiting
        self.sort_waiting()

    def record(self, step: Step) -> None:
        """The keys of a recorded step that schedule() decides."""
        common: list[int] = []
        if self.running:
            common = self.pool.common_prefix(self.running[0], len(self.running))
        ids = list(step.counts)
        step.record.update(
            s=ids,
            n=[step.counts[i] for i in ids],
            c=[step.starts[i] for i in ids],
            fs=len(self.pool.free_queue),
            q=[len(self.running), len(self.waiting)],
        )
        optional: dict[str, Any] = {
            "k": [[i, step.kinds[i]] for i in ids if i in step.kinds],
            "b": [[i, block_runs(step.blocks[i])] for i in ids if i in step.blocks],
            "sp": [[i, step.drafts[i]] for i in ids if i in step.drafts],
            "pre": [r.id for r in step.preempted],
            "pq": step.lookups if step.lookups[0] else [],
            "cp": (common if len(common) > 1 else common[0]) if any(common) else 0,
            "wq": [r.id for r in self.waiting[:16]],
        }
        step.record.update({key: value for key, value in optional.items() if value})

    def update(self, step: Step, number: int, now: float) -> None:
        """Append the tokens of a step, end what is complete, take the new drafts."""
        finished: list[int] = []
        emitted = 0
        for request_id in step.counts:
            r = self.known.get(request_id)
            if r is None:
                continue
            num_tokens = step.tokens[request_id]
            if request_id in step.drafts:
                r.computed -= step.drafts[request_id] - (num_tokens - 1)
            kept = self.append(r, num_tokens)
            stopped = self.complete(r)
            if kept:
                emitted += kept
                r.token_steps.append((number, kept))
                r.token_times.append(now)
                if self.is_async:
                    r.placeholders -= kept
                    if r.status == "running" and self.pool.caching:
                        self.pool.commit(r, r.computed - r.placeholders)
            if kept and stopped:
                self.end(r, "length", now)
                finished.append(r.id)
        self.running = [r for r in self.running if r.status == "running"]
        for request_id, num_drafts in (step.new_drafts or {}).items():
            if request_id in self.known:
                self.known[request_id].drafts = num_drafts
        step.record.update(
            o=emitted,
            fu=len(self.pool.free_queue),
            fq=zlib.crc32(",".join(map(str, self.pool.free_queue)).encode()),
        )
        if self.pool.caching:
            step.record["nc"] = len(self.pool.cache)
        if finished:
            step.record["fin"] = finished

    def append(self, r: Request, num_tokens: int) -> int:
        """Append up to the stopping token; returns how many were kept."""
        kept = 0
        while kept < num_tokens:
            r.tokens.append(output_token(r.id, r.num_output))
            kept += 1
            if self.complete(r):
                break
        self.pool.extend_keys(r)
        return kept

    def complete(self, r: Request) -> bool:
        """Whether the length ends the request."""
        return len(r.tokens) >= self.max_len or r.num_output >= r.max_tokens


def block_runs(groups: list[list[int]]) -> list[Any]:
    """Blocks as first, count, …; one list a group if there are several."""
    result: list[list[int]] = []
    for blocks in groups:
        runs: list[int] = []
        for b in blocks:
            if runs and runs[-2] + runs[-1] == b:
                runs[-1] += 1
            else:
                runs += [b, 1]
        result.append(runs)
    return result if len(result) > 1 else result[0]
