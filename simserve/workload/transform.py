"""Changes to a stream of requests on their way to the engine; nothing is changed in place.

Every function takes requests in arrival order and yields new ones, lazily. What it drops or
changes is counted under its own name in the `Counter` that it is given. The names are those of
AIPerf where it has the same transform.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice

import numpy as np

from simserve.errors import TraceError
from simserve.segments import Segments, total_len
from simserve.types import MmItem, TraceRequest
from simserve.workload.rows import MAX_TOKENS
from simserve.workload.streams import Stream, generator

__all__ = [
    "Transforms",
    "max_isl",
    "max_osl",
    "num_requests",
    "output_len_multiplier",
    "prompt_len_multiplier",
    "speedup_ratio",
    "spread_ties_s",
    "time_slice",
    "truncate_to",
    "with_output_len",
    "without_lost_parents",
]

Requests = Iterable[TraceRequest]
Counts = Counter[str]
_Counted = Callable[..., Iterator[TraceRequest]]


def time_slice(
    requests: Requests, start_s: float, end_s: float, counts: Counts
) -> Iterator[TraceRequest]:
    """Keep start_s <= arrival < end_s and set the clock to 0 at `start_s`. Counts those dropped.

    Reads nothing after the first request at or past `end_s`, so that those are not counted.
    """
    for request in requests:
        if request.arrival_s >= end_s:
            return
        if request.arrival_s < start_s:
            counts["time_slice"] += 1
        else:
            yield replace(request, arrival_s=request.arrival_s - start_s)


def spread_ties_s(
    requests: Requests, width_s: float, seed: int, counts: Counts
) -> Iterator[TraceRequest]:
    """Spread requests that share an arrival evenly at random over the `width_s` that follow it.

    For traces with coarse clocks: `width_s` is the clock's tick. The order stays; a request never
    passes the next arrival in the trace; lone requests stay where they are, and those that wait for
    others, whose arrival is not the clock's, share it with the one before. Counts those spread.
    """
    rng = generator(seed, Stream.TIES)
    tied: list[TraceRequest] = []
    for request in requests:
        if tied and request.arrival_s != tied[0].arrival_s:
            room_s = min(width_s, request.arrival_s - tied[0].arrival_s)
            yield from _spread(tied, room_s, rng, counts)
            tied = []
        tied.append(request)
    yield from _spread(tied, width_s, rng, counts)


def _spread(
    tied: list[TraceRequest], room_s: float, rng: np.random.Generator, counts: Counts
) -> Iterator[TraceRequest]:
    num_arrivals = sum(request.parent is None for request in tied)
    if num_arrivals < 2:
        yield from tied
        return
    counts["spread_ties_s"] += num_arrivals
    offsets_s = iter((np.sort(rng.random(num_arrivals)) * room_s).tolist())
    offset_s = 0.0
    for request in tied:
        if request.parent is None:
            offset_s = next(offsets_s)
        yield replace(request, arrival_s=request.arrival_s + offset_s)


def speedup_ratio(requests: Requests, ratio: float) -> Iterator[TraceRequest]:
    """Divide arrivals and think times by `ratio`: 2 doubles the load."""
    for request in requests:
        yield replace(
            request,
            arrival_s=request.arrival_s / ratio,
            think_time_s=request.think_time_s / ratio,
        )


def prompt_len_multiplier(
    requests: Requests, multiplier: float, counts: Counts
) -> Iterator[TraceRequest]:
    """Scale prompt lengths, rounded, to at least 1. Counts the prompts changed.

    A shorter prompt loses its tail; a longer one gets a tail of its own, which nobody shares.

    Raises:
        TraceError: a prompt is then longer than one in a trace may be.
    """
    for request in requests:
        target = _scaled(request, request.prompt_len, multiplier, "prompt_len_multiplier")
        counts["prompt_len_multiplier"] += target != request.prompt_len
        yield _with_prompt_len(request, target)


def output_len_multiplier(
    requests: Requests, multiplier: float, counts: Counts
) -> Iterator[TraceRequest]:
    """Scale output lengths, rounded, to at least 1. Counts the outputs changed.

    Later turns keep the output that their prompts quote; they share what was really generated.

    Raises:
        TraceError: an output is then longer than one in a trace may be.
    """
    for request in requests:
        target = _scaled(request, request.output_len, multiplier, "output_len_multiplier")
        counts["output_len_multiplier"] += target != request.output_len
        yield with_output_len(request, target)


def truncate_to(requests: Requests, limit: int, counts: Counts) -> Iterator[TraceRequest]:
    """Cut prompts to their first `limit` tokens. Counts the prompts cut."""
    for request in requests:
        if request.prompt_len > limit:
            counts["truncate_to"] += 1
            request = _with_prompt_len(request, limit)
        yield request


def max_isl(requests: Requests, limit: int, counts: Counts) -> Iterator[TraceRequest]:
    """Drop requests whose prompt is longer than `limit` tokens. Counts those dropped."""
    for request in requests:
        if request.prompt_len > limit:
            counts["max_isl"] += 1
        else:
            yield request


def max_osl(requests: Requests, limit: int, counts: Counts) -> Iterator[TraceRequest]:
    """Cap outputs at `limit` tokens. Counts those capped."""
    for request in requests:
        if request.output_len > limit:
            counts["max_osl"] += 1
            request = with_output_len(request, limit)
        yield request


def without_lost_parents(requests: Requests, counts: Counts) -> Iterator[TraceRequest]:
    """Let turns whose parent is no longer there begin a session. Counts them as `lost_parent`.

    Remembers the ids of all requests.
    """
    kept: set[str] = set()
    for request in requests:
        if request.parent is not None and request.parent not in kept:
            counts["lost_parent"] += 1
            request = replace(request, parent=None, think_time_s=0.0)
        kept.add(request.request_id)
        yield request


def num_requests(requests: Requests, limit: int) -> Iterator[TraceRequest]:
    """The first `limit` requests; reads no further."""
    return islice(requests, limit)


def _scaled(request: TraceRequest, length: int, multiplier: float, name: str) -> int:
    scaled = length * multiplier
    if scaled > MAX_TOKENS:
        raise TraceError(
            f"request '{request.request_id}': {name}: {length} tokens times {multiplier:g} are "
            f"more than {MAX_TOKENS}"
        )
    return max(1, round(scaled))


def _cut(parts: Segments, length: int) -> Segments:
    """The first `length` tokens of `parts`."""
    kept = []
    for segment, part_len in parts:
        if length <= 0:
            break
        kept.append((segment, min(part_len, length)))
        length -= part_len
    return tuple(kept)


def _resized(parts: Segments, length: int, target: int, filler: str) -> Segments:
    return _cut(parts, target) if target <= length else (*parts, (filler, target - length))


def _with_prompt_len(request: TraceRequest, target: int) -> TraceRequest:
    length = request.prompt_len
    if target == length:
        return request

    def fits(item: MmItem) -> bool:
        return item.offset + item.length <= target

    return replace(
        request,
        prompt=_resized(request.prompt, length, target, f"{request.request_id}/longer"),
        mm_items=tuple(filter(fits, request.mm_items)),
    )


def with_output_len(request: TraceRequest, target: int) -> TraceRequest:
    """A request that generates `target` tokens: its first ones, or further ones of its own.

    Its `min_tokens` are as many at most.
    """
    output, sampling = request.output, request.sampling
    if output is not None:
        filler = f"{request.request_id}/longer-output"
        output = _resized(output, total_len(output), target, filler)
    if sampling and sampling.get("min_tokens", 0) > target:
        sampling = {**sampling, "min_tokens": target}
    return replace(request, output_len=target, output=output, sampling=sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transforms:
    """Which transforms to apply; None leaves one out. They run in the order of the fields.

    So slices and ticks are on the trace's own clock, and limits on lengths as they will be run.
    """

    start_s: float | None = None
    end_s: float | None = None
    spread_ties_s: float | None = None
    speedup_ratio: float | None = None
    prompt_len_multiplier: float | None = None
    output_len_multiplier: float | None = None
    truncate_to: int | None = None
    max_isl: int | None = None
    max_osl: int | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not math.isfinite(value):
                raise ValueError(f"{field.name} must be finite, got {value}")
            if field.name == "start_s":
                if value < 0:
                    raise ValueError(f"start_s must be at least 0, got {value}")
            elif value <= 0:
                raise ValueError(f"{field.name} must be greater than 0, got {value}")
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise ValueError(f"end_s must be later than start_s, got {self.end_s}")

    def apply(self, requests: Requests, counts: Counts, seed: int = 0) -> Iterator[TraceRequest]:
        """The transformed requests; `counts` is filled while they are read."""
        if self.start_s is not None or self.end_s is not None:
            end_s = math.inf if self.end_s is None else self.end_s
            requests = time_slice(requests, self.start_s or 0.0, end_s, counts)
        if self.spread_ties_s is not None:
            requests = spread_ties_s(requests, self.spread_ties_s, seed, counts)
        if self.speedup_ratio is not None:
            requests = speedup_ratio(requests, self.speedup_ratio)
        counted: tuple[tuple[_Counted, float | None], ...] = (
            (prompt_len_multiplier, self.prompt_len_multiplier),
            (output_len_multiplier, self.output_len_multiplier),
            (truncate_to, self.truncate_to),
            (max_isl, self.max_isl),
            (max_osl, self.max_osl),
        )
        for transform, value in counted:
            if value is not None:
                requests = transform(requests, value, counts)
        if self.start_s or self.max_isl is not None:
            requests = without_lost_parents(requests, counts)
        if self.num_requests is not None:
            requests = num_requests(requests, self.num_requests)
        return iter(requests)
