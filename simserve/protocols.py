"""The seams. Each protocol is what one room offers to the ones above; there is no code here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from simserve.types import Request, StepOutput, StepPlan, StepResult, StepRun, TraceRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CostModel",
    "Decodes",
    "Executor",
    "GaugedKVCacheManager",
    "Grown",
    "KVCacheManager",
    "LoopCost",
    "PrefixHit",
    "Price",
    "Recorder",
    "Scheduler",
    "SharingKVCacheManager",
    "SteadyScheduler",
    "StepRecord",
    "TimedIntake",
    "TokenOutcome",
    "TokenOutcomes",
    "TraceReader",
    "Workload",
]


class Workload(Protocol):
    """Requests over time. Open loop ignores `finished`; sessions answer it with the next turn."""

    def next_arrival(self) -> float | None:
        """Time of the earliest request not yet taken (s), or None if none is known now."""
        ...

    def take(self) -> TraceRequest:
        """Hand over the request that `next_arrival` announced."""
        ...

    def finished(self, request_id: str, now_s: float, completed: bool = True) -> None:
        """A request ended (not `completed`: aborted or rejected); later turns may need it."""
        ...

    @property
    def num_requests(self) -> int | None:
        """How many requests there will be in all, if known (for progress)."""
        ...


class TraceReader(Protocol):
    """Reads one file format, row by row."""

    name: str

    def sniff(self, path: Path, head: str) -> bool:
        """Whether the first kilobytes of a file look like this format."""
        ...

    def read(self, path: Path, **options: Any) -> Iterator[TraceRequest]:
        """Yield requests in file order. Raises TraceError naming file, row and field."""
        ...


class PrefixHit(NamedTuple):
    """A prefix found in the cache: blocks per KV group (0 is the null block) and its tokens."""

    blocks: tuple[NDArray[np.int64], ...]
    num_tokens: int


class Grown(NamedTuple):
    """Blocks that each of some steps took, and how many of those evicted a cached one."""

    taken: Sequence[int]
    evicted: Sequence[int]


class Decodes(Protocol):
    """Requests that take one slot in every step, in the order of the running list.

    What each step needs is known beforehand, so that nothing is asked request by request. The
    scheduler adds a request when it joins the common pace, and takes it out before its blocks are
    touched in any other way.
    """

    def add(self, request: Request) -> bool:
        """Take in a request that has just joined; False, and nothing done, if it cannot be."""
        ...

    def remove(self, request: Request) -> None:
        """It leaves, with the slots it has taken so far. Called before `request.leave()`."""
        ...

    def take_slots(self) -> dict[str, tuple[Sequence[int], ...]] | None:
        """A slot for each; the new blocks of those that needed one. None: too few were free."""
        ...

    def steps_that_fit(self, limit: int, head: Request | None = None) -> int:
        """For how many further steps the free blocks last (at most `limit`).

        `head` is a waiting request that found too few blocks: nor may its prefix hit change.
        """
        ...

    def grow(self, count: int) -> Grown:
        """`take_slots` for so many further steps, in the same order; what each of them took."""
        ...


class KVCacheManager(Protocol):
    """Blocks, tables and the prefix cache. `num_gpu_blocks` includes the null block."""

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    num_groups: int

    @property
    def decodes(self) -> Decodes | None:
        """Handles requests that take one slot in every step; None: the scheduler asks for each."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, evictable cached ones included."""
        ...

    @property
    def evicted_cached_blocks(self) -> int:
        """Blocks with cached content that were handed out for other content, since the start."""
        ...

    def get_computed_blocks(self, request: Request) -> PrefixHit | None:
        """Longest usable cached prefix; None if the cache is not asked. Touches nothing."""
        ...

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        num_lookahead_tokens: int = 0,
    ) -> tuple[Sequence[int], ...] | None:
        """Make room for tokens. New blocks per group, () if none were needed, None if it failed.

        On failure nothing has changed (but blocks out of a sliding window are dropped).
        """
        ...

    def can_hold(self, num_tokens: int, num_chunk_tokens: int) -> bool:
        """Whether an otherwise empty pool could hold a request that computes so many tokens.

        `num_chunk_tokens` is the most it computes in one step.
        """
        ...

    def can_hold_all(self, request: Request, hit: PrefixHit | None = None) -> bool:
        """Whether blocks for all tokens of a waiting request, after its `hit`, are free now."""
        ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Commit the full blocks of the first `num_computed_tokens` tokens to the prefix cache."""
        ...

    def uncommit(self, request: Request, num_computed_tokens: int) -> None:
        """Take its blocks beyond the first `num_computed_tokens` tokens out of the prefix cache."""
        ...

    def free(self, request: Request) -> None:
        """Give back a request's blocks, last first. The cache keys stay. Idempotent."""
        ...

    def forget(self, request: Request) -> None:
        """Free what a finished request holds and drop all that is known of it."""
        ...

    def get_block_ids(self, request: Request) -> tuple[Sequence[int], ...]:
        """The block table of a request, per KV group: copies, nobody changes them later."""
        ...

    def get_num_common_prefix_blocks(self, request: Request, num_running: int) -> tuple[int, ...]:
        """Leading blocks of `request` that all running requests share, per KV group."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Drop all cache keys if no block is in use; whether it did."""
        ...


@runtime_checkable
class SharingKVCacheManager(Protocol):
    """What an allocator may offer: how much of its memory several requests use."""

    @property
    def num_shared_tokens(self) -> int:
        """Tokens in blocks of several requests: each block counts once for all but one of them."""
        ...


@runtime_checkable
class GaugedKVCacheManager(Protocol):
    """What an allocator may offer: numbers of its own, such as fragmentation, for every step.

    It offers no `decodes`, so that no step is passed over.
    """

    def gauges(self) -> Mapping[str, int]:
        """Current values by name; the names never change."""
        ...


class Scheduler(Protocol):
    """Decides what runs in each step."""

    @property
    def num_running(self) -> int:
        """Requests on the running list."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue, preempted ones included."""
        ...

    def unfinished(self) -> Sequence[Request]:
        """All requests that wait or run."""
        ...

    def add_request(self, request: Request) -> None:
        """Take in a request."""
        ...

    def abort(self, request_id: str) -> Request | None:
        """End a request early, wherever it is; None if it is not known."""
        ...

    def schedule(self) -> StepPlan:
        """Decide one step and count its tokens as computed."""
        ...

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in the tokens of a step that has run."""
        ...


@runtime_checkable
class SteadyScheduler(Protocol):
    """What a scheduler may offer so that runs of equal steps are taken at once."""

    def steady_steps(self, plan: StepPlan) -> int:
        """For how many steps, `plan` included, it would decide just that if nothing arrives."""
        ...

    def advance(self, plan: StepPlan, count: int) -> Grown:
        """Pass over `count` steps, `plan` the first of them: update and schedule again, each.

        Afterwards the state is that after the schedule() of the last of them, so that its update()
        is still to come. Returns what each but the first took, `count - 1` numbers each. Where
        steps are planned ahead, the step before `plan` has been updated when this is called, and
        the update() of the last two is still to come.
        """
        ...


class Price(NamedTuple):
    """Duration of each step of a run (s), and the named parts that add up to it."""

    durations_s: Sequence[float]
    parts: Mapping[str, float | NDArray[np.float64]]
    """A number holds for every step of the run."""


class CostModel(Protocol):
    """Prices steps, a run at once: element k equals, bit for bit, what step k alone costs.

    A message may end a run before all steps that were priced are taken; then others follow under
    their numbers. A model that remembers steps goes by `plan.step`.
    """

    def price(self, run: StepRun) -> Price:
        """Durations of the `run.count` steps of a run, each > 0 if the plan has tokens."""
        ...


@runtime_checkable
class LoopCost(Protocol):
    """What a cost model may offer: time of the engine's loop between steps, when no model runs.

    A step's tokens are out at its end; only then comes this time, and then the next step. It is not
    spent while steps are planned ahead (asynchronous scheduling): there it hides behind a step.
    """

    def after_step_s(self, plan: StepPlan) -> float:
        """From the end of a step to the look at what has arrived (s)."""
        ...

    def take_in_s(self, request: TraceRequest, first: bool) -> float:
        """To take in one request that has arrived, the `first` since the last step or not (s)."""
        ...


@runtime_checkable
class TimedIntake(Protocol):
    """What an executor may offer: taking in a request takes time."""

    def taken_in_s(self, request: TraceRequest, now_s: float) -> float:
        """When a request is taken in, if that begins at `now_s` (s)."""
        ...


class Executor(Protocol):
    """Runs steps: on a cost model or on a GPU. Nothing above knows which."""

    single_steps: bool
    """Whether it takes one step at a time only: what a step yields decides the next one."""

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in: its tokens may be asked for from now on."""
        ...

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Start steps at `start_s`, on the engine's clock; not more than one run is in progress,
        or two where steps are planned ahead."""
        ...


class TokenOutcome(Protocol):
    """What a model has given a request. Lists run in parallel, one item a token."""

    token_ids: list[int]
    ids: list[NDArray[np.int32]]
    """The chosen token, then the likeliest ones, the likeliest first."""
    logprobs: list[NDArray[np.float32]]
    """Natural logarithms of the probabilities of `ids`, by the model alone."""
    finish_reason: str | None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the chosen tokens' log-probabilities."""
        ...


class TokenOutcomes(Protocol):
    """Where a workload finds what came of its requests; only a real executor has any."""

    def take(self, request_id: str) -> TokenOutcome:
        """Hand over the outcome of a request that has completed, once."""
        ...


class StepRecord(NamedTuple):
    """What a recorder is told of a run of steps when it is over."""

    run: StepRun
    start_s: float
    result: StepResult
    output: StepOutput
    scheduled_at_s: float
    """Time of the schedule() call; differs from `start_s` under async scheduling."""
    num_running: int
    num_waiting: int
    num_free_blocks: Sequence[int] | NDArray[np.int64]
    """After the schedule() of each step of the run, shape [count]."""
    num_evicted_blocks: Sequence[int] | NDArray[np.int64]
    """Cached blocks that the schedule() of each step evicted, shape [count]."""
    gauges: Mapping[str, int] = {}
    """What the KV manager reports of itself after the schedule() of a single step, if it does."""


class Recorder(Protocol):
    """Listens to the engine. Times are seconds on the engine's clock."""

    def arrived(self, request: TraceRequest, now_s: float) -> None:
        """The engine took a request in (its `arrival_s` may be earlier)."""
        ...

    def rejected(self, request: TraceRequest, reason: str, now_s: float) -> None:
        """A request that can never run was turned away."""
        ...

    def aborted(self, request: Request, now_s: float) -> None:
        """A request was ended from outside."""
        ...

    def stepped(self, record: StepRecord) -> None:
        """A run of steps is over and its tokens are out."""
        ...

    def ended(self, status: str, now_s: float, unfinished: Sequence[Request]) -> None:
        """The simulation is over: `completed`, `interrupted`, `deadlock` or `max_steps`."""
        ...
