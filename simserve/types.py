"""The nouns everything above shares: requests, plans, results, model shapes and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.segments import Segments, total_len

__all__ = [
    "GPU",
    "AdmissionStop",
    "FinishReason",
    "Kind",
    "Lookups",
    "MmItem",
    "ModelShape",
    "Pace",
    "Request",
    "ScheduledRequest",
    "Status",
    "StepOutput",
    "StepPlan",
    "StepResult",
    "StepRun",
    "TraceRequest",
    "seconds_at",
]


class Status(IntEnum):
    """Where a request is. Anything after PREEMPTED is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_LENGTH_CAPPED = 3
    FINISHED_ABORTED = 4
    FINISHED_STOPPED = 5


class Kind(IntEnum):
    """How a request came into a step."""

    RUNNING = 0
    NEW = 1
    RESUMED = 2
    GHOST = 3
    """Preempted after it was scheduled in this same step, yet still in the step's token counts."""


FinishReason = str
"""`length`, `stop` or `abort`."""

AdmissionStop = str
"""What ended admission in a step: `budget`, `max_num_seqs`, `blocks`, `preemption` or `empty`;
`batch`: a policy that admits nobody before its batch has ended."""


class MmItem(NamedTuple):
    """A multimodal item: its place in the prompt and its identity (it has no content here)."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request as a workload gives it. Nothing above the workload changes it."""

    request_id: str
    arrival_s: float
    prompt: Segments
    output_len: int
    """Tokens to generate; at most so many where a model chooses them (vLLM: max_tokens)."""
    output: Segments | None = None
    """Identity of the generated tokens; None: a segment of the request's own."""
    class_: str = ""
    priority: int = 0
    """Lower is more important."""
    session: str | None = None
    turn: int = 0
    parent: str | None = None
    """The request whose end this one waits for (closed loop)."""
    think_time_s: float = 0.0
    cache_salt: str | None = None
    lora_id: int | str | None = None
    mm_items: tuple[MmItem, ...] = ()
    prompt_logprobs: bool = False
    """Prompt log-probabilities need every prompt token computed: no prefix lookup."""
    n: int = 1
    """Sequences asked for. The workload makes a request of each before the engine sees them."""
    group: str | None = None
    """The request of the user that this one is a part of, if it is not the whole of it."""
    sibling: int = 0
    """Which of the sequences of its group it is, where they are drawn side by side."""
    sampling: Mapping[str, Any] | None = None
    """Fields of `RequestSampling` that the request gives itself, over those of the executor's."""
    logprobs: int | None = None
    """Log-probabilities wanted of each token and of so many of the likeliest; None: as the executor
    is configured. Only a real executor has any."""

    @property
    def prompt_len(self) -> int:
        """Tokens in the prompt."""
        return total_len(self.prompt)

    @property
    def output_parts(self) -> Segments:
        """Identity of the generated tokens."""
        return self.output or ((output_segment(self.request_id), self.output_len),)


def output_segment(request_id: str) -> str:
    """Name of the segment that a request's generated tokens make."""
    return f"{request_id}/output"


class Pace:
    """How far the requests that take one token in every step have come, counted in steps."""

    __slots__ = ("placeholders", "scheduled", "updated")

    def __init__(self) -> None:
        self.scheduled = 0
        """Steps scheduled."""
        self.updated = 0
        """Steps whose tokens are known."""
        self.placeholders = 0
        """Tokens planned with and not yet known, where steps are planned ahead."""


class Request:
    """Mutable scheduling state of one request. All counts are tokens.

    A request can join others that take one token in every step. Its counts then follow from their
    common `Pace`, and nobody has to visit it.
    """

    __slots__ = (
        "_computed",
        "_known",
        "_pace",
        "_placeholders",
        "arrival_s",
        "draft_tokens",
        "finish_reason",
        "max_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "priority",
        "prompt_len",
        "request_id",
        "slots_until",
        "status",
        "stop_len",
        "trace",
    )

    def __init__(self, trace: TraceRequest, max_model_len: int) -> None:
        self.trace = trace
        self.request_id = trace.request_id
        self.arrival_s = trace.arrival_s
        self.priority = trace.priority
        self.prompt_len = trace.prompt_len
        self.max_tokens = trace.output_len
        self.stop_len = min(max_model_len, self.prompt_len + self.max_tokens)
        """The request ends by length when it has this many tokens."""
        self.status = Status.WAITING
        self._known = self.prompt_len
        self._computed = 0
        self._pace: Pace | None = None
        self.slots_until = 0
        """Set by the KV manager: as long as no more tokens than this are computed or looked ahead
        for, `allocate_slots` of a running request has nothing to do."""
        self.draft_tokens: Sequence[int] = ()
        self._placeholders = 0
        self.num_cached_tokens = -1
        """Prefix hit at the first admission; -1 before it."""
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known to the scheduler."""
        return self._known if self._pace is None else self._known + self._pace.updated

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        self._known = value if self._pace is None else value - self._pace.updated

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens that have, or are about to get, KV entries."""
        return self._computed if self._pace is None else self._computed + self._pace.scheduled

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self._computed = value if self._pace is None else value - self._pace.scheduled

    @property
    def num_output_placeholders(self) -> int:
        """Tokens planned with and not yet known, where steps are planned ahead."""
        pace = self._pace
        return self._placeholders if pace is None else self._placeholders + pace.placeholders

    @num_output_placeholders.setter
    def num_output_placeholders(self, value: int) -> None:
        self._placeholders = value if self._pace is None else value - self._pace.placeholders

    @property
    def is_paced(self) -> bool:
        """Whether its counts follow from a pace that it has joined."""
        return self._pace is not None

    def join(self, pace: Pace) -> int:
        """Take one token in every step from now on; what to add to steps for computed tokens."""
        self._known -= pace.updated
        self._computed -= pace.scheduled
        self._placeholders -= pace.placeholders
        self._pace = pace
        return self._computed

    def leave(self) -> None:
        """Stay where the common pace has brought it."""
        pace = self._pace
        if pace is not None:
            self._known += pace.updated
            self._computed += pace.scheduled
            self._placeholders += pace.placeholders
            self._pace = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_len

    @property
    def is_finished(self) -> bool:
        """Whether the status is final."""
        return self.status > Status.PREEMPTED


class ScheduledRequest(NamedTuple):
    """One request's share of a step, as a row of a `StepPlan`."""

    request_id: str
    kind: Kind
    start: int
    """Tokens computed before the step."""
    num_tokens: int
    samples: bool
    """Whether the step reaches the request's last known token, so that it yields a token."""
    new_blocks: tuple[Sequence[int], ...]
    """Per KV group: newly added blocks; the whole table for new and resumed requests."""
    draft_tokens: Sequence[int]


class Lookups(NamedTuple):
    """Prefix-cache lookups: how many, tokens asked for, tokens found."""

    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass(slots=True)
class StepPlan:
    """What the scheduler decided for one step. Columns, because a step is priced as a whole.

    `request_ids`, `starts`, `num_tokens` and `samples` run in parallel, in the order scheduled:
    running requests first, then those admitted (policies may mix them). Sparse facts are mappings
    by request id.
    A plan is not changed after `schedule()` has returned it.
    """

    step: int
    request_ids: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Only those that are not `Kind.RUNNING`."""
    new_blocks: dict[str, tuple[Sequence[int], ...]] = field(default_factory=dict)
    draft_tokens: dict[str, Sequence[int]] = field(default_factory=dict)
    preempted_ids: list[str] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    """Requests that ended since the last plan: an executor forgets them."""
    num_common_prefix_blocks: tuple[int, ...] = ()
    num_shared_kv_tokens: int = 0
    """Tokens in KV blocks that running requests have together: each block counts once for every
    one of them but the first."""
    lookups: Lookups = Lookups()
    admission_stop: AdmissionStop = "empty"

    @property
    def total_num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_tokens)

    @property
    def scheduled(self) -> Iterator[ScheduledRequest]:
        """The plan row by row."""
        for i, request_id in enumerate(self.request_ids):
            yield ScheduledRequest(
                request_id,
                self.kinds.get(request_id, Kind.RUNNING),
                self.starts[i],
                self.num_tokens[i],
                self.samples[i],
                self.new_blocks.get(request_id, ()),
                self.draft_tokens.get(request_id, ()),
            )


class StepRun(NamedTuple):
    """`count` steps of the same requests and token counts; starts advance by those counts."""

    plan: StepPlan
    count: int = 1  # type: ignore[assignment]  # a number of steps, not tuple.count


@dataclass(slots=True)
class StepResult:
    """What an executor reports of a `StepRun`.

    `ends_s` are absolute times on the engine's clock, one a step; `parts` name where the time of
    each step went (seconds): an array of the same length, or a number that holds for every step.
    Both are cut by the engine when a run is interrupted.
    """

    ends_s: Sequence[float]
    parts: Mapping[str, float | NDArray[np.float64]]
    num_emitted: Sequence[int]
    """Tokens each request of the plan yields in each step of the run."""
    draft_tokens: Mapping[str, Sequence[int]] | None = None
    """New drafts per request ([] clears); None: the drafter was not run, old drafts stay."""
    gap_s: float = 0.0
    """Time after each of the steps, when its tokens are out, before the next can be scheduled."""
    stops: Mapping[str, int] | None = None
    """Requests that a token of the step ends, and how many of its tokens they keep, that one
    included. Those after it are dropped."""


def seconds_at(seconds: float | NDArray[np.float64], step: int) -> float:
    """A part of a `StepResult`, or of a price, in one step of its run."""
    return seconds if isinstance(seconds, (float, int)) else float(seconds[step])


class StepOutput(NamedTuple):
    """What `Scheduler.update` made of a result."""

    num_emitted: Sequence[int]
    """Tokens kept, per request of the plan (those after a stop are dropped)."""
    finished: Sequence[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a transformer that decide FLOPs and bytes."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    num_experts: int = 1
    num_experts_per_tok: int = 1
    sliding_window: int | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """A GPU as its data sheet has it. FLOP/s are dense; bytes are 1, not 1024-based, unless GiB."""

    name: str
    memory_gib: float
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Dense matrix FLOP/s by dtype: bfloat16, float16, float8, float32."""
    source: str
