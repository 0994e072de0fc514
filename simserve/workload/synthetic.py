"""Synthetic open-loop requests: an arrival process, a mix of request classes, shared prefixes.

Numbers are drawn as arrays, a chunk of arrivals at a time; requests are made one by one as they
are asked for. Every kind of number has a random stream of its own (see `streams`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simserve.segments import Segments
from simserve.types import TraceRequest
from simserve.workload.arrivals import ArrivalProcess
from simserve.workload.lengths import IndependentLengths, Length
from simserve.workload.streams import Stream, generator

__all__ = [
    "RequestClass",
    "SharedPrefix",
    "Synthetic",
    "apportion",
    "generate",
    "prefix_choice",
]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One kind of request in a mix: `count` of them exactly, or a share by `weight`."""

    lengths: IndependentLengths
    name: str = ""
    weight: float = 1.0
    count: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.weight < np.inf:
            raise ValueError(f"weight must be at least 0 and finite, got {self.weight}")
        if self.count is not None and self.count < 0:
            raise ValueError(f"count must be at least 0, got {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Shared system prompts: each request begins with the prefix of one of `num_groups` groups.

    The prefix stands before the request's own prompt, so `prompt_len` counts what follows it.
    How many requests a group gets is proportional to rank ** -zipf_alpha (0: all alike) and exact
    up to rounding; their order is shuffled.
    """

    num_groups: int
    prefix_len: Length
    zipf_alpha: float = 0.0
    prompts_per_group: int | None = None
    """Sets the number of requests to num_groups * prompts_per_group; needs zipf_alpha 0."""

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {self.num_groups}")
        if not 0 <= self.zipf_alpha < np.inf:
            raise ValueError(f"zipf_alpha must be at least 0 and finite, got {self.zipf_alpha}")
        if self.prompts_per_group is not None:
            if self.prompts_per_group < 1:
                raise ValueError(
                    f"prompts_per_group must be at least 1, not {self.prompts_per_group}"
                )
            if self.zipf_alpha:
                raise ValueError("prompts_per_group and zipf_alpha exclude each other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """An open-loop workload.

    `num_requests` may be left out if every class has a `count` or `prompts_per_group` is set.
    If it is given, classes with a `count` get that many and the others share what is left.
    """

    arrival: ArrivalProcess
    classes: tuple[RequestClass, ...]
    num_requests: int | None = None
    shared_prefix: SharedPrefix | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("classes must name at least one request class")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.total < 1:
            raise ValueError(f"num_requests must be at least 1, got {self.total}")
        self.class_counts()

    @property
    def total(self) -> int:
        """Number of requests. Raises ValueError if it is not given or given twice differently."""
        prefix = self.shared_prefix
        given = self.num_requests
        if prefix is not None and prefix.prompts_per_group is not None:
            grouped = prefix.num_groups * prefix.prompts_per_group
            if given not in (None, grouped):
                raise ValueError(
                    f"num_requests is {given}, but num_groups * prompts_per_group is {grouped}"
                )
            given = grouped
        if given is None:
            counts = [cls.count for cls in self.classes if cls.count is not None]
            if len(counts) < len(self.classes):
                raise ValueError("num_requests is needed unless every class has a count")
            given = sum(counts)
        return given

    def class_counts(self) -> list[int]:
        """How many requests of each class there are; they add up to `total`."""
        fixed = sum(cls.count or 0 for cls in self.classes)
        weights = [0.0 if cls.count is not None else cls.weight for cls in self.classes]
        rest = self.total - fixed
        if rest < 0 or (rest > 0 and not sum(weights) > 0):
            raise ValueError(f"num_requests is {self.total}, but the classes' counts make {fixed}")
        shares = apportion(rest, weights)
        return [
            share if cls.count is None else cls.count
            for cls, share in zip(self.classes, shares, strict=True)
        ]


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that add up to `total` (largest remainders).

    Equal remainders go to the earlier entries.
    """
    if not total:
        return [0] * len(weights)
    exact = np.asarray(weights, dtype=np.float64) * (total / sum(weights))
    shares = np.floor(exact).astype(np.int64)
    order = np.argsort(shares - exact, kind="stable")
    shares[order[: total - int(shares.sum())]] += 1
    return [int(share) for share in shares]


def prefix_choice(
    prefix: SharedPrefix | None, seed: int, count: int
) -> tuple[Ints, list[Segments]]:
    """Which group each of `count` requests belongs to, and the prefix of each group."""
    if prefix is None:
        return np.zeros(count, dtype=np.int64), [()]
    weights = np.arange(1, prefix.num_groups + 1, dtype=np.float64) ** -prefix.zipf_alpha
    groups = np.repeat(np.arange(prefix.num_groups), apportion(count, weights.tolist()))
    generator(seed, Stream.PREFIX_GROUP).shuffle(groups)
    lengths = prefix.prefix_len.draw(generator(seed, Stream.PREFIX_LEN), prefix.num_groups)
    return groups, [((f"prefix{g}", length),) for g, length in enumerate(lengths.tolist())]


def generate(spec: Synthetic) -> Iterator[TraceRequest]:
    """The requests of a synthetic workload in arrival order, made as they are asked for.

    Request i is called `r<i>`; its own prompt is the segment `r<i>/prompt`, a shared prefix
    the segment `prefix<group>`.
    """
    seed, total = spec.seed, spec.total
    kinds = np.repeat(np.arange(len(spec.classes), dtype=np.int32), spec.class_counts())
    generator(seed, Stream.MIX).shuffle(kinds)
    groups, prefixes = prefix_choice(spec.shared_prefix, seed, total)
    rngs = [
        (generator(seed, Stream.PROMPT_LEN, i), generator(seed, Stream.OUTPUT_LEN, i))
        for i in range(len(spec.classes))
    ]
    first = 0
    for times_s in spec.arrival.times(generator(seed, Stream.ARRIVALS), total):
        chunk = slice(first, first + len(times_s))
        lengths = np.empty((len(times_s), 2), dtype=np.int64)
        for i, cls in enumerate(spec.classes):
            chosen = kinds[chunk] == i
            lengths[chosen] = cls.lengths.draw(*rngs[i], int(chosen.sum()))
        columns = (times_s, kinds[chunk], groups[chunk], lengths[:, 0], lengths[:, 1])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for i, (arrival_s, kind, group, prompt_len, output_len) in enumerate(rows, first):
            yield TraceRequest(
                request_id=f"r{i}",
                arrival_s=arrival_s,
                prompt=(*prefixes[group], (f"r{i}/prompt", prompt_len)),
                output_len=output_len,
                class_=spec.classes[kind].name,
                priority=spec.classes[kind].priority,
            )
        first = chunk.stop
