"""What small policies share: admission from the queue's head, preemption by recomputation."""

from __future__ import annotations

from simserve.sched.steady import DecodesInStep
from simserve.types import Request, Status, StepPlan

__all__ = ["RecomputingScheduler"]


class RecomputingScheduler(DecodesInStep):
    """Serves running requests first come, first served; the one admitted last gives way.

    Nobody is admitted in a step that preempts, so that blocks go to those who are running. Drafts
    are not scheduled.
    """

    whole_prompts = False
    """Whether a prompt is computed in one step; else in chunks that fit into the budget."""

    def run_or_preempt(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Schedule a running request, preempting others until there are blocks; whether it was.

        Victims are those admitted last and not yet in this step, at last `request` itself. The only
        running request is never preempted: with the whole pool at hand it would fail again, so it
        stays, and the engine finds that nothing moves.
        """
        while not self.run_on(plan, request, num_tokens):
            if len(self.running) == 1:
                return False
            victim = next(r for r in reversed(self.running) if r.request_id not in plan.request_ids)
            self.preempt(plan, victim)
            if victim is request:
                return False
        return True

    def decode(self, plan: StepPlan, budget: int) -> int:
        """One token for each running request that lacks just one, in order of admission.

        The plan is still empty. Returns the budget that is left.
        """
        count = self.schedule_cohort(plan, budget)
        budget -= count
        for request in self.running[count:]:
            if budget <= 0:
                break
            lacks_one = request.num_tokens - request.num_computed_tokens == 1
            # Whoever was preempted a moment ago is still in this copy of the list.
            if lacks_one and request.status == Status.RUNNING:
                budget -= self.run_or_preempt(plan, request, 1)
        return budget

    def continue_prompt(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Compute more of a prompt under way; its tokens in this step, 0 without budget or blocks.

        It waits for blocks and preempts nobody.
        """
        num_tokens = self.chunk(request.num_tokens - request.num_computed_tokens, budget)
        if num_tokens and self.run_on(plan, request, num_tokens):
            return num_tokens
        if self.waiting:
            plan.admission_stop = "blocks" if num_tokens else "budget"
        return 0

    def admit_from_queue(self, plan: StepPlan, budget: int) -> None:
        """Admit from the head until something ends it, which is then the plan's `admission_stop`.

        The head is never passed over: if it does not fit, nobody behind it is tried.
        """
        while self.waiting:
            num_tokens = self.admit_head(plan, budget)
            if num_tokens == 0:
                return
            budget -= num_tokens
        plan.admission_stop = "empty"

    def admit_head(self, plan: StepPlan, budget: int) -> int:
        """Admit the queue's head; its tokens in this step, or 0 and why in `admission_stop`."""
        if plan.preempted_ids:
            plan.admission_stop = "preemption"
            return 0
        if budget <= 0:
            plan.admission_stop = "budget"
            return 0
        if len(self.running) >= self.params.max_num_seqs:
            plan.admission_stop = "max_num_seqs"
            return 0
        request = self.waiting.peek()
        hit = self.kv.get_computed_blocks(request)
        num_tokens = self.chunk(request.num_tokens - (hit.num_tokens if hit else 0), budget)
        if num_tokens == 0:
            plan.admission_stop = "budget"
        elif not self.admit(plan, request, num_tokens, hit):
            plan.admission_stop = "blocks"
            num_tokens = 0
        return num_tokens

    def chunk(self, wanted: int, budget: int) -> int:
        """How many of the tokens that a request lacks it may compute now."""
        if self.whole_prompts:
            return wanted if wanted <= budget else 0
        return max(0, min(wanted, budget, self.params.long_prefill_token_threshold or wanted))
