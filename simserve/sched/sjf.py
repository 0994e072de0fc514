"""Shortest job first: the prompt with the fewest tokens left, less what it gains by waiting."""

from __future__ import annotations

from simserve.errors import ConfigError, Problem
from simserve.protocols import KVCacheManager
from simserve.sched.options import read_int_options, require_whole_prompts
from simserve.sched.params import SchedulerParams
from simserve.sched.ranked_queue import Rank, RankedQueue
from simserve.sched.recompute import RecomputingScheduler
from simserve.types import Request, Status, StepPlan

__all__ = ["SjfScheduler"]


class SjfScheduler(RecomputingScheduler):
    """Decodes first; then prompts by the tokens they still have to compute, shortest first.

    A short prompt that arrives overtakes a longer one in the queue, and one that is under way,
    which keeps its blocks meanwhile. Ageing: each step since it arrived counts as
    `ageing_tokens_per_step` tokens less. Of two requests the earlier one, with r tokens left, is
    therefore overtaken only if the later one came less than r / ageing_tokens_per_step steps after
    it: nobody starves. With 0 there is no such bound. Equal ranks go by arrival. The order does not
    look into the prefix cache, which would cost a lookup for each waiting request in each step.

    The best in the queue is never passed over: if it does not fit, nobody is admitted. Prompts are
    cut to the budget and by `long_prefill_token_threshold`, with `enable_chunked_prefill: false`
    never. Decodes preempt whoever was admitted last. Prompts wait for blocks; if nobody at all
    finds any, the prompt with the most left gives way.

    Options:
        ageing_tokens_per_step: tokens, 1 by default.

    Raises:
        ConfigError: a wrong option, a policy of the queue's own (`priority`), or prompts are not
            to be cut and may exceed the budget.
    """

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        known = {"ageing_tokens_per_step": (1, 0)}
        self.ageing = read_int_options("sjf", params, known)["ageing_tokens_per_step"]
        if params.policy != "fcfs":
            message = f"sjf orders the queue itself, it cannot be '{params.policy}' too"
            raise ConfigError([Problem(path="scheduler.policy", message=message)])
        self.whole_prompts = not params.enable_chunked_prefill
        if self.whole_prompts:
            require_whole_prompts("sjf without chunked prefill", params)
        super().__init__(params, kv)
        self.waiting = RankedQueue(self._rank)
        self._arrived_at: dict[str, int] = {}
        """Number of the step before which each request came."""

    def add_request(self, request: Request) -> None:
        """Take in a request."""
        self._arrived_at[request.request_id] = self._num_steps
        super().add_request(request)

    def _finish(self, request: Request, status: Status, reason: str) -> None:
        super()._finish(request, status, reason)
        del self._arrived_at[request.request_id]

    def _rank(self, request: Request) -> Rank:
        """The lowest goes first. All age alike, so the step of arrival stands for the age."""
        arrived_at = self._arrived_at[request.request_id]
        left = request.num_tokens - request.num_computed_tokens
        return left + self.ageing * arrived_at, arrived_at

    def schedule(self) -> StepPlan:
        """Decide one step and count its tokens as computed."""
        plan = self.new_plan()
        self._prefill(plan, self.decode(plan, self.params.max_num_batched_tokens))
        if self.running and not plan.request_ids:
            self._make_room(plan)
        return self.close_plan(plan)

    def _prefill(self, plan: StepPlan, budget: int) -> None:
        """Prompts under way and in the queue, in one order, until one of them finds no room."""
        under_way = [r for r in self.running if r.num_tokens > r.num_computed_tokens]
        for request in sorted(under_way, key=self._rank):
            while self._is_overtaken(request):
                if not (num_tokens := self.admit_head(plan, budget)):
                    return
                budget -= num_tokens
            if not (num_tokens := self.continue_prompt(plan, request, budget)):
                return
            budget -= num_tokens
        self.admit_from_queue(plan, budget)

    def _is_overtaken(self, request: Request) -> bool:
        if not self.waiting or len(self.running) >= self.params.max_num_seqs:
            return False
        return self._rank(self.waiting.peek()) < self._rank(request)

    def _make_room(self, plan: StepPlan) -> None:
        """Nobody found blocks: whoever has the most left gives way, if it is in anybody's way."""
        last = max(self.running, key=self._rank)
        if len(self.running) > 1 or self._is_overtaken(last):
            self.preempt(plan, last)
