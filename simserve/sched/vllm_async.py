"""Asynchronous scheduling as in vLLM v0.11.0: plan a step while the one before still runs."""

from __future__ import annotations

from simserve.sched.vllm import VllmScheduler
from simserve.types import Request, Status, StepPlan

__all__ = ["VllmAsyncScheduler"]


class VllmAsyncScheduler(VllmScheduler):
    """Plans with placeholders for tokens that are still being computed.

    Nothing checks max_tokens ahead of time: a request is normally scheduled once more after the
    step of its last token, and that output is ignored.
    """

    plans_ahead = True

    def close_plan(self, plan: StepPlan) -> StepPlan:
        """A request that yields a token in this step gets a placeholder for it."""
        super().close_plan(plan)
        for request_id in plan.request_ids:
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
