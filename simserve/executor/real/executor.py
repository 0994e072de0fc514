"""Runs the engine's plans on a model (protocol `Executor`) and reports how long each step took."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from simserve.executor.real.batch import Batch, build_batch
from simserve.executor.real.machine import Machine
from simserve.executor.real.pace import Pace, TimedScheduler
from simserve.executor.real.tokens import TokenIds
from simserve.executor.simulated import Drafter
from simserve.protocols import CostModel
from simserve.types import Kind, StepPlan, StepResult, StepRun, TraceRequest

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
        shadow: prices each plan beside its measured duration, as part `shadow_s`.
    """

    single_steps = True

    def __init__(
        self,
        machine: Machine,
        scheduler: TimedScheduler,
        pace: Pace,
        *,
        drafter: Drafter | None = None,
        shadow: CostModel | None = None,
    ) -> None:
        self.rows = machine.rows
        self.rows.clear()
        self._runner = machine.runner
        self._path = machine.path
        self._sampler = machine.sampler
        self._replays = machine.replays
        self._tokens = TokenIds(machine.vocab_size, machine.replays)
        self._scheduler = scheduler
        self._pace = pace
        self._drafter = drafter
        self._shadow = shadow

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        self._tokens.add(request)
        if self._drafter is not None:
            self._drafter.add_request(request)

    def submit(self, run: StepRun, start_s: float) -> StepResult:
        """Run one step to its end.

        Raises:
            TraceError: a literal token id is not in the model's vocabulary.
            SimserveError: the plan runs more requests than max_num_seqs.
        """
        plan = run.plan
        self._pace.wait(start_s)
        began = perf_counter()
        parts = self._scheduler.take_times()
        for passed in (*self._scheduler.take_empty_plans(), plan):
            self._follow(passed)
        batch = self._batch(plan)
        parts["prepare_s"] = perf_counter() - began
        facts: dict[str, float] = {}
        if batch is not None:
            measured = self._runner.run(batch)
            parts["prepare_s"] += measured.prepare_s
            parts |= {
                "forward_s": measured.forward_s,
                "sample_s": measured.sample_s,
                "sync_s": measured.sync_s,
            }
            facts = {"first_shape": float(measured.first_shape), **measured.forward_parts}
        end_s = self._pace.end(start_s, sum(parts.values()))
        if self._shadow is not None:
            facts["shadow_s"] = self._shadow.price(run).durations_s[0]
        emitted: Sequence[int] = plan.samples
        drafts = None
        if self._drafter is not None:
            emitted = self._drafter.emit(plan)
            drafts = self._drafter.draft(plan, emitted)
        return StepResult([end_s], parts | facts, emitted, draft_tokens=drafts)

    def _follow(self, plan: StepPlan) -> None:
        """Bring the rows on the device to what the plan has changed."""
        rows, tokens = self.rows, self._tokens
        for request_id in plan.finished_ids:
            rows.release(request_id)
            tokens.forget(request_id)
        for request_id in plan.preempted_ids:
            row = rows.release(request_id)
            if row is not None and not self._replays:
                tokens.keep(request_id, rows.ids[row].cpu().numpy().copy())
        kinds, new_blocks = plan.kinds, plan.new_blocks
        admitted = [name for name, kind in kinds.items() if kind in (Kind.NEW, Kind.RESUMED)]
        if admitted:
            tables = {request_id: new_blocks[request_id][0] for request_id in admitted}
            rows.admit(tables, [tokens.ids(request_id) for request_id in admitted])
            if self._sampler is not None:
                self._sampler.admit({request_id: rows.of[request_id] for request_id in admitted})
        if len(new_blocks) > len(admitted):
            rows.append_blocks({n: one[0] for n, one in new_blocks.items() if n not in kinds})

    def _batch(self, plan: StepPlan) -> Batch | None:
        """The rows that are run, as arrays; None if there are none."""
        num_logits: list[int] = [*plan.samples]
        for request_id, drafts in plan.draft_tokens.items():
            row = plan.request_ids.index(request_id)
            num_logits[row] *= 1 + len(drafts)
        of = self.rows.of
        columns = [plan.starts, plan.num_tokens, num_logits]
        ids = plan.request_ids
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
