"""What a step log tells of how its requests ended: what it leaves open, and what cannot be."""

from __future__ import annotations

import numpy as np

from simserve.errors import TraceError
from simserve.fidelity.logs.vllm_log import StepLog

__all__ = ["check_lengths", "open_ends"]


def open_ends(log: StepLog) -> dict[int, str]:
    """Requests that were not over with their last token, by place, with what is known of them.

    An abort or the end of the record ended them, and the log does not tell when. A prompt that is
    too long is none of them: an engine refuses it at once.
    """
    found = {
        i: "no token came out"
        for i, (request, times) in enumerate(zip(log.requests, log.token_times_s, strict=True))
        if not len(times) and request.prompt_len <= log.config.max_model_len
    }
    last = {i: step for step, victims in log.steps.preempted.items() for i in victims}
    for i, step in last.items():
        if i < len(log.requests) and i not in found and not _is_back(log, i, step):
            found[i] = "it was preempted after its last token"
    return found


def _is_back(log: StepLog, request: int, step: int) -> bool:
    """Whether a request preempted in a step came to its last known token after that."""
    steps, first = log.steps, log.steps.row_offsets[step + 1]
    later = first + np.flatnonzero(steps.request[first:] == request)
    known = log.requests[request].prompt_len + len(log.token_times_s[request])
    return bool((steps.num_computed[later] + steps.num_tokens[later] >= known - 1).any())


def check_lengths(log: StepLog) -> None:
    """Refuse a log whose requests gave tokens that its `max_model_len` does not allow.

    Raises:
        TraceError: names the request.
    """
    most = log.config.max_model_len
    for i, (request, times) in enumerate(zip(log.requests, log.token_times_s, strict=True)):
        prompt_len, num_tokens = request.prompt_len, len(times)
        if num_tokens > (0 if prompt_len > most else max(most - prompt_len, 1)):
            raise TraceError(
                f"{log.path}: requests[{i}]: segs: {prompt_len} tokens of prompt and {num_tokens} "
                f"that came out are more than max_model_len, which is {most}: does config lack it?"
            )
