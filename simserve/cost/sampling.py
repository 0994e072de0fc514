"""What choosing tokens adds to a step, from how its requests want theirs chosen.

Between what was measured, time is linear in the rows of logits and in the vocabulary. Rows of
several methods cost what those of each would cost alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from simserve.cost.sampling_file import SamplingFile, Table
from simserve.cost.taken import num_taken
from simserve.sampling import RequestSampling
from simserve.types import StepPlan, TraceRequest

__all__ = ["SamplingCost", "Times", "method_of"]


class Times:
    """Seconds by number of rows of logits, for one vocabulary; linear between measurements.

    Beyond the last ones the lines of the last two go on.
    """

    def __init__(self, measured: SamplingFile, table: Table, vocab_size: int) -> None:
        sizes = measured.vocab_sizes
        self._rows = measured.num_rows
        self._seconds = [
            max(0.0, _line(sizes, seconds, vocab_size)) for seconds in zip(*table, strict=True)
        ]

    def of(self, rows: int) -> float:
        """Time of so many rows (s); at least 0."""
        return max(0.0, _line(self._rows, self._seconds, rows)) if rows else 0.0


def _line(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """The value at a place, from those at the two places around it or next to it."""
    at = min(max(bisect_left(places, place), 1), len(places) - 1)
    low, high = places[at - 1], places[at]
    share = (place - low) / (high - low)
    return values[at - 1] * (1 - share) + values[at] * share


class _Wish(NamedTuple):
    """What of a request's settings takes time."""

    method: str
    has_rules: bool
    num_logprobs: int | None


class SamplingCost:
    """Prices the choice of tokens, beyond what a step's cost model has of it.

    Args:
        measured: the times of each method.
        vocab_size: of the model.
        settings_of: how each request wants its tokens chosen.
        included: the method that the cost model has in its steps, of all rows; None: it has none.
    """

    def __init__(
        self,
        measured: SamplingFile,
        vocab_size: int,
        settings_of: Callable[[TraceRequest], RequestSampling],
        included: str | None,
    ) -> None:
        def times(table: Table) -> Times:
            return Times(measured, table, vocab_size)

        self._measured, self._vocab_size = measured, vocab_size
        self._settings_of = settings_of
        self._methods = {name: times(table) for name, table in measured.methods.items()}
        self._logprobs = {n: times(table) for n, table in sorted(measured.logprobs.items())}
        self._included = None if included is None else self._methods[included]
        self._wishes: dict[str, _Wish] = {}
        self._most_rows = self._most_logprobs = 0
        self._num_outside = 0
        self._last_outside: tuple[int, int] | None = None
        """The run priced last, number and steps, if it had more rows than were measured."""

    def add_request(self, request: TraceRequest) -> None:
        """A request was taken in."""
        one = self._settings_of(request)
        wish = _Wish(method_of(one, self._vocab_size), _has_rules(one), one.logprobs)
        self._wishes[request.request_id] = wish
        self._most_logprobs = max(self._most_logprobs, one.logprobs or 0)

    @property
    def out_of_domain_steps(self) -> int:
        """Steps that were taken with more rows than were measured."""
        self._count_last(None)
        return self._num_outside

    def _count_last(self, next_step: int | None) -> None:
        if self._last_outside is not None:
            self._num_outside += num_taken(*self._last_outside, next_step)
            self._last_outside = None

    def price_s(self, plan: StepPlan, count: int) -> float:
        """Time that each of `count` steps of this plan takes beside its price; at least 0.

        A step has a row of logits for each of its requests.
        """
        rows = len(plan.request_ids)
        wishes = Counter(map(self._wishes.__getitem__, plan.request_ids))
        for request_id in plan.finished_ids:
            self._wishes.pop(request_id, None)
        if not rows:
            return 0.0
        self._count_last(plan.step)
        if rows > self._measured.num_rows[-1]:
            self._last_outside = plan.step, count
            self._most_rows = max(self._most_rows, rows)
        by_method: Counter[str] = Counter()
        num_asking = most_logprobs = 0
        for wish, number in wishes.items():
            by_method[wish.method] += number
            by_method["penalties"] += number * wish.has_rules
            if wish.num_logprobs is not None:
                num_asking += number
                most_logprobs = max(most_logprobs, wish.num_logprobs)
        seconds = 0.0 if self._included is None else -self._included.of(rows)
        for name, number in sorted(by_method.items()):
            seconds += self._methods[name].of(number)
        if num_asking:
            seconds += self._logprobs_s(most_logprobs, num_asking)
        return max(0.0, seconds)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of results must know: where it went beyond what was measured."""
        gpu, found = self._measured.gpu, []
        low, *_, high = self._measured.vocab_sizes
        if not low <= self._vocab_size <= high:
            found.append(
                f"sampling on {gpu}: {self._vocab_size:,} tokens of the model are extrapolated "
                f"(measured: {low:,} to {high:,})"
            )
        if self.out_of_domain_steps:
            found.append(
                f"sampling on {gpu}: {self.out_of_domain_steps} steps are extrapolated, up to "
                f"{self._most_rows:,} requests (measured: up to {self._measured.num_rows[-1]:,})"
            )
        most = max(self._logprobs)
        if self._most_logprobs > most:
            found.append(
                f"sampling on {gpu}: {self._most_logprobs} log-probabilities are priced as {most}, "
                "the most that were measured"
            )
        return tuple(found)

    def _logprobs_s(self, num_logprobs: int, rows: int) -> float:
        """Between the nearest numbers that were measured."""
        numbers = list(self._logprobs)
        at = bisect_left(numbers, num_logprobs)
        if at == len(numbers):
            return self._logprobs[numbers[-1]].of(rows)
        high, above_s = numbers[at], self._logprobs[numbers[at]].of(rows)
        if high == num_logprobs:
            return above_s
        low = numbers[at - 1]
        below_s = self._logprobs[low].of(rows)
        return below_s + (above_s - below_s) * (num_logprobs - low) / (high - low)


def method_of(sampling: RequestSampling, vocab_size: int) -> str:
    """The method that a request is priced by. A min_p beside another cut costs nothing more."""
    if sampling.temperature == 0:
        return "greedy"
    cuts = {"top_k": 0 < sampling.top_k < vocab_size, "top_p": sampling.top_p < 1}
    if any(cuts.values()):
        return " ".join(name for name, holds in cuts.items() if holds)
    return "min_p" if sampling.min_p > 0 else "temperature"


def _has_rules(sampling: RequestSampling) -> bool:
    """Whether logits are changed before a token is chosen: priced as penalties, the most of it."""
    penalties = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    return penalties != (0, 0, 1) or any(
        (
            sampling.logit_bias,
            sampling.allowed_token_ids,
            sampling.bad_words,
            sampling.min_tokens,
        )
    )
