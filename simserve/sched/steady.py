"""Decodes that are decided for together, and the promise of steps that hold nothing else."""

from __future__ import annotations

from simserve.errors import SimserveError
from simserve.protocols import Grown, KVCacheManager
from simserve.sched.base import BaseScheduler
from simserve.sched.cohort import Cohort
from simserve.sched.params import SchedulerParams
from simserve.types import Request, StepPlan

__all__ = ["DecodesInStep"]


class DecodesInStep(BaseScheduler):
    """Running requests get one token each in every step in which they decode, in their order."""

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        super().__init__(params, kv)
        if kv.decodes is not None and not params.num_lookahead_tokens:
            self.cohort = Cohort(kv.decodes, params.max_model_len, int(self.plans_ahead))

    def schedule_cohort(self, plan: StepPlan, budget: int) -> int:
        """The common case at once: leading requests that want one token, and blocks for all.

        Decides for them what a walk over the running list would, first of all in a step; how many
        they are, 0 if it is not that case.
        """
        cohort, running = self.cohort, self.running
        if cohort is None:
            return 0
        if len(cohort.ids) < len(running):
            cohort.take_in(running)
        count = len(cohort.ids)
        if not count:
            return 0
        if count > budget or not cohort.schedule(plan):
            self.dissolve_cohort()
            return 0
        return count

    def steady_steps(self, plan: StepPlan) -> int:
        """For how many steps, `plan` included, it would decide just that if nothing arrives.

        All running requests decode one token each, nobody can be admitted, nobody ends before the
        last of these steps, and blocks last.
        """
        return 1 if self._may_admit() else self._steady_steps(plan, None)

    def advance(self, plan: StepPlan, count: int) -> Grown:
        """Pass over `count` steps: all but the last are updated, all are scheduled.

        `plan` was the first of them. Returns what each but the first took, `count - 1` numbers.
        """
        if self.cohort is None:
            raise SimserveError("only steps that were promised to be steady can be passed over")
        self._num_steps += count - 1
        return self.cohort.advance(count - 1)

    def _may_admit(self) -> bool:
        """Whether the queue's head is looked at in a step like the last one."""
        return bool(self.waiting) and len(self.running) < self.params.max_num_seqs

    def _steady_steps(self, plan: StepPlan, head: Request | None) -> int:
        """As `steady_steps`, if nobody but `head` could be admitted, who lacks blocks."""
        cohort = self.cohort
        if cohort is None or plan.preempted_ids:
            return 1
        if not 0 < len(cohort.ids) == len(self.running) == len(plan.request_ids):
            return 1
        return cohort.steady_steps(head)
