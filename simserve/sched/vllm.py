"""vLLM v0.11.0's scheduler: one token budget a step, running requests first, then the queue.

There is no prefill or decode phase: a request wants the tokens it has not computed yet. v0.20.2 has
one rule more, `scheduler_reserve_full_isl`: a request whose tokens would not all find blocks is not
admitted, so that its later chunks need not preempt others. Where the engine's behaviour looks odd
it is kept (`quirks: as_engine`) and said so; `quirks: fixed` drops it.
"""

from __future__ import annotations

from collections.abc import Sequence

from simserve.protocols import KVCacheManager, PrefixHit
from simserve.sched.options import read_int_options
from simserve.sched.params import SchedulerParams
from simserve.sched.steady import DecodesInStep
from simserve.types import Kind, Request, StepPlan

__all__ = ["VllmScheduler"]


class VllmScheduler(DecodesInStep):
    """Decides step for step as vLLM v0.11.0 and v0.20.2 do (synchronous scheduling)."""

    def __init__(self, params: SchedulerParams, kv: KVCacheManager) -> None:
        super().__init__(params, kv)
        read_int_options("vllm", params, {})
        self._previous: StepPlan | None = None
        self._position_limit = params.max_model_len - 1
        # Without chunking no prompt is cut, yet the engine lets the threshold cut it.
        applies = params.enable_chunked_prefill or params.as_engine
        self._threshold = params.long_prefill_token_threshold if applies else 0
        self._reserves_all = params.scheduler_reserve_full_isl

    def schedule(self) -> StepPlan:
        """Decide one step and count its tokens as computed."""
        plan = self.new_plan()
        budget = self._schedule_running(plan)
        if plan.preempted_ids:
            plan.admission_stop = "preemption"
        elif self.waiting:
            self._schedule_waiting(plan, budget)
        self._previous = plan
        return self.close_plan(plan)

    # -- the running pass ------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan) -> int:
        """Give each running request its tokens, in order of admission; the budget that is left."""
        budget = self.params.max_num_batched_tokens
        lookahead = self.params.num_lookahead_tokens
        running, record = self.running, self._record
        index = self.schedule_cohort(plan, budget)
        budget -= index
        while index < len(running) and budget > 0:
            request = running[index]
            start = request.num_computed_tokens
            num_new_tokens = (
                request.num_tokens
                + len(request.draft_tokens)
                + request.num_output_placeholders
                - start
            )
            if num_new_tokens > 1 or start >= self._position_limit:
                num_new_tokens = self._capped(start, num_new_tokens, budget)
            if num_new_tokens <= 0:  # below: a prompt of max_model_len, at which the engine ends
                index += 1
                continue
            new_blocks: tuple[Sequence[int], ...] | None = ()
            if start + num_new_tokens + lookahead > request.slots_until:
                new_blocks = self.kv.allocate_slots(request, num_new_tokens, None, lookahead)
            if new_blocks is None:
                freed, shift, new_blocks = self._preempt_for(plan, request, num_new_tokens, index)
                budget += freed
                index -= shift
                if new_blocks is None:
                    break
            record(plan, request, num_new_tokens, new_blocks)
            if request.draft_tokens:
                self._schedule_drafts(plan, request)
            budget -= num_new_tokens
            index += 1
        return budget

    def _capped(self, start: int, num_new_tokens: int, budget: int) -> int:
        """The threshold, the budget, and the last position that may be computed cut a request."""
        if 0 < self._threshold < num_new_tokens:
            num_new_tokens = self._threshold
        return min(num_new_tokens, budget, self._position_limit - start)

    def _schedule_drafts(self, plan: StepPlan, request: Request) -> None:
        """The drafts that fit into this step's tokens; those beyond are cut off."""
        count = request.num_computed_tokens - request.num_tokens
        if count > 0:
            request.draft_tokens = request.draft_tokens[:count]
            plan.draft_tokens[request.request_id] = request.draft_tokens

    def _preempt_for(
        self, plan: StepPlan, request: Request, num_new_tokens: int, index: int
    ) -> tuple[int, int, tuple[Sequence[int], ...] | None]:
        """Preempt until `request` finds blocks, or is itself the victim.

        Returns the budget given back, by how much the running list shifted before `index`, and the
        new blocks (None: `request` was preempted). As the engine has it, a victim that was already
        scheduled in this step keeps its tokens and budget (a ghost), and the shift is not followed,
        so that the request after `request` is passed over.
        """
        freed = shift = 0
        new_blocks: tuple[Sequence[int], ...] | None = None
        while new_blocks is None:
            victim = self._victim()
            position = self.running.index(victim)
            before = position < index - shift
            if before and not self.params.as_engine:
                freed += self._withdraw(plan, victim)
                shift += 1
            self.preempt(plan, victim)
            if victim is request:
                break
            if before and self.params.as_engine:
                self._leave_ghost(plan, victim)
            new_blocks = self.kv.allocate_slots(
                request, num_new_tokens, None, self.params.num_lookahead_tokens
            )
        return freed, shift, new_blocks

    def _victim(self) -> Request:
        if self.params.policy == "priority":
            return max(self.running, key=lambda r: (r.priority, r.arrival_s))
        return self.running[-1]

    def _leave_ghost(self, plan: StepPlan, victim: Request) -> None:
        """The victim stays in the step's token counts: the workers will run it all the same.

        Its tokens count as computed when the step begins, although it holds no blocks. The workers
        are not told its place; they go by that of their last step.
        """
        request_id = victim.request_id
        if request_id not in plan.request_ids:
            return
        row = plan.request_ids.index(request_id)
        known_tokens = victim.num_tokens + victim.num_output_placeholders
        plan.kinds[request_id] = Kind.GHOST
        plan.starts[row] = 0
        plan.samples[row] = self._last_start(request_id) + plan.num_tokens[row] >= known_tokens
        plan.new_blocks.pop(request_id, None)
        victim.num_computed_tokens = plan.num_tokens[row]

    def _last_start(self, request_id: str) -> int:
        previous = self._previous
        if previous is None or request_id not in previous.request_ids:
            return 0
        return previous.starts[previous.request_ids.index(request_id)]

    def _withdraw(self, plan: StepPlan, victim: Request) -> int:
        """Take a victim out of the step, and what nobody computes now out of the cache.

        Returns the tokens it had.
        """
        request_id = victim.request_id
        if request_id not in plan.request_ids:
            return 0
        row = plan.request_ids.index(request_id)
        self.dissolve_cohort()
        self.kv.uncommit(victim, plan.starts[row])
        for column in (plan.request_ids, plan.starts, plan.samples):
            del column[row]
        plan.new_blocks.pop(request_id, None)
        plan.draft_tokens.pop(request_id, None)
        return plan.num_tokens.pop(row)

    # -- the waiting pass ------------------------------------------------------------------------

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit from the head of the queue until something ends it; that is `admission_stop`."""
        waiting = self.waiting
        skipped: list[Request] = []
        while waiting:
            if budget <= 0:
                plan.admission_stop = "budget"
                break
            if len(self.running) >= self.params.max_num_seqs:
                plan.admission_stop = "max_num_seqs"
                break
            request = waiting.peek()
            # A former ghost counts tokens as computed already: the cache is not asked.
            hit = None if request.num_computed_tokens else self.kv.get_computed_blocks(request)
            num_new_tokens = self._chunk(request, hit)
            if num_new_tokens > budget and not self.params.enable_chunked_prefill:
                self._count_failed_lookup(plan, request, hit)
                skipped.append(waiting.pop())
                continue
            num_new_tokens = min(num_new_tokens, budget)
            finds_blocks = not self._reserves_all or self.kv.can_hold_all(request, hit)
            if not finds_blocks or not self.admit(plan, request, num_new_tokens, hit):
                self._count_failed_lookup(plan, request, hit)
                plan.admission_stop = "blocks"
                break
            budget -= num_new_tokens
        if skipped:
            if plan.admission_stop == "empty":
                plan.admission_stop = "budget"
            waiting.put_back_skipped(skipped)

    def _count_failed_lookup(self, plan: StepPlan, request: Request, hit: PrefixHit | None) -> None:
        """As the engine has it, a blocked head is counted again in every step that tries it."""
        if self.params.as_engine:
            self.count_lookup(plan, request, hit)

    def _chunk(self, request: Request, hit: PrefixHit | None) -> int:
        """Tokens to compute, drafts not counted, before the budget cuts them."""
        start = hit.num_tokens if hit else request.num_computed_tokens
        wanted = request.num_tokens - start
        threshold = self._threshold
        return threshold if 0 < threshold < wanted else wanted

    # -- runs of equal steps ---------------------------------------------------------------------

    def steady_steps(self, plan: StepPlan) -> int:
        """As in the base class; a head that lacks blocks goes on to lack them for some steps."""
        head = None
        if self._may_admit():
            if plan.admission_stop != "blocks" or not self.params.enable_chunked_prefill:
                return 1
            head = self.waiting.peek()
            if head.num_computed_tokens:
                return 1
        return self._steady_steps(plan, head)
