"""Configuration of the workload: a trace file or a synthetic one."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from simserve.config.base import (
    Count,
    OneOf,
    Positive,
    Registered,
    Seconds,
    Shape,
    StrictModel,
)
from simserve.config.decoding import Decoding
from simserve.config.distributions import Arrival, ConstantLength, Immediate, Length
from simserve.config.executor import OwnSampling
from simserve.workload.public import public_names

__all__ = [
    "RequestClass",
    "Sessions",
    "SharedPrefix",
    "SyntheticWorkload",
    "TraceWorkload",
    "Workload",
]


class TraceWorkload(StrictModel):
    """Requests from a file. The transforms apply in the order in which they stand here."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """The trace file, relative to this configuration file; or name."""
    name: Annotated[str, OneOf("public trace", public_names)] | None = None
    """A public trace that `simserve trace fetch` has downloaded."""
    format: Annotated[str, Registered("readers", "auto")] = "auto"
    """Name of the format; auto looks at the beginning of the file."""
    options: dict[str, JsonValue] = {}
    """Arguments of the format's reader, for example block_size."""
    start_s: Seconds = 0.0
    """Leave out requests that arrive before this time of the trace (seconds); it becomes time 0."""
    end_s: Positive | None = None
    """Leave out requests that arrive at or after this time of the trace (seconds)."""
    spread_ties_s: Positive | None = None
    """Spread arrivals that share a timestamp over so many seconds, at random (seeded)."""
    speedup: Positive = 1.0
    """Divide all gaps between arrivals, and think times, by this."""
    prompt_len_multiplier: Positive = 1.0
    """Factor on every prompt length."""
    output_len_multiplier: Positive = 1.0
    """Factor on every output length."""
    truncate_to: Count | None = None
    """Cut longer prompts to their first so many tokens."""
    max_isl: Count | None = None
    """Leave out requests with a longer prompt (tokens)."""
    max_osl: Count | None = None
    """Cap on the output length (tokens)."""
    num_requests: Count | None = None
    """Take the first so many requests."""

    @model_validator(mode="after")
    def _one_file(self) -> Self:
        if (self.path is None) == (self.name is None):
            raise ValueError("needs either path or name" + (", not both" if self.path else ""))
        return self

    @model_validator(mode="after")
    def _slice(self) -> Self:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s ({self.end_s:g}) is not after start_s ({self.start_s:g})")
        return self


class RequestClass(StrictModel):
    """One kind of request in a mix, say long or short."""

    name: Annotated[str, Field(min_length=1)]
    """What the class is called in the results."""
    weight: Positive = 1.0
    """Its share of the requests, relative to the other classes' weights."""
    count: Count | None = None
    """Exactly so many requests, whatever the weight."""
    prompt_len: Length | None = None
    """Prompt length (tokens). null: that of the workload."""
    output_len: Length | None = None
    """Output length (tokens). null: that of the workload."""
    priority: Annotated[int, Field(ge=-(10**9), le=10**9)] = 0
    """Lower is more important; counts with `scheduler.policy: priority`."""
    decoding: Decoding | None = None
    """How many sequences each becomes. null: that of the workload."""
    sampling: OwnSampling | None = None
    """How their tokens are chosen, over what `executor.sampling` says."""


class SharedPrefix(StrictModel):
    """System prompts, each shared by a group of requests; they stand before the own prompt."""

    num_groups: Count = 1
    """How many different prefixes there are."""
    prefix_len: Length
    """Length of each prefix (tokens); prompt_len counts what follows it."""
    zipf_alpha: Shape = 0.0
    """Group r gets requests in proportion to r**-zipf_alpha; 0: all alike."""


class Sessions(StrictModel):
    """Conversations. The prompt of a turn holds all that was said before, then new tokens.

    The arrival process places the first turns.
    """

    num_sessions: Count
    """How many conversations there are."""
    turns: Length
    """Number of turns of each."""
    think_time_s: Seconds = 0.0
    """Pause before each turn but the first (seconds): its mean, if it varies."""
    think_time: Literal["constant", "exponential"] = "constant"
    """How the pause varies."""
    loop: Literal["closed", "open"] = "closed"
    """Whether the pause counts from the end of the turn before, or from its arrival."""


class SyntheticWorkload(StrictModel):
    """Made-up requests. The defaults are those of `vllm bench serve --dataset-name random`."""

    num_requests: Count | None = None
    """How many. null: what sessions, or the counts of the classes, make; else 1000."""
    arrival: Arrival = Immediate(kind="immediate")
    """When requests, or sessions, arrive."""
    prompt_len: Length = ConstantLength(kind="constant", value=1024)
    """Length of each prompt (tokens), without a shared prefix."""
    output_len: Length = ConstantLength(kind="constant", value=128)
    """Tokens that each request generates."""
    classes: Annotated[tuple[RequestClass, ...], Field(strict=False)] = ()
    """A mix of kinds of requests, each with lengths of its own."""
    shared_prefix: SharedPrefix | None = None
    """System prompts that groups of requests share."""
    sessions: Sessions | None = None
    """Multi-turn conversations instead of single requests."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [one.name for one in self.classes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two classes are called '{name}'")
        if self.sessions is not None and self.num_requests is not None:
            raise ValueError("num_requests does not go with sessions, which make it")
        if self.sessions is not None and self.classes:
            raise ValueError("classes do not go with sessions")
        self._check_counts()
        return self

    def _check_counts(self) -> None:
        counts = [one.count for one in self.classes if one.count is not None]
        if self.num_requests is None or not counts:
            return
        all_counted = len(counts) == len(self.classes)
        if sum(counts) > self.num_requests or (all_counted and sum(counts) != self.num_requests):
            raise ValueError(
                f"num_requests is {self.num_requests}, but the classes' counts make {sum(counts)}"
            )

    @property
    def total(self) -> int | None:
        """Number of requests; None if sessions of random length decide."""
        if self.num_requests is not None or self.sessions is not None:
            return self.num_requests
        counts = [one.count for one in self.classes]
        if counts and None not in counts:
            return sum(count for count in counts if count is not None)
        return 1000


class Workload(StrictModel):
    """Where requests come from: a trace or a synthetic workload, one of the two."""

    trace: TraceWorkload | None = None
    """A trace file."""
    synthetic: SyntheticWorkload | None = None
    """Made-up requests."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What to do with a row of the trace that makes no sense; dropped rows are counted."""
    max_concurrency: Count | None = None
    """Requests in the system at a time; further ones wait outside. null: no limit."""
    decoding: Decoding | None = None
    """How many sequences each request becomes. null: one, or as many as the trace says (`n`)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError(
                "needs either trace or synthetic" + (", not both" if self.trace else "")
            )
        return self

    @property
    def decodings(self) -> dict[str, Decoding]:
        """Every key that says how requests are decoded, and what it says."""
        classes = self.synthetic.classes if self.synthetic else ()
        found = {
            f"synthetic.classes.{i}.decoding": one.decoding for i, one in enumerate(classes)
        } | {"decoding": self.decoding}
        return {key: decoding for key, decoding in found.items() if decoding is not None}

    @property
    def samplings(self) -> dict[str, OwnSampling]:
        """Every key of a class that says how its tokens are chosen, and what it says."""
        classes = self.synthetic.classes if self.synthetic else ()
        found = {f"synthetic.classes.{i}.sampling": one.sampling for i, one in enumerate(classes)}
        return {key: sampling for key, sampling in found.items() if sampling is not None}
