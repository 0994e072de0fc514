"""Prefill first: whole prompts as soon as they fit, in steps of their own (vLLM V0, Orca)."""

from __future__ import annotations

from simserve.protocols import KVCacheManager
from simserve.sched.options import read_int_options, require_whole_prompts
from simserve.sched.params import SchedulerParams
from simserve.sched.recompute import RecomputingScheduler
from simserve.types import StepPlan

__all__ = ["PrefillFirstScheduler"]


class PrefillFirstScheduler(RecomputingScheduler):
    """Continuous batching with steps of one kind: prefills or decodes, never both.

    If the queue's head can be admitted, the step holds whole prompts only, as many as
    `max_num_batched_tokens`, `max_num_seqs` and the blocks allow, and all decodes wait: good for
    time to first token, paid for by gaps between tokens. Else every running request gets one token.
    When a decode finds no block, the request admitted last is preempted and recomputed.

    Prompts are never cut, whatever `enable_chunked_prefill` says. No blocks are held back at
    admission. There are no options.

    Raises:
        ConfigError: an option or a threshold is given, or a prompt may exceed the budget.
    """

    whole_prompts = True

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        read_int_options("prefill_first", params, {})
        require_whole_prompts("prefill_first", params)
        super().__init__(params, kv)

    def schedule(self) -> StepPlan:
        """Decide one step and count its tokens as computed."""
        plan = self.new_plan()
        budget = self.params.max_num_batched_tokens
        self.admit_from_queue(plan, budget)
        if not plan.request_ids:
            self.decode(plan, budget)
        return self.close_plan(plan)
