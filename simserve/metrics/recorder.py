"""Listens to the engine and keeps what all statistics are made of.

Called once a run of steps with plans of hundreds of requests, so it spends time on what changes
between steps only. Given a sink, it hands out rows a large group at a time and keeps the numbers
that a summary needs; without one, everything stays here until `data()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from simserve.errors import SimserveError
from simserve.metrics.outputs import Output
from simserve.metrics.prefill_chunks import PrefillChunks, PrefillLog
from simserve.metrics.prefix_note import SharingProbe
from simserve.metrics.request_log import Outcome, RequestColumns, RequestLog
from simserve.metrics.spec_decode import SpecDecode
from simserve.metrics.step_log import StepColumns, StepLog
from simserve.metrics.token_times import TokenLog, TokenTimes
from simserve.metrics.unshared import unshared_blocks
from simserve.protocols import StepRecord
from simserve.types import Kind, Request, Status, StepPlan, TraceRequest
from simserve.workload.prefix_tree import PrefixTree

__all__ = ["ROW_GROUP", "RequestRows", "RowSink", "RunData", "RunRecorder", "StepRows"]

ROW_GROUP = 1 << 15
"""Rows that are handed out at a time."""


class RequestRows(NamedTuple):
    """Some requests that follow one another in the order in which the engine took them in."""

    requests: RequestColumns
    times: TokenTimes
    prefills: PrefillChunks


class StepRows(NamedTuple):
    """Some steps that follow one another."""

    steps: StepColumns
    num_gpu_blocks: int
    enable_prefix_caching: bool


class RowSink(Protocol):
    """Takes the rows of a run's tables, each in order; of requests and steps whole groups but for
    the last."""

    def add_requests(self, rows: RequestRows) -> None:
        """`ROW_GROUP` requests that have all ended, or the last ones."""
        ...

    def add_steps(self, rows: StepRows) -> None:
        """`ROW_GROUP` steps, or the last ones."""
        ...

    def add_output(self, output: Output) -> None:
        """What a request was given by a model; it has ended."""
        ...


@dataclass(slots=True, kw_only=True)
class RunData:
    """Everything measured in one simulation. Times are seconds on the engine's clock.

    After rows were handed to a sink, what no summary needs is not here: texts and prefills of
    requests, parts of steps.
    """

    status: str
    end_s: float
    requests: RequestColumns
    steps: StepColumns
    times: TokenTimes
    prefills: PrefillChunks
    num_gpu_blocks: int
    enable_prefix_caching: bool
    num_stopped: int
    """Requests that a token ended, before they had as many as they might."""
    num_ghosts: int
    num_resumed: int
    prefix_cache_note: str | None
    spec_decode: SpecDecode
    max_unshared_blocks: int
    """Most blocks that the requests of one step would have filled if they had shared none; counted
    from the first request on that is one of a group."""

    @property
    def start_s(self) -> float:
        """The first arrival; 0 without any."""
        arrivals = self.requests.arrival_s
        return float(arrivals.min()) if len(arrivals) else 0.0


class RunRecorder:
    """The recorder of one simulation (protocol `Recorder`).

    Args:
        num_gpu_blocks: size of the pool, the null block included.
        block_size: tokens per block.
        enable_prefix_caching: whether there is a prefix cache.
        decode_threshold: a request with at most so many tokens in a step counts as a decode.
        sink: takes all rows of the tables.
        row_group: how many at a time.
        shares_prefixes: whether prompts can begin alike; if not, no common prefix is looked for.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        decode_threshold: int = 1,
        sink: RowSink | None = None,
        row_group: int = ROW_GROUP,
        shares_prefixes: bool = True,
    ) -> None:
        self._num_gpu_blocks = num_gpu_blocks
        self._enable_prefix_caching = enable_prefix_caching
        self._sink = sink
        self._row_group = row_group
        self._requests = RequestLog(row_group)
        self._steps = StepLog(decode_threshold)
        self._tokens = TokenLog()
        self._probe = None
        if enable_prefix_caching:
            self._probe = SharingProbe(block_size, shares_prefixes)
        # Without anything to share, a tree of all prompts would only take memory.
        self._prefixes = PrefixTree(block_size) if shares_prefixes else None
        self._num_lookups = 0
        self._prompt_lens: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        """Tokens of live requests that chunks without an emission have computed."""
        self._prefills = PrefillLog()
        self._behind: dict[str, int] = {}
        """Preempted requests: how many tokens they had computed before."""
        self._num_stopped = 0
        self._spec_decode = SpecDecode()
        self._num_ghosts = 0
        self._num_resumed = 0
        self._block_size = block_size
        self._max_unshared_blocks = 0
        self._ended: tuple[str, float] | None = None
        self._note: str | None = None

    @property
    def num_requests(self) -> int:
        """Requests that reached the engine, rejected ones included."""
        return len(self._requests)

    def arrived(self, request: TraceRequest, now_s: float) -> None:
        """The engine took a request in at `now_s`."""
        self._prompt_lens[request.request_id] = prompt_len = request.prompt_len
        common = self._prefixes.common_len(request) if self._prefixes is not None else 0
        self._requests.add(request, prompt_len, now_s, common)
        if self._probe is not None:
            self._probe.see(request, prompt_len)

    def rejected(self, request: TraceRequest, reason: str, now_s: float) -> None:
        """A request that can never run was turned away."""
        self._requests.reject(request, reason, now_s)
        self._forget([request.request_id])

    def aborted(self, request: Request, now_s: float) -> None:
        """A request was ended from outside; the tokens it had got are kept in its row."""
        self._end([request], Outcome.ABORTED, now_s)

    def stepped(self, record: StepRecord) -> None:
        """A run of steps is over. Lookups and the admission stop hold for each of its steps,
        preemptions and admissions for the first, finished requests for the last."""
        plan, count = record.run
        step = self._steps.num_steps
        num_emitted = record.output.num_emitted
        self._steps.add(record)
        if plan.draft_tokens or record.result.draft_tokens is not None:
            self._spec_decode.add(record)
        if self._requests.has_groups:
            unshared = unshared_blocks(record.run, self._block_size)
            self._max_unshared_blocks = max(self._max_unshared_blocks, unshared)
        if plan.kinds or plan.preempted_ids or self._behind:
            self._admissions(plan, count, record.scheduled_at_s)
        if plan.kinds or self._prefills.open:
            self._prefills.stepped(record.run, num_emitted, step, self._requests.rows)
        if not all(num_emitted):
            self._chunks(plan, num_emitted)
        self._tokens.emit(plan.request_ids, num_emitted, step, self._requests.rows)
        if plan.preempted_ids:
            self._preemptions(plan, step + count)
        if plan.lookups.requests and self._probe is not None:
            self._lookups(plan, count)
        if record.output.finished:
            now_s = record.result.ends_s[-1]
            self._end(record.output.finished, Outcome.COMPLETED, now_s)
            if self._sink is not None:
                self._hand_out(self._sink)

    def ended(self, status: str, now_s: float, unfinished: Sequence[Request]) -> None:
        """The simulation is over.

        Raises:
            SimserveError: a request is neither finished nor in a queue, or both.
        """
        live = self._requests.rows
        for request in unfinished:
            if request.request_id in live:
                outcome = Outcome.RUNNING if request.status == Status.RUNNING else Outcome.QUEUED
                self._requests.set_standing(request.request_id, outcome, request.num_cached_tokens)
        self._check_none_lost(live, [request.request_id for request in unfinished])
        self._ended = (status, now_s)

    def data(self) -> RunData:
        """All that was measured; call it after `ended`, once if there is a sink.

        Raises:
            SimserveError: the simulation has not ended, or a column lacks values.
        """
        if self._ended is None:
            raise SimserveError("the simulation has not ended yet")
        status, end_s = self._ended
        if self._sink is not None:
            self._hand_out(self._sink)
            self._sink.add_steps(self._step_rows(self._steps.rest()))
        rest = self._last_requests()
        if self._sink is not None:
            self._sink.add_requests(rest)
        steps = self._steps.columns()
        evicted = int(steps.evicted_cached_blocks.sum())
        note = None
        # Without a probe the cache is off or has hit; with no step nothing could have hit.
        if self._probe is not None and steps.num_steps:
            note = self._probe.note(self._num_lookups, evicted)
        if self._sink is not None:
            self._probe = self._prefixes = None  # a summary of a long run needs the memory
        return RunData(
            status=status,
            end_s=end_s,
            requests=self._requests.columns(),
            steps=steps,
            times=self._tokens.times(steps.end_s, rest.times),
            prefills=rest.prefills,
            num_gpu_blocks=self._num_gpu_blocks,
            enable_prefix_caching=self._enable_prefix_caching,
            num_stopped=self._num_stopped,
            num_ghosts=self._num_ghosts,
            num_resumed=self._num_resumed,
            prefix_cache_note=note,
            spec_decode=self._spec_decode,
            max_unshared_blocks=self._max_unshared_blocks,
        )

    def _hand_out(self, sink: RowSink) -> None:
        """Give the sink what makes whole groups."""
        group = self._row_group
        while self._steps.num_steps - self._steps.num_taken >= group:
            sink.add_steps(self._step_rows(self._steps.take(group)))
        while self._requests.may_take:
            first = self._requests.num_taken
            sink.add_requests(
                RequestRows(
                    self._requests.take(),
                    self._tokens.take(self._steps.ends_s(), first, first + group),
                    self._prefills.take(first, first + group),
                )
            )

    def _step_rows(self, steps: StepColumns) -> StepRows:
        return StepRows(steps, self._num_gpu_blocks, self._enable_prefix_caching)

    def _last_requests(self) -> RequestRows:
        """The requests that no sink has got so far."""
        first, num_rows = self._requests.num_taken, len(self._requests)
        return RequestRows(
            self._requests.rest(),
            self._tokens.rest(self._steps.ends_s(), first, num_rows),
            self._prefills.rest(first, num_rows),
        )

    def _admissions(self, plan: StepPlan, count: int, scheduled_at_s: float) -> None:
        """First admissions, and what preempted requests compute again."""
        for request_id, kind in plan.kinds.items():
            if kind is Kind.NEW:
                self._requests.scheduled(request_id, scheduled_at_s)
            elif kind is Kind.RESUMED:
                self._num_resumed += 1
            elif kind is Kind.GHOST:
                self._num_ghosts += 1
        if self._behind:
            for place, request_id in enumerate(plan.request_ids):
                if request_id in self._behind:
                    start = plan.starts[place]
                    self._catch_up(request_id, start, start + count * plan.num_tokens[place])

    def _catch_up(self, request_id: str, start: int, stop: int) -> None:
        """Tokens `start` … `stop` are computed; those it had before are recomputed."""
        had = self._behind[request_id]
        row = self._requests.rows.get(request_id)
        if row is not None and start < had:
            self._requests.recomputed_tokens[row] += min(stop, had) - start
        if stop >= had:
            del self._behind[request_id]

    def _chunks(self, plan: StepPlan, num_emitted: Sequence[int]) -> None:
        """Note how far requests have come that computed tokens without yielding one."""
        place, left = -1, num_emitted.count(0)
        for _ in range(left):
            place = num_emitted.index(0, place + 1)
            request_id = plan.request_ids[place]
            if request_id in self._prompt_lens:
                stop = plan.starts[place] + plan.num_tokens[place]
                self._computed[request_id] = max(self._computed.get(request_id, 0), stop)

    def _preemptions(self, plan: StepPlan, next_step: int) -> None:
        for request_id in plan.preempted_ids:
            row = self._requests.rows.get(request_id)
            if row is None:
                continue
            self._requests.num_preemptions[row] += 1
            num_output = self._tokens.num_tokens(request_id, next_step)
            # The newest token is sampled, not yet computed.
            decoded = self._prompt_lens[request_id] + num_output - 1 if num_output else 0
            had = max(decoded, self._computed.get(request_id, 0), self._behind.get(request_id, 0))
            self._behind[request_id] = had

    def _lookups(self, plan: StepPlan, count: int) -> None:
        self._num_lookups += plan.lookups.requests * count
        if plan.lookups.hits:
            self._probe = None

    def _end(self, requests: Sequence[Request], outcome: Outcome, now_s: float) -> None:
        for request in requests:
            reason, num_cached = request.finish_reason, request.num_cached_tokens
            self._num_stopped += request.status is Status.FINISHED_STOPPED
            self._requests.preempted(request.request_id, request.num_preemptions)
            self._requests.end(request.request_id, outcome, reason, now_s, num_cached)
        self._forget([request.request_id for request in requests])

    def _forget(self, request_ids: list[str]) -> None:
        self._tokens.finish(request_ids, self._steps.num_steps)
        self._prefills.forget(request_ids)
        for request_id in request_ids:
            self._prompt_lens.pop(request_id, None)
            self._computed.pop(request_id, None)
            self._behind.pop(request_id, None)

    @staticmethod
    def _check_none_lost(live: dict[str, int], unfinished: list[str]) -> None:
        lost = sorted(live.keys() - set(unfinished))
        strange = sorted(set(unfinished) - live.keys())
        if not lost and not strange and len(unfinished) == len(live):
            return
        named = ", ".join(repr(request_id) for request_id in (lost or strange or unfinished)[:5])
        what = (
            f"{len(lost)} request(s) neither ended nor are in a queue: {named}"
            if lost
            else f"{len(strange)} unfinished request(s) had ended or never arrived: {named}"
            if strange
            else f"unfinished requests are listed twice: {named}"
        )
        raise SimserveError(
            f"requests do not add up: {what}; injected must be completed + running + queued + "
            "rejected + aborted (the scheduler loses or repeats requests)"
        )
