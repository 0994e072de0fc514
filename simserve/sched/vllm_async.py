"""Asynchronous scheduling as in vLLM v0.11.0: plan a step while the one before still runs."""

from __future__ import annotations

from simserve.protocols import KVCacheManager
from simserve.sched.params import SchedulerParams
from simserve.sched.vllm import VllmScheduler
from simserve.types import Request, Status, StepPlan

__all__ = ["VllmAsyncScheduler"]


class VllmAsyncScheduler(VllmScheduler):
    """Plans with placeholders for tokens that are still being computed.

    Nothing checks max_tokens ahead of time: a request is normally scheduled once more after the
    step of its last token, and that output is ignored.
    """

    plans_ahead = True

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        super().__init__(params, kv)
        self._num_calm = 0
        """Steps scheduled since one that preempted."""

    def close_plan(self, plan: StepPlan) -> StepPlan:
        """A request that yields a token in this step gets a placeholder for it."""
        super().close_plan(plan)
        self._num_calm = 0 if plan.preempted_ids else self._num_calm + 1
        others = plan.request_ids
        if self.cohort:
            self.cohort.expect_token()
            others = others[len(self.cohort.ids) :]
        for request_id in others:
            request = self.requests[request_id]
            known = request.num_tokens + request.num_output_placeholders
            if request.num_computed_tokens == known:
                request.num_output_placeholders += 1
        return plan

    def _token_appended(self, request: Request, num_tokens: int) -> None:
        """The token is known: its placeholder goes, and blocks it completes are committed."""
        request.num_output_placeholders -= num_tokens
        if request.status == Status.RUNNING:
            self.kv.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )

    def steady_steps(self, plan: StepPlan) -> int:
        """As for steps one by one; the step before `plan` is still in flight.

        A request preempted in that step would get a token of it while it waits.
        """
        return super().steady_steps(plan) if self._num_calm > 1 else 1
