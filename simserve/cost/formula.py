"""A step time linear in tokens and context: what the cases recorded from vLLM v0.11.0 use."""

from __future__ import annotations

from operator import mul

import numpy as np

from simserve.cost.checks import check_not_negative
from simserve.errors import ConfigError
from simserve.protocols import Price
from simserve.types import StepRun

__all__ = ["FormulaCost"]


class FormulaCost:
    """`base_s + per_token_s*S1 + per_attended_token_s*S2`, 0 for a step without tokens.

    S1 is the sum of n and S2 the sum of n*(start + n) over the scheduled requests, exact integers;
    the expression is evaluated from left to right in doubles.

    Args:
        base_s: seconds per step.
        per_token_s: seconds per token.
        per_attended_token_s: seconds per token and token of its request's context.

    Raises:
        ConfigError: a coefficient is negative or not finite, or all are 0.
    """

    def __init__(
        self, base_s: float, per_token_s: float = 0.0, per_attended_token_s: float = 0.0
    ) -> None:
        coefficients = {
            "base_s": base_s,
            "per_token_s": per_token_s,
            "per_attended_token_s": per_attended_token_s,
        }
        check_not_negative("formula", coefficients)
        if not any(coefficients.values()):
            raise ConfigError("formula cost: all coefficients are 0, so steps would take no time")
        self.base_s = float(base_s)
        self.per_token_s = float(per_token_s)
        self.per_attended_token_s = float(per_attended_token_s)

    def price(self, run: StepRun) -> Price:
        """Durations of the steps of a run; the only part is `gpu_s`."""
        plan, count = run
        n, starts = plan.num_tokens, plan.starts
        tokens = sum(n)
        if tokens == 0:
            return Price([0.0] * count, {"gpu_s": 0.0})
        if n.count(1) == len(n):
            squares, context = tokens, sum(starts)
        else:
            squares, context = sum(map(mul, n, n)), sum(map(mul, n, starts))
        attended = context + squares
        fixed = self.base_s + self.per_token_s * tokens
        if count == 1:
            duration_s = fixed + self.per_attended_token_s * attended
            return Price([duration_s], {"gpu_s": duration_s})
        over_run = (attended + squares * np.arange(count)).astype(np.float64)
        durations_s = fixed + self.per_attended_token_s * over_run
        return Price(durations_s.tolist(), {"gpu_s": durations_s})
