"""The rest of the plain model: a made-up model runner, the clock, both engine loops, records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.sched.reference_pool import (
    VOCABULARY,
    EngineWouldCrash,
    Pool,
    Request,
    output_token,
)
from tests.sched.reference_scheduler import GHOST, RESUMED, Scheduler, Step

__all__ = ["EngineWouldCrash", "simulate"]


def prompt_tokens(parts: list[Any]) -> list[int]:
    """The tokens of a prompt in the notation of the cases."""
    tokens: list[int] = []
    for part in parts:
        if part[0] == "o":
            tokens += [output_token(part[1], j) for j in range(part[2])]
        else:
            tokens += [(part[0] * 1000003 + j * 7919) % VOCABULARY for j in range(part[1])]
    return tokens


class Model:
    """The made-up model: which requests yield, how many drafts it accepts, how long it takes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.cost = config["cost"]
        self.spec = config["spec"]
        self.max_len = config["max_model_len"]
        self.batch: set[int] = set()

    def run(self, step: Step, known: dict[int, Request]) -> float:
        """Fill in the tokens and drafts of a step; returns its duration."""
        s1 = s2 = longest = 0
        for request_id, n in step.counts.items():
            r = known[request_id]
            ghost = step.kinds.get(request_id) == GHOST
            if ghost and request_id not in self.batch:
                raise EngineWouldCrash("a ghost that the runner does not hold")
            if not ghost:
                r.runner_computed = step.starts[request_id]
            s1 += n
            s2 += n * (step.starts[request_id] + n)
            longest = max(longest, r.runner_computed + n)
            num_tokens = 0
            if r.runner_computed + n >= r.runner_tokens:
                num_tokens = 1 + self.accepted(r, step.drafts.get(request_id, 0))
            step.tokens[request_id] = num_tokens
            r.runner_tokens += num_tokens
        if step.counts:
            self.batch = set(step.counts)
            if self.spec and longest + self.spec["num"] <= self.max_len:
                step.new_drafts = {i: self.drafted(known[i], num) for i, num in step.tokens.items()}
        a, b, c = self.cost
        duration: float = a + b * s1 + c * s2 if s1 > 0 else 0.0
        return duration

    def accepted(self, r: Request, num_drafts: int) -> int:
        """Drafts accepted."""
        if not num_drafts:
            return 0
        a, b = self.spec["accept"]
        num_output = r.runner_tokens - r.prompt_len
        right: int = (r.id * a + num_output * b) % (self.spec["num"] + 1)
        return min(num_drafts, right)

    def drafted(self, r: Request, num_tokens: int) -> int:
        """Drafts for the next step."""
        k: int = self.spec["num"]
        if self.spec["method"] == "eagle":
            return k
        if num_tokens == 0:
            return 0
        c, d = self.spec["draft_len"]
        return int(r.id * c + (r.runner_tokens - r.prompt_len) * d) % (k + 1)


class World:
    """The clock, the events, and the two engine loops."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.config, workload = case["config"], case["workload"]
        self.scheduler = Scheduler(self.config, Pool(self.config))
        self.model = Model(self.config)
        self.now = 0.0
        self.steps: list[Step] = []
        self.resets: list[Any] = []
        self.requests = [
            Request(
                w["id"],
                w["t"],
                prompt_tokens(w["prompt"]),
                w["out"],
                w.get("prio", 0),
                w.get("salt"),
                bool(w.get("plp")),
            )
            for w in workload["requests"]
        ]
        events: list[tuple[float, int, int, Any]] = [
            (r.arrival, 0, i, r) for i, r in enumerate(self.requests)
        ]
        events += [(t, 1, i, who) for i, (t, who) in enumerate(workload.get("aborts", ()))]
        events += [(t, 2, i, None) for i, t in enumerate(workload.get("resets", ()))]
        self.events = sorted(events, key=lambda event: event[:3])

    def deliver(self) -> None:
        """Everything due by now."""
        while self.events and self.events[0][0] <= self.now:
            _, kind, _, what = self.events.pop(0)
            if kind == 0:
                what.queued = self.now
                self.scheduler.add(what)
            elif kind == 1:
                self.scheduler.abort(what, self.now)
            else:
                self.resets.append([round(self.now, 9), self.scheduler.pool.reset()])

    def wait(self) -> bool:
        """On to the next event; False if there is none."""
        if self.events:
            self.now = max(self.now, self.events[0][0])
        return bool(self.events)

    def begin(self, start: float) -> Step:
        """schedule() and the model; the step starts at `start` or now, if that is later."""
        step = self.scheduler.schedule(self.now)
        start = max(start, self.now)
        step.end = start + self.model.run(step, self.scheduler.known)
        step.record["t"] = [round(start, 9), round(step.end, 9)]
        if self.config["async_scheduling"]:
            step.record["ts"] = round(self.now, 9)
        self.steps.append(step)
        return step

    def run(self) -> str:
        """Returns how it ended."""
        loop = self.run_async() if self.config["async_scheduling"] else self.run_sync()
        for outcome in loop:
            if len(self.steps) >= self.config["max_steps"] and self.scheduler.known:
                return "max_steps"
            if outcome:
                return outcome
        return "done"

    def run_sync(self) -> Iterator[str | None]:
        """One step at a time. Yields after each: None, or how the run ended."""
        while True:
            self.deliver()
            if not self.scheduler.known:
                if not self.wait():
                    return
                continue
            step = self.begin(0.0)
            self.now = step.end
            self.scheduler.update(step, len(self.steps) - 1, self.now)
            stuck = not step.counts and not step.preempted and not self.wait()
            yield "deadlock" if stuck else None

    def run_async(self) -> Iterator[str | None]:
        """Two batches in flight."""
        free_at = 0.0
        flight: list[tuple[int, Step]] = []
        while True:
            self.deliver()
            if not self.scheduler.known and not flight:
                if not self.wait():
                    return
                continue
            idle = True
            if self.scheduler.known:
                step = self.begin(free_at)
                free_at = step.end
                flight.append((len(self.steps) - 1, step))
                idle = not step.counts and not step.preempted
                if step.counts and len(flight) == 1 and step.end > self.now:
                    continue
            number, oldest = flight.pop(0)
            self.now = max(self.now, oldest.end)
            self.scheduler.update(oldest, number, self.now)
            idle = idle and not oldest.counts
            stuck = idle and not flight and bool(self.scheduler.known) and not self.wait()
            yield "deadlock" if stuck else None


def simulate(case: dict[str, Any]) -> dict[str, Any]:
    """Steps, requests and summary of a case, from its `config` and `workload`.

    Raises:
        EngineWouldCrash: the modelled engine would not survive the case.
    """
    world = World(case)
    end = world.run()
    records = [step.record for step in world.steps]
    kinds = [kind for step in world.steps for kind in step.kinds.values()]
    summary: dict[str, Any] = {
        "end": end,
        "steps": len(records),
        "end_time": round(world.now, 9),
        "preemptions": sum(len(step.preempted) for step in world.steps),
        "ghosts": kinds.count(GHOST),
        "resumed": kinds.count(RESUMED),
        "scheduled_tokens": sum(sum(record["n"]) for record in records),
        "output_tokens": sum(record.get("o", 0) for record in records),
        "prefix_queries": sum(step.lookups[1] for step in world.steps),
        "prefix_hits": sum(step.lookups[2] for step in world.steps),
        "unfinished": sorted(r.id for r in world.requests if r.finished is None),
        "runner_would_crash": False,
    }
    if world.resets:
        summary["resets"] = world.resets
    rows = [request_row(r) for r in sorted(world.requests, key=lambda r: r.id)]
    return {"steps": records, "requests": rows, "summary": summary}


def request_row(r: Request) -> dict[str, Any]:
    """The recorded keys of a request."""
    runs: list[int] = []
    for number, count in r.token_steps:
        if runs and runs[-3] + runs[-2] == number and runs[-1] == count:
            runs[-2] += 1
        else:
            runs += [number, 1, count]
    row: dict[str, Any] = {
        "id": r.id,
        "pre": r.preemptions,
        "cached": r.cached if r.finished is not None else -1,
        "ntok": r.num_output,
        "reason": r.reason,
        "tok": runs,
    }
    if r.finished is None:
        return row
    row["fin"] = round(r.finished, 9)
    if r.token_times:
        row["ttft"] = round(r.token_times[0] - r.arrival, 9)
    if r.token_times and r.reason == "length":
        assert r.scheduled is not None
        first, last = r.token_times[0], r.token_times[-1]
        row["queue"] = round(r.scheduled - r.queued, 9)
        row["prefill"] = round(first - r.scheduled, 9)
        row["decode"] = round(last - first, 9)
        row["e2e"] = round(last - r.arrival, 9)
        row["tpot"] = round((last - first) / (r.num_output - 1), 9) if r.num_output > 1 else 0
    return row
