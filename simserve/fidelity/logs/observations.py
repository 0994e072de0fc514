"""Measured steps as columns: what each step computed and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.cost.dealing import Dealt
from simserve.cost.profile_file import Graphs
from simserve.cost.regimes import regime_of_counts
from simserve.cost.step_model import Path
from simserve.cost.step_work import NO_FACTORS, SizeFactors, StepWork
from simserve.fidelity.logs.vllm_log import StepLog

__all__ = ["COLUMNS", "Observations", "PathSteps", "observe", "split_by_path"]

Counts = NDArray[np.int64]
Seconds = NDArray[np.float64]

_LONGEST_GAP_S = 0.05
"""The engine's loop slept where more time passed between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """One log's steps; every column has shape [steps]."""

    duration_s: Seconds
    schedule_s: Seconds
    update_s: Seconds
    gap_s: Seconds
    """From the step's end to the next step's start; NaN where the loop slept, and at the end."""
    gap_requests: Counts
    """Requests taken in during that gap, and the tokens of their prompts."""
    gap_tokens: Counts
    num_tokens: Counts
    num_reqs: Counts
    num_decodes: Counts
    decode_kv_tokens: Counts
    decode_kv_bound: Counts
    """Decodes times the longest of their contexts; 1 if there are none."""
    num_prefills: Counts
    prefill_tokens: Counts
    prefill_pairs: Counts
    prefill_kv_tokens: Counts
    longest_kv_tokens: Counts
    """Of the request that reads most KV tokens, in steps with prefills; else 0."""
    shared_kv_tokens: Counts
    """Tokens in blocks of several requests, beyond one of them each; 0 where it is not known."""
    num_new: Counts
    """Requests that came with a new block table, and the tokens of those tables."""
    num_table_tokens: Counts
    dealt: Dealt | None = None
    """How attention was dealt out, arrays of shape [steps]; None: not known."""

    def __len__(self) -> int:
        return len(self.duration_s)

    def take(self, rows: Counts | NDArray[np.bool_]) -> Observations:
        """Some of the steps."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        dealt = self.dealt and Dealt(*(column[rows] for column in self.dealt))
        return Observations(**columns, dealt=dealt)

    @classmethod
    def joined(cls, several: Sequence[Observations]) -> Observations:
        """The steps of all, one after another; all of them know how attention was dealt out, or
        none does."""
        columns = {name: np.concatenate([getattr(o, name) for o in several]) for name in COLUMNS}
        dealt = [one.dealt for one in several if one.dealt is not None]
        together = zip(*dealt, strict=True)
        return cls(**columns, dealt=Dealt(*map(np.concatenate, together)) if dealt else None)

    @property
    def engine_s(self) -> Seconds:
        """schedule() and update()."""
        return self.schedule_s + self.update_s

    @property
    def regimes(self) -> list[str]:
        """The regime of each step."""
        counts = self.num_tokens.tolist(), self.num_reqs.tolist(), self.num_decodes.tolist()
        return [regime_of_counts(*step) for step in zip(*counts, strict=True)]


COLUMNS = tuple(field.name for field in fields(Observations) if field.name != "dealt")
"""Names of the columns that are always there."""


def observe(log: StepLog) -> Observations:
    """Count what every step of a log computed; nothing, for a step without tokens."""
    steps = log.steps
    num_reqs = np.diff(steps.row_offsets)
    filled = num_reqs > 0
    first = steps.row_offsets[:-1][filled]
    n, start = steps.num_tokens, steps.num_computed
    decode, prefill = (n == 1).astype(np.int64), (n > 1).astype(np.int64)

    def over_steps(ufunc: np.ufunc, rows: Counts) -> Counts:
        values = np.zeros(len(steps), dtype=np.int64)
        values[filled] = ufunc.reduceat(rows, first)
        return values

    def total(rows: Counts) -> Counts:
        return over_steps(np.add, rows)

    context = decode * (start + 1)
    new = _has_new_table(log)
    gap_s, gap_requests, gap_tokens = _gaps(log)
    return Observations(
        duration_s=steps.duration_s,
        schedule_s=steps.schedule_s,
        update_s=steps.update_s,
        gap_s=gap_s,
        gap_requests=gap_requests,
        gap_tokens=gap_tokens,
        num_tokens=total(n),
        num_reqs=num_reqs,
        num_decodes=total(decode),
        decode_kv_tokens=total(context),
        decode_kv_bound=np.maximum(total(decode) * over_steps(np.maximum, context), 1),
        num_prefills=total(prefill),
        prefill_tokens=total(prefill * n),
        prefill_pairs=total(prefill * (n * start + n * (n + 1) // 2)),
        prefill_kv_tokens=total(prefill * (start + n)),
        longest_kv_tokens=over_steps(np.maximum, start + n) * (total(prefill) > 0),
        shared_kv_tokens=np.zeros(len(steps), dtype=np.int64),
        num_new=total(new),
        num_table_tokens=total(new * (start + n)),
    )


def _has_new_table(log: StepLog) -> Counts:
    """1 for a row whose request is new in its step, or resumed after a preemption."""
    steps = log.steps
    new = np.zeros(len(steps.request), dtype=np.int64)
    new[np.unique(steps.request, return_index=True)[1]] = 1
    for step, victims in steps.preempted.items():
        later = int(steps.row_offsets[step + 1])
        for victim in victims:
            again = np.flatnonzero(steps.request[later:] == victim)
            new[later + again[:1]] = 1
    return new


def _gaps(log: StepLog) -> tuple[Seconds, Counts, Counts]:
    """Time, requests and prompt tokens between each step and the next."""
    steps = log.steps
    gap_s = np.append(np.maximum(steps.start_s[1:] - steps.end_s[:-1], 0.0), np.nan)
    prompts = np.array([request.prompt_len for request in log.requests])
    due_s = np.array([request.arrival_s for request in log.requests])
    step = np.searchsorted(steps.end_s, log.added_s, side="right") - 1
    inside = step >= 0
    requests = np.bincount(step[inside], minlength=len(steps))
    tokens = np.bincount(step[inside], weights=prompts[inside], minlength=len(steps))
    # Before a request that was due only after the step's end the loop may have slept.
    waited_for = inside & (due_s > steps.end_s[np.maximum(step, 0)])
    gap_s[step[waited_for]] = np.nan
    gap_s[gap_s > _LONGEST_GAP_S] = np.nan
    return gap_s, requests, tokens.astype(np.int64)


class PathSteps(NamedTuple):
    """Steps of one kernel path, all with prefills or all without."""

    path: Path
    rows: Counts
    """Their places among the observations."""
    work: StepWork


def split_by_path(
    steps: Observations, graphs: Graphs, size_factors: SizeFactors = NO_FACTORS
) -> list[PathSteps]:
    """The steps by kernel path and whether they hold prefills."""
    mixed = steps.num_prefills > 0
    padded = _padded(steps.num_tokens, graphs.sizes)
    padded = np.where(mixed, _padded(steps.num_tokens, graphs.of_prefills), padded)
    tokens = np.where(padded > 0, padded, steps.num_tokens)
    path = np.where(padded > 0, Path.PIECEWISE, Path.EAGER)
    path[~mixed & (tokens <= graphs.full_up_to)] = Path.FULL
    groups = []
    for one in Path:
        for with_prefills in (False, True):
            rows = np.flatnonzero((path == one) & (mixed == with_prefills))
            if len(rows):
                work = _work(steps.take(rows), tokens[rows], with_prefills)
                of_kind = size_factors.prefills if with_prefills else size_factors.decodes
                if one is not Path.EAGER and of_kind:
                    factors = [of_kind.get(size, 1.0) for size in tokens[rows].tolist()]
                    work = work._replace(size_factor=np.array(factors))
                groups.append(PathSteps(one, rows, work))
    return groups


def _padded(num_tokens: Counts, sizes: list[int]) -> Counts:
    """The smallest size that holds so many tokens; 0: none does."""
    return np.array([*sizes, 0])[np.searchsorted(sizes, num_tokens)]


def _work(steps: Observations, padded_tokens: Counts, with_prefills: bool) -> StepWork:
    return StepWork(
        num_padded_tokens=padded_tokens.astype(np.float64),
        num_reqs=steps.num_reqs,
        num_logits_rows=steps.num_reqs,
        num_new=steps.num_new,
        num_table_tokens=steps.num_table_tokens,
        decode_kv_tokens=steps.decode_kv_tokens,
        decode_kv_bound=steps.decode_kv_bound,
        num_prefills=steps.num_prefills if with_prefills else None,
        prefill_pairs=steps.prefill_pairs,
        prefill_kv_tokens=steps.prefill_kv_tokens,
        longest_kv_tokens=steps.longest_kv_tokens,
        shared_kv_tokens=steps.shared_kv_tokens,
        size_factor=np.ones(len(steps)),
        dealt=steps.dealt,
    )
