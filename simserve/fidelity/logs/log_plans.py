"""The plans that a step log recorded, as the scheduler would have written them."""

from __future__ import annotations

from collections.abc import Iterator

from simserve.fidelity.logs.vllm_log import StepLog
from simserve.types import Kind, StepPlan

__all__ = ["log_plans"]


def log_plans(log: StepLog) -> Iterator[StepPlan]:
    """One plan a step, in order; without block ids and statistics, which logs do not hold.

    A request is new in its first step, resumed in the first after a preemption, and yields a token
    where it reaches its last known one.
    """
    known = [request.prompt_len for request in log.requests]
    seen = [False] * len(known)
    preempted: set[int] = set()
    for step in range(len(log.steps)):
        victims = log.steps.preempted.get(step, ())
        plan = StepPlan(step, preempted_ids=[str(victim) for victim in victims])
        for request, num_tokens, start in log.steps.rows(step):
            request_id = str(request)
            samples = start + num_tokens >= known[request]
            if not seen[request]:
                seen[request] = True
                plan.kinds[request_id] = Kind.NEW
            elif request in preempted:
                preempted.discard(request)
                plan.kinds[request_id] = Kind.RESUMED
            plan.request_ids.append(request_id)
            plan.starts.append(start)
            plan.num_tokens.append(num_tokens)
            plan.samples.append(samples)
            known[request] += samples
        preempted.update(victims)
        yield plan
