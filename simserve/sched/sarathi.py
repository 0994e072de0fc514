"""Stall-free batching: decodes always run, prompts fill what a chunk size leaves (Sarathi)."""

from __future__ import annotations

from simserve.errors import ConfigError, Problem
from simserve.protocols import KVCacheManager
from simserve.sched.options import read_int_options
from simserve.sched.params import SchedulerParams
from simserve.sched.recompute import RecomputingScheduler
from simserve.types import StepPlan

__all__ = ["SarathiScheduler"]

DEFAULT_CHUNK_SIZE = 512


class SarathiScheduler(RecomputingScheduler):
    """Chunked prefills that never hold up a decode (Agrawal et al., OSDI 2024, algorithm 3).

    In each step, first every running request that lacks one token gets it, even if they are more
    than `chunk_size`. Then prompts, those under way before those waiting, get what is left of
    `chunk_size` tokens. `long_prefill_token_threshold` caps each chunk as well. When a decode finds
    no block, the request admitted last that is not yet in the step is preempted and recomputed.
    Prompts wait for blocks; if nobody at all finds any, the request admitted last gives way.

    Options:
        chunk_size: tokens of a step, decodes included; at most `max_num_batched_tokens`, which
            still bounds the decodes. By default 512, or that bound if it is less.

    Raises:
        ConfigError: a wrong option, or chunked prefill is off.
    """

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        bound = params.max_num_batched_tokens
        known = {"chunk_size": (min(DEFAULT_CHUNK_SIZE, bound), 1)}
        self.chunk_size = read_int_options("sarathi", params, known)["chunk_size"]
        problems = []
        if self.chunk_size > bound:
            message = f"{self.chunk_size} is more than scheduler.max_num_batched_tokens ({bound})"
            problems.append(Problem(path="scheduler.options.chunk_size", message=message))
        if not params.enable_chunked_prefill:
            message = "sarathi computes prompts in chunks: leave it true, or choose prefill_first"
            problems.append(Problem(path="scheduler.enable_chunked_prefill", message=message))
        if problems:
            raise ConfigError(problems)
        super().__init__(params, kv)

    def schedule(self) -> StepPlan:
        """Decide one step and count its tokens as computed."""
        plan = self.new_plan()
        self.decode(plan, self.params.max_num_batched_tokens)
        self._prefill(plan, self.chunk_size - len(plan.request_ids))
        if not plan.request_ids and len(self.running) > 1:
            self.preempt(plan, self.running[-1])
        return self.close_plan(plan)

    def _prefill(self, plan: StepPlan, left: int) -> None:
        for request in self.running:
            if request.num_tokens > request.num_computed_tokens:
                num_tokens = self.continue_prompt(plan, request, left)
                if num_tokens == 0:
                    return
                left -= num_tokens
        self.admit_from_queue(plan, left)
