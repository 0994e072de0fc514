"""Static batching: a batch runs until its last request has ended, and only then comes the next."""

from __future__ import annotations

from simserve.protocols import KVCacheManager
from simserve.sched.options import read_int_options, require_whole_prompts
from simserve.sched.params import SchedulerParams
from simserve.sched.recompute import RecomputingScheduler
from simserve.types import StepPlan

__all__ = ["FcfsStaticScheduler"]


class FcfsStaticScheduler(RecomputingScheduler):
    """The baseline that continuous batching replaced.

    When nothing runs, a batch is taken from the queue's head: as many requests as `max_num_seqs`,
    the blocks and, for their whole prompts together, `max_num_batched_tokens` allow. Its first step
    computes the prompts, each further step one token of every request. Nobody joins while one of
    the batch runs (`admission_stop` is `batch`); who ends early leaves an empty place. A request
    that is preempted, because blocks run out, is the first of the next batch.

    Prompts are never cut, whatever `enable_chunked_prefill` says. There are no options.

    Raises:
        ConfigError: an option or a threshold is given, or a prompt may exceed the budget.
    """

    whole_prompts = True

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        read_int_options("fcfs_static", params, {})
        require_whole_prompts("fcfs_static", params)
        super().__init__(params, kv)

    def schedule(self) -> StepPlan:
        """Decide one step and count its tokens as computed."""
        plan = self.new_plan()
        if self.running:
            self.decode(plan, self.params.max_num_batched_tokens)
            plan.admission_stop = "batch" if self.waiting else "empty"
        else:
            self.admit_from_queue(plan, self.params.max_num_batched_tokens)
        return self.close_plan(plan)

    def _may_admit(self) -> bool:
        """Nobody joins a batch."""
        return not self.running
