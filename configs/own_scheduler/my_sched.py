# my_sched.py
"""First come, first served, with some blocks held back at admission."""

from __future__ import annotations

from simserve.errors import ConfigError
from simserve.protocols import KVCacheManager
from simserve.sched.base import BaseScheduler
from simserve.sched.params import SchedulerParams
from simserve.types import Request, Status, StepPlan


class MyScheduler(BaseScheduler):
    """Admits a request only if `watermark` of all blocks stay free for those that run."""

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        super().__init__(params, kv)
        self.watermark = params.options.get("watermark", 0.1)
        if set(params.options) - {"watermark"} or not 0 <= self.watermark < 1:
            raise ConfigError("there is only watermark, from 0 to below 1")

    def schedule(self) -> StepPlan:
        plan = self.new_plan()
        budget = self.params.max_num_batched_tokens
        for request in list(self.running):
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_tokens and self.make_run(plan, request, num_tokens):
                budget -= num_tokens
        while self.waiting and budget and not plan.preempted_ids:
            request = self.waiting.peek()
            hit = self.kv.get_computed_blocks(request)
            wanted = request.num_tokens - (hit.num_tokens if hit else 0)
            num_tokens = min(wanted, budget)
            fits = len(self.running) < self.params.max_num_seqs and self.leaves_room(wanted)
            if not fits or not self.admit(plan, request, num_tokens, hit):
                break
            budget -= num_tokens
        return self.close_plan(plan)

    def make_run(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Schedule `request`; whoever was admitted last gives its blocks if there are too few."""
        while request.status == Status.RUNNING and not self.run_on(plan, request, num_tokens):
            if len(self.running) == 1:
                return False  # the pool is too small even for one: the engine reports it
            self.preempt(plan, self.running[-1])
        return request.status == Status.RUNNING

    def leaves_room(self, num_tokens: int) -> bool:
        num_blocks = -(-num_tokens // self.kv.block_size)
        held_back = self.watermark * self.kv.num_gpu_blocks if self.running else 0
        return self.kv.num_free_blocks - num_blocks >= held_back
