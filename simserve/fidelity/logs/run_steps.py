"""Steps of a real run as columns for a fit: its tables tell what each computed, and how long.

For every request they have the steps in which it computed its prompt and those in which it got a
token. Steps that this does not explain in full are left out, as are those in which something was
compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.cost.dealing import Dealer, Dealt
from simserve.cost.features import query_key_pairs
from simserve.cost.heat import Heat
from simserve.cost.step_work import padded
from simserve.errors import RunDirectoryError
from simserve.fidelity.logs.observations import Observations
from simserve.fidelity.logs.step_watch import PARTS, MeasuredSteps
from simserve.metrics.arrow import column, items
from simserve.types import StepPlan, StepRun

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["StepRows", "measured_steps", "step_counts"]

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]
Seconds = NDArray[np.float64]


class StepRows(NamedTuple):
    """What requests computed: each array has shape [rows], one row a request and step."""

    request: Counts
    step: Counts
    num_tokens: Counts
    start: Counts
    """Tokens computed before."""
    new: Counts
    """1 in a request's first step."""


def measured_steps(
    requests: pa.Table,
    steps: pa.Table,
    sliding_window: int | None = None,
    dealer: Dealer | None = None,
    graph_sizes: Sequence[int] = (),
) -> MeasuredSteps:
    """The steps that the two tables of a run explain.

    Args:
        requests: one row a request.
        steps: one row a step.
        sliding_window: of the model.
        dealer: deals attention out as the executor did, if that is known.
        graph_sizes: that its decodes were padded to.

    Raises:
        RunDirectoryError: no executor measured these steps, or they verified drafts.
    """
    seconds = _seconds(steps)
    chunks, decodes = _chunks(requests), _decodes(requests)
    rows = StepRows(*(np.concatenate(pair) for pair in zip(chunks, decodes, strict=True)))
    known = _explained(rows, requests, steps) & _warm(steps)
    none = np.zeros(steps.num_rows, dtype=np.int64)
    duration_s = np.sum(list(seconds.values()), axis=0)
    observed = Observations(
        duration_s=duration_s,
        schedule_s=seconds["schedule_s"],
        update_s=seconds["update_s"],
        # The clock of a real run does not count what lies between its steps.
        gap_s=none.astype(np.float64),
        gap_requests=none,
        gap_tokens=none,
        **step_counts(rows, steps.num_rows, sliding_window),
        shared_kv_tokens=_shared(steps),
        dealt=_dealt(rows, steps.num_rows, dealer, graph_sizes) if dealer else None,
    )
    host_s = seconds["prepare_s"] + seconds["sample_s"] + seconds["sync_s"]
    heat = _heat(column(steps, "num_scheduled"), column(steps, "num_tokens"), duration_s)
    return MeasuredSteps(observed.take(known), host_s[known], heat[known])


def _heat(num_reqs: Counts, num_tokens: Counts, duration_s: Seconds) -> Seconds:
    """Before each step, what `Heat` has of all steps until then."""
    heat, before = Heat(), np.zeros(len(num_tokens))
    ran_prefills = (num_tokens > num_reqs) & (duration_s > 0)
    for step, has_prefills in enumerate(ran_prefills.tolist()):
        before[step] = heat.before(step)
        if has_prefills:
            heat.passed(step, int(num_tokens[step]), float(duration_s[step]))
    return before


def _shared(steps: pa.Table) -> Counts:
    """What requests shared in each step; runs recorded before that was counted do not say."""
    if "num_shared_kv_tokens" not in steps.column_names:
        return np.zeros(steps.num_rows, dtype=np.int64)
    shared: Counts = np.nan_to_num(column(steps, "num_shared_kv_tokens")).astype(np.int64)
    return shared


def _seconds(steps: pa.Table) -> dict[str, Seconds]:
    """The parts that add up to a step, by name; a step that ran nothing lacks some."""
    if missing := [name for name in PARTS if f"parts.{name}" not in steps.column_names]:
        raise RunDirectoryError(
            f"steps.parquet has no parts.{missing[0]}: only runs with executor.kind: real measure "
            "what a fit needs"
        )
    return {name: np.nan_to_num(column(steps, f"parts.{name}")) for name in PARTS}


def _chunks(requests: pa.Table) -> StepRows:
    """Parts of prompts; those of preempted requests begin again, and are not explained."""
    offsets, step = items(requests, "prefill_chunk_step")
    _, num_tokens = items(requests, "prefill_chunk_num_tokens")
    request = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    place = np.arange(len(step)) - offsets[request]
    before = np.cumsum(num_tokens) - num_tokens
    cached = np.nan_to_num(column(requests, "cached_tokens")).astype(np.int64)
    start = cached[request] + before - before[offsets[request]]
    return StepRows(request, step, num_tokens, start, (place == 0).astype(np.int64))


def _decodes(requests: pa.Table) -> StepRows:
    """Steps that computed a request's last token to get the next one."""
    offsets, first = items(requests, "token_run_first_step")
    _, count = items(requests, "token_run_num_steps")
    _, tokens = items(requests, "token_run_num_tokens")
    if (tokens != 1).any():
        raise RunDirectoryError("requests.parquet: steps that verify drafts cannot be fitted yet")
    run = np.repeat(np.arange(len(first)), count)
    step = first[run] + np.arange(len(run)) - (np.cumsum(count) - count)[run]
    request = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[run]
    got = np.bincount(request, minlength=len(offsets) - 1)
    number = np.arange(len(run)) - (np.cumsum(got) - got)[request]
    later = number > 0  # the first token comes with the end of the prompt
    request, step, number = request[later], step[later], number[later]
    one = np.ones(len(step), dtype=np.int64)
    prompt = column(requests, "input_length").astype(np.int64)
    return StepRows(request, step, one, prompt[request] + number - 1, one - 1)


def _explained(rows: StepRows, requests: pa.Table, steps: pa.Table) -> Mask:
    """Whether the rows are all that a step ran, and no request in it was ever preempted."""
    num_steps = steps.num_rows
    reqs = np.bincount(rows.step, minlength=num_steps)
    tokens = np.bincount(rows.step, weights=rows.num_tokens, minlength=num_steps)
    again = column(requests, "num_preemptions")[rows.request] > 0
    unclear = np.bincount(rows.step, weights=again, minlength=num_steps)
    all_there = (reqs == column(steps, "num_scheduled")) & (tokens == column(steps, "num_tokens"))
    return np.asarray(all_there & (unclear == 0) & (tokens > 0))


def _warm(steps: pa.Table) -> Mask:
    if "parts.first_shape" not in steps.column_names:
        return np.ones(steps.num_rows, dtype=np.bool_)
    return np.asarray(np.nan_to_num(column(steps, "parts.first_shape")) == 0)


def _dealt(rows: StepRows, num_steps: int, dealer: Dealer, graph_sizes: Sequence[int]) -> Dealt:
    """How attention was dealt out in each step, whose requests stand in the order of arrival."""
    order = np.lexsort((rows.request, rows.step))
    ends = np.searchsorted(rows.step[order], np.arange(num_steps + 1))
    starts, num_tokens = rows.start[order].tolist(), rows.num_tokens[order].tolist()
    found = []
    for step in range(num_steps):
        of_step = slice(ends[step], ends[step + 1])
        plan = StepPlan(step, starts=starts[of_step], num_tokens=num_tokens[of_step])
        padded_tokens = padded(sum(plan.num_tokens), graph_sizes)
        nothing = Dealt(*[0] * len(Dealt._fields))
        found.append(dealer.deal(StepRun(plan), padded_tokens) if plan.starts else nothing)
    return Dealt(*np.array(found, dtype=np.float64).T)


def step_counts(
    rows: StepRows, num_steps: int, sliding_window: int | None = None
) -> dict[str, Counts]:
    """The counts of `Observations`, shape [steps] each."""
    return _Sums(rows, num_steps, sliding_window).columns()


class _Sums:
    """Adds rows up over steps."""

    def __init__(self, rows: StepRows, num_steps: int, window: int | None) -> None:
        self._rows = rows
        self._num_steps = num_steps
        self._window = window

    def columns(self) -> dict[str, Counts]:
        """The counts of `Observations`."""
        _, _, n, start, new = self._rows
        decode, prefill = (n == 1).astype(np.int64), (n > 1).astype(np.int64)
        context, read = start + 1, start + n
        if self._window is not None:
            context = np.minimum(context, self._window)
            read = np.minimum(read, n + self._window - 1)
        num_decodes, num_prefills = self._total(decode), self._total(prefill)
        longest = self._largest(np.where(n == 1, context, read))
        return {
            "num_tokens": self._total(n),
            "num_reqs": self._total(np.ones_like(n)),
            "num_decodes": num_decodes,
            "decode_kv_tokens": self._total(decode * context),
            "decode_kv_bound": np.maximum(num_decodes * self._largest(decode * context), 1),
            "num_prefills": num_prefills,
            "prefill_tokens": self._total(prefill * n),
            "prefill_pairs": self._total(prefill * query_key_pairs(start, n, self._window)),
            "prefill_kv_tokens": self._total(prefill * read),
            "longest_kv_tokens": longest * (num_prefills > 0),
            "num_new": self._total(new),
            "num_table_tokens": self._total(new * (start + n)),
        }

    def _largest(self, values: Counts) -> Counts:
        found = np.zeros(self._num_steps, dtype=np.int64)
        np.maximum.at(found, self._rows.step, values)
        return found

    def _total(self, values: Counts) -> Counts:
        found = np.zeros(self._num_steps, dtype=np.int64)
        np.add.at(found, self._rows.step, values)
        return found
