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
    "BlockStats",
    "CostModel",
    "Executor",
    "GaugedKVCacheManager",
    "Grown",
    "KVCacheManager",
    "PrefixHit",
    "Price",
    "Recorder",
    "Scheduler",
    "SteadyScheduler",
    "StepRecord",
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

    blocks: tuple[NDArray[np.int32], ...]
    num_tokens: int


class Grown(NamedTuple):
    """Blocks that each of some steps took, and how many of those evicted a cached one."""

    taken: NDArray[np.int64]
    evicted: NDArray[np.int64]


class BlockStats(NamedTuple):
    """Counters of a KV pool since its start."""

    evicted_cached_blocks: int
    num_cached_keys: int


class KVCacheManager(Protocol):
    """Blocks, tables and the prefix cache. `num_gpu_blocks` includes the null block."""

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    num_groups: int

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, evictable cached ones included."""
        ...

    @property
    def stats(self) -> BlockStats:
        """Counters since the start."""
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

    def append_slots(self, requests: Sequence[Request]) -> Mapping[str, tuple[Sequence[int], ...]]:
        """`allocate_slots` for one known token of each request; a block for each must be free.

        Returns the new blocks of those that needed some.
        """
        ...

    def can_hold(self, num_tokens: int, num_chunk_tokens: int) -> bool:
        """Whether an otherwise empty pool could hold a request that computes so many tokens.

        `num_chunk_tokens` is the most it computes in one step.
        """
        ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Commit the full blocks of the first `num_computed_tokens` tokens to the prefix cache."""
        ...

    def free(self, request: Request) -> None:
        """Give back a request's blocks, last first. The cache keys stay. Idempotent."""
        ...

    def forget(self, request: Request) -> None:
        """Free what a finished request holds and drop all that is known of it."""
        ...

    def get_block_ids(self, request: Request) -> tuple[Sequence[int], ...]:
        """The block table of a request, per KV group."""
        ...

    def get_num_common_prefix_blocks(self, request: Request, num_running: int) -> tuple[int, ...]:
        """Leading blocks of `request` that all running requests share, per KV group."""
        ...

    def steps_that_fit(
        self, requests: Sequence[Request], limit: int, head: Request | None = None
    ) -> int:
        """For how many further steps of one token each the free blocks last (at most `limit`).

        `head` is a waiting request that found too few blocks: nor may its prefix hit change.
        """
        ...

    def grow(self, requests: Sequence[Request], count: int) -> Grown:
        """Allocate `count` further single-token steps of all requests, in single-step order.

        Reads `num_computed_tokens` as it was before these steps, and does not change it.
        Returns what each of the steps took, arrays of shape [count].
        """
        ...

    def reset_prefix_cache(self) -> bool:
        """Drop all cache keys if no block is in use; whether it did."""
        ...


@runtime_checkable
class GaugedKVCacheManager(Protocol):
    """What an allocator may offer: numbers of its own, such as fragmentation, for every step.

    Its `steps_that_fit` answers 0, so that no step is passed over.
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
        is still to come. Returns what each but the first took, arrays of shape [count - 1].
        """
        ...


class Price(NamedTuple):
    """Duration of each step of a run (s), and the named parts that add up to it."""

    durations_s: NDArray[np.float64]
    parts: Mapping[str, NDArray[np.float64]]


class CostModel(Protocol):
    """Prices steps, a run at once: element k equals, bit for bit, what step k alone costs."""

    def price(self, run: StepRun) -> Price:
        """Durations of the `run.count` steps of a run, each > 0 if the plan has tokens."""
        ...


class Executor(Protocol):
    """Runs steps: on a cost model or on a GPU. Nothing above knows which."""

    single_steps: bool
    """Whether it takes one step at a time only: what a step yields decides the next one."""

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in: its tokens may be asked for from now on."""
        ...

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Start steps at `start_s`, on the engine's clock; not more than one run is in progress."""
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
    num_free_blocks: NDArray[np.int64]
    """After the schedule() of each step of the run, shape [count]."""
    num_evicted_blocks: NDArray[np.int64]
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
