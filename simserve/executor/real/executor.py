"""Runs the engine's plans on a model (protocol `Executor`) and reports how long each step took."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from simserve.errors import TraceError
from simserve.executor.real.batch import Batch, build_batch
from simserve.executor.real.machine import Machine
from simserve.executor.real.outcomes import Outcome, Outcomes
from simserve.executor.real.pace import Pace, TimedScheduler
from simserve.executor.real.rule_rows import Ruled
from simserve.executor.real.runner import StepTimes
from simserve.executor.real.speculation import Speculation
from simserve.executor.real.tokens import TokenIds
from simserve.executor.simulated import Drafter
from simserve.protocols import CostModel
from simserve.sampling import RequestSampling
from simserve.types import Kind, Request, StepPlan, StepResult, StepRun, TraceRequest

__all__ = ["RealExecutor"]


class RealExecutor:
    """One run on a machine.

    A step's duration is the wall time that the scheduler and this executor took for it; the parts
    that `docs/real-gpu.md` lists add up to it. A request that was preempted after it had been
    scheduled (a ghost) is not run: its blocks may be somebody else's by now.

    Args:
        machine: model, KV cache and graphs; what is left of an earlier run is dropped.
        scheduler: whose time is part of a step.
        pace: what the engine's clock follows.
        drafter: which made-up drafts are accepted, under speculative decoding.
        speculation: proposes real drafts instead, which the model verifies.
        shadow: prices each plan beside its measured duration, as part `shadow_s`.
        outcomes: keeps what requests are given, if that is not dictated.
    """

    single_steps = True

    def __init__(
        self,
        machine: Machine,
        scheduler: TimedScheduler,
        pace: Pace,
        *,
        drafter: Drafter | None = None,
        speculation: Speculation | None = None,
        shadow: CostModel | None = None,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.rows = machine.rows
        self.rows.clear()
        self._runner = machine.runner
        self._path = machine.path
        self._sampler = machine.sampler
        self._outputs = machine.outputs
        self._eos_token_ids = machine.eos_token_ids
        self._choices = machine.choices
        self._knows_own_sampling = machine.knows_own_sampling
        self._asked: dict[str, RequestSampling] = {}
        self._tokens = TokenIds(machine.vocab_size, machine.replays)
        self.outcomes = outcomes or Outcomes()
        self._scheduler = scheduler
        if not machine.replays:
            scheduler.ended = self._end
        self._pace = pace
        self._drafter = drafter
        self._speculation = speculation
        self._shadow = shadow

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in.

        Raises:
            TraceError: it holds token ids that are not in the vocabulary, or wants more
                log-probabilities than there are.
        """
        if request.sampling and not self._knows_own_sampling:
            raise TraceError(
                f"request {request.request_id}: sampling: the machine was opened for a workload "
                "whose requests say nothing of it: open one for this workload"
            )
        self._tokens.add(request)
        self._asked[request.request_id] = asked = self._choices.of(request)
        if self._outputs is not None:
            self.outcomes.add(self._empty_outcome(request, asked))
        if self._drafter is not None:
            self._drafter.add_request(request)

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Run one step to its end.

        Raises:
            SimserveError: the plan runs more requests than max_num_seqs.
        """
        plan = run.plan
        self._pace.wait(start_s)
        began = perf_counter()
        parts = self._scheduler.take_times()
        for passed in (*self._scheduler.take_empty_plans(), plan):
            self._follow(passed)
        if self._speculation is not None and plan.draft_tokens:
            self._write_drafts(plan)
        batch = self._batch(plan)
        parts["prepare_s"] = perf_counter() - began
        facts: dict[str, float] = {}
        stops: dict[str, int] = {}
        emitted: Sequence[int] = plan.samples
        drafts = None
        if batch is not None:
            measured = self._runner.run(batch)
            began = perf_counter()
            counts = self._take_in(batch, plan, stops)
            parts["prepare_s"] += measured.prepare_s
            parts |= {
                "forward_s": measured.forward_s,
                "sample_s": measured.sample_s,
                "sync_s": measured.sync_s + perf_counter() - began,
            }
            facts = {"first_shape": float(measured.first_shape), **measured.forward_parts}
            if self._speculation is not None:
                emitted = [counts.get(request_id, 0) for request_id in plan.request_ids]
                began = perf_counter()
                drafted = self._speculation.draft(plan, emitted, self)
                drafts = drafted.tokens
                _add_passes(parts, facts, drafted.passes, perf_counter() - began)
        end_s = self._pace.end(start_s, sum(parts.values()))
        if self._shadow is not None:
            facts["shadow_s"] = self._shadow.price(run).durations_s[0]
        if self._drafter is not None:
            emitted = self._drafter.emit(plan)
            drafts = self._drafter.draft(plan, emitted)
        return StepResult([end_s], parts | facts, emitted, draft_tokens=drafts, stops=stops)

    def _follow(self, plan: StepPlan) -> None:
        """Bring the rows on the device to what the plan has changed."""
        rows, tokens = self.rows, self._tokens
        for request_id in plan.finished_ids:
            rows.release(request_id)
            tokens.forget(request_id)
            self._asked.pop(request_id, None)
        for request_id in plan.preempted_ids:
            rows.release(request_id)
        kinds, new_blocks = plan.kinds, plan.new_blocks
        admitted = [name for name, kind in kinds.items() if kind in (Kind.NEW, Kind.RESUMED)]
        if admitted:
            tables = {request_id: new_blocks[request_id][0] for request_id in admitted}
            known = [self._known(request_id) for request_id in admitted]
            rows.admit(tables, known)
            if self._sampler is not None:
                come_in = zip(admitted, known, strict=True)
                self._sampler.admit(
                    {rows.of[name]: self._ruled(name, ids) for name, ids in come_in}
                )
            if self._outputs is not None:
                self._outputs.admit(
                    {rows.of[name]: self._asked[name].logprobs for name in admitted}
                )
        if len(new_blocks) > len(admitted):
            rows.append_blocks({n: one[0] for n, one in new_blocks.items() if n not in kinds})

    def _known(self, request_id: str) -> NDArray[np.int32]:
        """The tokens of a request that comes in, those it had before a preemption included."""
        ids, outcome = self._tokens.ids(request_id), self.outcomes.of(request_id)
        if outcome is None or not outcome.token_ids:
            return ids
        return np.concatenate([ids, np.array(outcome.token_ids, dtype=np.int32)])

    def _ruled(self, request_id: str, ids: NDArray[np.int32]) -> Ruled:
        """A request that comes in, for the sampler."""
        asked, prompt_len = self._asked[request_id], len(self._tokens.ids(request_id))
        return Ruled(asked, self._stop_ids(asked), prompt_len, ids)

    def _stop_ids(self, asked: RequestSampling) -> frozenset[int]:
        """The tokens that end a request."""
        ends = frozenset(asked.stop_token_ids)
        return ends if asked.ignore_eos else ends | frozenset(self._eos_token_ids)

    def _empty_outcome(self, request: TraceRequest, asked: RequestSampling) -> Outcome:
        """What a request asks for, and nothing of it yet."""
        assert self._outputs is not None
        wanted, most = asked.logprobs, self._outputs.num_logprobs
        if wanted is not None and (most is None or wanted > most):
            raise TraceError(
                f"request {request.request_id}: logprobs: {wanted} is more than "
                f"executor.max_logprobs ({most}): raise it"
            )
        stop_ids = self._stop_ids(asked)
        return Outcome(request.request_id, request.prompt_len, wanted, stop_ids)

    def prompt(self, request_id: str) -> NDArray[np.int32]:
        """Token ids of a request's prompt."""
        return self._tokens.ids(request_id)

    def sampling(self, request_id: str) -> RequestSampling:
        """What a request wants of its tokens."""
        return self._asked[request_id]

    def _write_drafts(self, plan: StepPlan) -> None:
        """Put the drafts that the plan verifies behind the tokens that are known."""
        drafted = plan.draft_tokens
        rows = zip(plan.request_ids, plan.starts, plan.num_tokens, strict=True)
        found = {
            request_id: (start + num_tokens - len(drafted[request_id]), drafted[request_id])
            for request_id, start, num_tokens in rows
            if request_id in drafted and request_id in self.rows.of
        }
        if found:
            self.rows.write(found)

    def _take_in(self, batch: Batch, plan: StepPlan, stops: dict[str, int]) -> dict[str, int]:
        """Keep what the step has chosen; how many tokens each request has got of it.

        What comes behind a wrong draft is dropped: it was chosen after a token that is not there.

        Args:
            batch: what has run.
            plan: which drafts were verified.
            stops: takes requests that the step ends, with how many of its tokens they keep.
        """
        counts: dict[str, int] = {}
        if self._outputs is None:
            return counts
        wrong: set[str] = set()
        chosen = self._outputs.arrived()
        places = zip(batch.logit_slots.tolist(), batch.logit_ends.tolist(), strict=True)
        for row, (slot, position) in enumerate(places):
            request_id = self.rows.names[slot]
            outcome = self.outcomes.of(request_id)
            if outcome is None or request_id in wrong:
                continue
            place = counts.get(request_id, 0)
            counts[request_id] = place + 1
            if outcome.put(position, chosen, row):
                stops.setdefault(request_id, place + 1)
            drafts = plan.draft_tokens.get(request_id, ())
            if place < len(drafts) and drafts[place] != chosen.tokens[row]:
                wrong.add(request_id)
        return counts

    def _end(self, request: Request) -> None:
        """A request has ended."""
        outcome = self.outcomes.end(
            request.request_id, request.num_output_tokens, request.finish_reason
        )
        if outcome is not None:
            self._tokens.said(request.trace, outcome.token_ids)

    def _batch(self, plan: StepPlan) -> Batch | None:
        """The rows that are run, as arrays; None if there are none."""
        of, ids, num_logits = self.rows.of, plan.request_ids, [int(one) for one in plan.samples]
        if plan.draft_tokens:
            drafts = [len(plan.draft_tokens.get(request_id, ())) for request_id in ids]
            num_logits = [one * (1 + more) for one, more in zip(num_logits, drafts, strict=True)]
        columns = [plan.starts, plan.num_tokens, num_logits]
        if Kind.GHOST in plan.kinds.values():
            real = [i for i, name in enumerate(ids) if plan.kinds.get(name) is not Kind.GHOST]
            ids = [ids[i] for i in real]
            columns = [[column[i] for i in real] for column in columns]
        if not ids:
            return None
        starts, num_tokens, num_logits = columns
        return build_batch(
            [of[request_id] for request_id in ids],
            starts,
            num_tokens,
            num_logits,
            decodes_first=self._path.decode_threshold if self._path.reorders else 0,
        )


def _add_passes(
    parts: dict[str, float], facts: dict[str, float], passes: StepTimes | None, draft_s: float
) -> None:
    """Add what drafting took, `draft_s` in all; what a draft model's passes take of the host goes
    to its parts, as with the model's own."""
    parts["draft_s"] = draft_s
    if passes is not None:
        parts["draft_s"] -= passes.prepare_s + passes.sync_s
        parts["prepare_s"] += passes.prepare_s
        parts["sync_s"] += passes.sync_s
        facts["first_shape"] = max(facts["first_shape"], float(passes.first_shape))
