"""What the engine did over time: the values of its steps, and the idle time between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.errors import RunDirectoryError
from simserve.metrics.arrow import column, items
from simserve.metrics.result import RunResult

__all__ = [
    "MAX_SLICES",
    "OVER_TIME",
    "Envelope",
    "Signal",
    "decode_name",
    "envelope",
    "over_time",
    "per_step",
    "prefill_tokens",
    "reach",
    "reach_of_batches",
]

MAX_SLICES = 400
"""Slices of time over which a value is drawn as mean and range."""

OVER_TIME = (
    "lines and areas are means over time, idle time included; shades reach from the least "
    "to the most"
)
"""How to read a picture of it."""

DECODE_TOKENS, PREFILL_TOKENS = "decode_tokens", "prefill_tokens"
"""Beside the columns of the steps table. Its own two go by batch shape: there, drafts that are
verified count as prefill."""

Floats = NDArray[np.float64]


class Signal(NamedTuple):
    """A value over time: `values[i]` from `when_s[i]` to `when_s[i + 1]`; shape [pieces] and one
    more time, the end of the last step."""

    when_s: Floats
    values: Floats


class Envelope(NamedTuple):
    """A value over slices of time, all of shape [slices + 1]: each holds until the next, and the
    last one repeats the one before it at the end of time."""

    when_s: Floats
    low: Floats
    mean: Floats
    high: Floats


def over_time(result: RunResult, name: str) -> Signal:
    """A column of the steps table, `decode_tokens` or `prefill_tokens`, from the first step on.

    Where nobody runs between a step's end and the next one's start, all is zero but `num_waiting`,
    which holds. Where somebody does, the host was busy, and all holds.
    """
    starts, ends = (column(result.steps_table, key) for key in ("start_s", "end_s"))
    values = per_step(result, name).astype(np.float64)
    after = np.flatnonzero(starts[1:] > ends[:-1]) + 1
    holds = name == "num_waiting" or _num_running_before(result, starts[after]) > 0
    idle = np.where(holds, values[after - 1], 0.0)
    when = np.insert(starts, after, ends[after - 1])
    return Signal(np.append(when, ends[-1:]), np.insert(values, after, idle))


def _num_running_before(result: RunResult, when_s: Floats) -> NDArray[np.int64]:
    """Requests that were admitted and had not ended just before each time; shape [times]."""
    admitted, ended = (column(result.requests_table, f"{key}_s") for key in ("scheduled", "ended"))
    ended = np.where(np.isnan(admitted), np.nan, ended)  # one that never ran has not ended running
    come, gone = (np.searchsorted(np.sort(times), when_s) for times in (admitted, ended))
    return come - gone


def per_step(result: RunResult, name: str) -> NDArray[np.int64] | Floats:
    """A column of the steps table, `decode_tokens` or `prefill_tokens`; shape [steps]."""
    if name == PREFILL_TOKENS:
        return prefill_tokens(result)
    if name == DECODE_TOKENS:
        return np.maximum(column(result.steps_table, "num_tokens") - prefill_tokens(result), 0)
    return column(result.steps_table, name)


def prefill_tokens(result: RunResult) -> NDArray[np.int64]:
    """Tokens of prompts that each step computed, chunk by chunk; shape [steps].

    A run directory that does not tell the chunks tells it by batch shape.

    Raises:
        RunDirectoryError: the tables are not of one run.
    """
    requests, steps = result.requests_table, result.steps_table
    if "prefill_chunk_step" not in requests.column_names:
        known: NDArray[np.int64] = column(steps, "num_prefill_tokens")
        return known
    (_, where), (_, tokens) = (
        items(requests, f"prefill_chunk_{name}") for name in ("step", "num_tokens")
    )
    if len(where) and where.max() >= steps.num_rows:
        raise RunDirectoryError(
            f"requests.parquet: prefill_chunk_step: tells of steps that steps.parquet, with "
            f"{steps.num_rows} rows, does not have: the two are not of one run"
        )
    return np.bincount(where, weights=tokens, minlength=steps.num_rows).astype(np.int64)


def decode_name(result: RunResult) -> str:
    """What decode tokens are called: drafts that are verified are among them."""
    has_drafts = result.summary_dict.get("spec_decode_num_drafts")
    return "decode, drafts included" if has_drafts else "decode"


def envelope(signal: Signal, slices: int = MAX_SLICES) -> Envelope:
    """Least value, mean over time and largest value in at most `slices` slices of time."""
    if len(signal.values) <= slices:
        held = np.append(signal.values, signal.values[-1:])
        return Envelope(signal.when_s, held, held, held)
    return reach(signal, slices)


def reach(signal: Signal, slices: int = MAX_SLICES) -> Envelope:
    """The same in slices that are never narrower than a picture can show, as pieces may be that
    stand among much idle time."""
    when, values = signal
    if not len(values) or when[0] == when[-1]:
        held = np.append(values, values[-1:])
        return Envelope(when, held, held, held)
    edges = np.linspace(when[0], when[-1], slices + 1)
    area = np.concatenate(([0.0], np.cumsum(values * np.diff(when))))
    mean = np.diff(np.interp(edges, when, area)) / np.diff(edges)
    # Pieces that reach into a slice: first … last - 1.
    first = np.searchsorted(when[:-1], edges[:-1], side="right") - 1
    last = np.maximum(np.searchsorted(when[:-1], edges[1:], side="left"), first + 1)
    low, high = (
        reduce.reduceat(np.append(values, values[-1]), np.column_stack((first, last)).ravel())[::2]
        for reduce in (np.minimum, np.maximum)
    )
    mean = np.clip(mean, low, high)  # sums of many pieces round
    return Envelope(edges, *(np.append(each, each[-1]) for each in (low, mean, high)))


def reach_of_batches(
    decode: Signal, total: Signal, slices: int = MAX_SLICES
) -> tuple[Floats, Floats, Floats]:
    """When slices begin, and the most tokens of a step in each: of decodes, and of all."""
    when, _, _, most = reach(decode, slices)
    return when, most, reach(total, slices).high
