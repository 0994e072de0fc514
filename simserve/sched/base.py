"""What all schedulers share: the waiting queue, the running list, plans, admission and updates.

A policy of one's own derives from `BaseScheduler` and writes `schedule()`, out of `run_on`,
`admit` and `preempt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simserve.protocols import KVCacheManager, PrefixHit, SharingKVCacheManager
from simserve.sched.cohort import Cohort
from simserve.sched.params import SchedulerParams
from simserve.sched.queues import make_queue
from simserve.types import (
    FinishReason,
    Kind,
    Lookups,
    Request,
    Status,
    StepOutput,
    StepPlan,
    StepResult,
)

__all__ = ["BaseScheduler"]

_BY_LENGTH = (Status.FINISHED_LENGTH_CAPPED, "length")
_BY_STOP = (Status.FINISHED_STOPPED, "stop")


class BaseScheduler:
    """Queues and bookkeeping; subclasses decide.

    Args:
        params: limits and rules.
        kv: blocks and the prefix cache.
    """

    plans_ahead = False
    """Whether steps are planned before the tokens of earlier ones are known."""

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        self.params = params
        self.kv = kv
        self._sharing = kv if isinstance(kv, SharingKVCacheManager) else None
        self.waiting = make_queue(params.policy, params.as_engine)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        """All that are waiting or running, by id."""
        self.cohort: Cohort | None = None
        """Leading running requests that are decided for together, if the class does so."""
        self._finished_ids: list[str] = []
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        """Requests on the running list."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue, preempted ones included."""
        return len(self.waiting)

    def unfinished(self) -> Sequence[Request]:
        """All requests that wait or run."""
        return list(self.requests.values())

    # -- requests come and go --------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Take in a request."""
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request early, wherever it is; None if it is not known."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._leave(request)
        self._finish(request, Status.FINISHED_ABORTED, "abort")
        return request

    def _leave(self, request: Request) -> None:
        if request.status == Status.RUNNING:
            self.dissolve_cohort()
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _finish(self, request: Request, status: Status, reason: str) -> None:
        request.status = status
        request.finish_reason = reason
        self.kv.forget(request)
        del self.requests[request.request_id]
        self._finished_ids.append(request.request_id)

    def dissolve_cohort(self) -> None:
        """Go back to single requests: something is about to happen to one of them."""
        if self.cohort:
            self.cohort.dissolve(self.running)

    # -- one step --------------------------------------------------------------------------------

    def new_plan(self) -> StepPlan:
        """An empty plan; it carries the ids that ended since the last one."""
        # Every field at once: defaults would be made one call at a time, in every step.
        plan = StepPlan(self._num_steps, [], [], [], [], {}, {}, {}, [], self._finished_ids)
        self._finished_ids = []
        self._num_steps += 1
        return plan

    def run_on(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Schedule tokens of a running request; False, and nothing done, if no blocks are free."""
        if request.is_paced:
            self.dissolve_cohort()
        new_blocks = self.kv.allocate_slots(
            request, num_tokens, None, self.params.num_lookahead_tokens
        )
        if new_blocks is None:
            return False
        self._record(plan, request, num_tokens, new_blocks)
        return True

    def count_lookup(self, plan: StepPlan, request: Request, hit: PrefixHit | None) -> None:
        """Count a prefix-cache lookup in the plan's statistics; None means that none was made."""
        if hit is not None:
            requests, queries, hits = plan.lookups
            plan.lookups = Lookups(
                requests + 1, queries + request.num_tokens, hits + hit.num_tokens
            )

    def admit(
        self, plan: StepPlan, request: Request, num_tokens: int, hit: PrefixHit | None
    ) -> bool:
        """Move the queue's head to the running list; False, nothing done, if blocks are lacking.

        `num_tokens` are computed after the `hit` (or after what the request has computed already).
        """
        lookahead = self.params.num_lookahead_tokens if request.num_computed_tokens else 0
        found = hit if hit is not None and hit.num_tokens else None
        new_blocks = self.kv.allocate_slots(request, num_tokens, found, lookahead)
        if new_blocks is None:
            return False
        if found is not None:
            new_blocks = self.kv.get_block_ids(request)
        self.count_lookup(plan, request, hit)
        self.waiting.pop()
        self.running.append(request)
        resumed = request.status == Status.PREEMPTED
        plan.kinds[request.request_id] = Kind.RESUMED if resumed else Kind.NEW
        request.status = Status.RUNNING
        if hit is not None:
            request.num_computed_tokens = hit.num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
        self._record(plan, request, num_tokens, new_blocks)
        return True

    def preempt(self, plan: StepPlan, request: Request) -> None:
        """Take a running request's blocks and put it back into the queue; it will recompute."""
        self.dissolve_cohort()
        self.running.remove(request)
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.put_back(request)
        plan.preempted_ids.append(request.request_id)

    def _record(
        self,
        plan: StepPlan,
        request: Request,
        num_tokens: int,
        new_blocks: tuple[Sequence[int], ...],
    ) -> None:
        """Write a row of the plan; its tokens count as computed from now on."""
        request_id, start = request.request_id, request.num_computed_tokens
        plan.request_ids.append(request_id)
        plan.starts.append(start)
        plan.num_tokens.append(num_tokens)
        end = start + num_tokens
        plan.samples.append(end >= request.num_tokens + request.num_output_placeholders)
        request.num_computed_tokens = end
        if new_blocks:
            plan.new_blocks[request_id] = new_blocks

    def close_plan(self, plan: StepPlan) -> StepPlan:
        """Add what is known only when all is scheduled."""
        if self.running:
            plan.num_common_prefix_blocks = self.kv.get_num_common_prefix_blocks(
                self.running[0], len(self.running)
            )
            if self._sharing is not None:
                plan.num_shared_kv_tokens = self._sharing.num_shared_tokens
        return plan

    # -- its outcome -----------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Append the tokens of a step that has run; end the requests that have all they wanted.

        Of what ends a request length comes first: one whose last token is also a stop ends by it.
        """
        emitted, stops = list(result.num_emitted), result.stops
        if stops:
            self.dissolve_cohort()
        is_sampled = result.num_emitted is plan.samples
        first, finished = self._update_cohort(plan, emitted, is_sampled)
        if first < len(emitted):
            ended = self._update_each(plan, emitted, first, stops)
            if ended:
                finished += ended
                self.running = [r for r in self.running if r.status is Status.RUNNING]
        if result.draft_tokens is not None:
            self._take_drafts(result.draft_tokens)
        return StepOutput(emitted, finished)

    def _update_each(
        self, plan: StepPlan, emitted: list[int], first: int, stops: Mapping[str, int] | None
    ) -> list[Request]:
        """Tokens of the requests from row `first` on, one by one; who ended."""
        drafted, finished = plan.draft_tokens, []
        for i, request in enumerate(map(self.requests.get, plan.request_ids[first:]), first):
            if request is None:
                emitted[i] = 0
                continue
            num_tokens = emitted[i]
            if drafted and (drafts := drafted.get(request.request_id)):
                # Rejected drafts were counted as computed; without any token, not even one is kept.
                request.num_computed_tokens -= len(drafts) - (num_tokens - 1)
            if num_tokens:
                room, status = request.stop_len - request.num_tokens, _BY_LENGTH
                if stops and stops.get(request.request_id, room) < room:
                    room, status = stops[request.request_id], _BY_STOP
                if num_tokens >= room:
                    num_tokens = emitted[i] = max(1, room)
                request.num_tokens += num_tokens
                if self.plans_ahead:
                    self._token_appended(request, num_tokens)
                if num_tokens >= room:
                    finished.append(request)
                    self._finish_with_all(request, status)
        return finished

    def _update_cohort(
        self, plan: StepPlan, emitted: list[int], is_sampled: bool
    ) -> tuple[int, list[Request]]:
        """Tokens of the cohort: behind how many rows the others follow, and who ended.

        `is_sampled`: all yield what the plan samples, for the cohort one token each.
        """
        cohort = self.cohort
        if cohort is None or not cohort.ids:
            return 0, []
        rows, num_rows, last = plan.request_ids, len(cohort.ids), cohort.ids[-1]
        if len(rows) < num_rows or rows[num_rows - 1] != last:
            if last not in rows:
                return 0, []  # a plan that a subclass has made without them
            num_rows = rows.index(last) + 1
            self._drop_ended(rows[:num_rows], emitted)
        if not is_sampled and emitted[:num_rows].count(1) != len(cohort.ids):
            self.dissolve_cohort()
            return 0, []
        finished = cohort.update(self.running)
        for request in finished:
            self._finish_with_all(request, _BY_LENGTH)
        return num_rows, finished

    def _drop_ended(self, request_ids: Sequence[str], emitted: list[int]) -> None:
        """Requests that ended while the step was in flight yield nothing."""
        for i, request_id in enumerate(request_ids):
            if request_id not in self.requests:
                emitted[i] = 0

    def _take_drafts(self, draft_tokens: Mapping[str, Sequence[int]]) -> None:
        """New drafts replace the old ones; requests that are not named keep theirs."""
        self.dissolve_cohort()
        self.cohort = None
        for request_id, drafts in draft_tokens.items():
            if request_id in self.requests:
                self.requests[request_id].draft_tokens = drafts

    def _token_appended(self, request: Request, num_tokens: int) -> None:
        """Called if the class plans ahead of the tokens: one it planned with is known now."""

    def _finish_with_all(self, request: Request, how: tuple[Status, FinishReason]) -> None:
        if request.status == Status.PREEMPTED:
            self.waiting.remove(request)
        self._finish(request, *how)
