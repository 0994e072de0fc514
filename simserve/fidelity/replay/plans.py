"""Compares the plans of a simulation with those that a real engine logged, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from simserve.fidelity.logs.vllm_log import StepLog
from simserve.types import StepOutput, StepPlan

__all__ = ["PlanCheck", "PlanDifference"]

Row = tuple[int, int, int]
"""Request, tokens, tokens computed before."""


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The first step whose plans differ."""

    step: int
    expected: tuple[Row, ...]
    """What the engine scheduled; empty if it has no such step."""
    got: tuple[Row, ...]
    expected_preempted: tuple[int, ...]
    got_preempted: tuple[int, ...]

    def __str__(self) -> str:
        if self.expected_preempted != self.got_preempted:
            want, have = list(self.expected_preempted), list(self.got_preempted)
            return f"step {self.step}, preempted: expected {want}, got {have}"
        for place, (want_row, have_row) in enumerate(zip(self.expected, self.got, strict=False)):
            if want_row != have_row:
                return (
                    f"step {self.step}, row {place}: expected {_row_text(want_row)}, "
                    f"got {_row_text(have_row)}"
                )
        want_count, have_count = len(self.expected), len(self.got)
        return f"step {self.step}, requests: expected {want_count}, got {have_count}"


class PlanCheck:
    """Observer of an engine: remembers the first plan that is not the log's.

    Plans are equal if they hold the same requests in the same order with the same tokens, and
    preempt the same ones, in whatever order.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.difference: PlanDifference | None = None
        self.num_steps = 0

    def scheduled(self, plan: StepPlan, now_s: float) -> None:
        """Compare one plan."""
        self.num_steps = plan.step + 1
        if self.difference is not None:
            return
        got = tuple(zip(map(int, plan.request_ids), plan.num_tokens, plan.starts, strict=True))
        preempted = tuple(sorted(map(int, plan.preempted_ids)))
        expected = self._expected(plan.step)
        expected_preempted = tuple(sorted(self._log.steps.preempted.get(plan.step, ())))
        if got != expected or preempted != expected_preempted:
            self.difference = PlanDifference(
                plan.step, expected, got, expected_preempted, preempted
            )

    def updated(self, plan: StepPlan, output: StepOutput, now_s: float) -> None:
        """Nothing to compare: outputs are as long as the log has them."""

    def reset(self, succeeded: bool, now_s: float) -> None:
        """Logs know no resets."""

    def finish(self) -> PlanDifference | None:
        """The first difference, steps that the simulation lacks included."""
        missing = self.num_steps
        if self.difference is None and missing < len(self._log.steps):
            expected = self._expected(missing)
            preempted = self._log.steps.preempted.get(missing, ())
            self.difference = PlanDifference(missing, expected, (), preempted, ())
        return self.difference

    def _expected(self, step: int) -> tuple[Row, ...]:
        return self._log.steps.rows(step) if step < len(self._log.steps) else ()


def _row_text(row: Row) -> str:
    return f"request {row[0]} with {row[1]} tokens after {row[2]}"
