"""Whether a log's requests and its steps say the same of when tokens came out."""

from __future__ import annotations

import numpy as np

from simserve.errors import TraceError
from simserve.fidelity.logs.vllm_log import StepLog

__all__ = ["check_token_times"]

_ROUNDING_S = 2e-6
"""Times are rounded to microseconds, each by itself."""


def check_token_times(log: StepLog) -> None:
    """Refuse a log in which a token came out outside of the step that computed it.

    A request that has more or fewer tokens than its steps yielded is passed over: its plans are
    others than those of an engine, which a replay tells.

    Raises:
        TraceError: names the request, the token and the step's times.
    """
    steps = log.steps
    step_of = np.repeat(np.arange(len(steps)), np.diff(steps.row_offsets))
    computed = steps.num_computed + steps.num_tokens
    by_request = np.argsort(steps.request, kind="stable")
    cuts = np.searchsorted(steps.request[by_request], np.arange(1, len(log.requests)))
    for i, rows in enumerate(np.split(by_request, cuts)):
        times_s, totals = log.token_times_s[i], computed[rows]
        before = np.maximum.accumulate(np.append(0, totals))[:-1]
        # What a preemption makes necessary again yields nothing.
        yields = (totals > before) & (totals >= log.requests[i].prompt_len)
        step = step_of[rows[yields]]
        if len(step) != len(times_s):
            continue
        start_s, end_s = steps.start_s[step], steps.end_s[step]
        wrong = (times_s < start_s - _ROUNDING_S) | (times_s > end_s + _ROUNDING_S)
        if wrong.any():
            token = int(wrong.argmax())
            at, start, end = (round(1e6 * x[token]) for x in (times_s, start_s, end_s))
            raise TraceError(
                f"{log.path}: requests[{i}]: times: its token {token} came out at {at} us, not in "
                f"the step that computed it, which ran from {start} to {end} us"
            )
