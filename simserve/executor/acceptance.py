"""How many made-up drafts are right: by probabilities, or as a run has measured it.

A draw depends on (seed, request id, tokens so far) alone, not on what else runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from simserve.errors import ConfigError, Problem, why_unreadable

__all__ = ["Accepted", "accepted_as_counted", "accepted_by_position", "read_acceptance"]

Accepted = Callable[[str, int], int]
"""Drafts that are right, given (request id, tokens so far)."""

_RANGE = 2**32
_KEY = "scheduler.speculative.acceptance_file"


def accepted_by_position(probabilities: Sequence[float], seed: int) -> Accepted:
    """Accept each draft with the probability of its position, up to the first that is not.

    Args:
        probabilities: one a position, given that the drafts before it were accepted.
        seed: of the draws.
    """
    key = seed.to_bytes(8, "little")
    limits = [probability * _RANGE for probability in probabilities]

    def accepted(request_id: str, so_far: int) -> int:
        draws = _draws(key, request_id, so_far, len(limits))
        for i, limit in enumerate(limits):
            if draws[i] >= limit:
                return i
        return len(limits)

    return accepted


def accepted_as_counted(
    counts: Sequence[int], by_request: Mapping[str, Sequence[int]], seed: int
) -> Accepted:
    """Accept as many drafts as were accepted in some step that was counted.

    Args:
        counts: accepted drafts of steps; each step of a request takes one of them at random.
        by_request: of each step of single requests, in order. A request that has more steps than
            that takes from `counts`, or from its own if there are none.
        seed: of the draws.
    """
    key = seed.to_bytes(8, "little")
    # A request's first token comes without drafts, each later step adds its drafts and one more.
    starts = {
        name: list(accumulate((1 + one for one in own), initial=1))
        for name, own in by_request.items()
    }

    def accepted(request_id: str, so_far: int) -> int:
        own = by_request.get(request_id, ())
        if own:
            step = bisect_right(starts[request_id], so_far) - 1
            if 0 <= step < len(own):
                return own[step]
        among = counts or own
        if not among:
            return 0
        (draw,) = _draws(key, request_id, so_far, 1)
        return among[int(draw / _RANGE * len(among))]

    return accepted


def _draws(key: bytes, request_id: str, so_far: int, count: int) -> tuple[int, ...]:
    """Numbers from 0 to `_RANGE` - 1."""
    stream = hashlib.shake_128(key + f"{so_far}:{request_id}".encode()).digest(4 * count)
    return struct.unpack(f"<{count}I", stream)


def read_acceptance(path: Path, num_speculative_tokens: int, seed: int) -> Accepted:
    """What a JSON file says of acceptance.

    It holds `spec_decode_conditional_acceptance_pos_0` and so on, as the summary.json of a run with
    drafts does; or vLLM's counters
    `num_drafts` and `num_accepted_tokens_per_pos`; or `accepted`: a list of counts, one a step, or
    such lists by request id. Positions beyond those it knows are not accepted.

    Raises:
        ConfigError: it cannot be read, or says nothing of acceptance.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(f"{path} cannot be read: {why_unreadable(error)}") from None
    if isinstance(said, list) and len(said) == 1:
        said = said[0]  # a summary.json of one run
    if not isinstance(said, dict):
        raise _error(f"{path} holds no mapping")
    try:
        return _accepted(said, path, num_speculative_tokens, seed)
    except (TypeError, ValueError, AttributeError):
        raise _error(f"{path} holds something else than numbers where they are expected") from None


def _accepted(said: dict[str, Any], path: Path, k: int, seed: int) -> Accepted:
    if "accepted" in said:
        return _counted(said["accepted"], path, k, seed)
    name = "spec_decode_conditional_acceptance_pos_"
    shares = [said[f"{name}{i}"] for i in range(k) if f"{name}{i}" in said]
    if not shares and "num_drafts" in said and "num_accepted_tokens_per_pos" in said:
        reached = [said["num_drafts"], *said["num_accepted_tokens_per_pos"]]
        if not all(0 <= count < math.inf for count in reached):
            raise _error(f"{path}: a counter is not a number from 0 on")
        pairs = zip(reached[1:], reached[:-1], strict=True)
        shares = [accepted / before if before else 0.0 for accepted, before in pairs]
    if not shares:
        raise _error(
            f"{path} holds neither accepted, nor {name}0, nor num_drafts and "
            "num_accepted_tokens_per_pos"
        )
    shares = [float(share or 0.0) for share in shares]
    if not all(0 <= share <= 1 for share in shares):
        raise _error(f"{path}: an acceptance is not from 0 to 1")
    return accepted_by_position((shares + [0.0] * k)[:k], seed)


def _counted(accepted: Any, path: Path, k: int, seed: int) -> Accepted:
    by_request = accepted if isinstance(accepted, dict) else {}
    counts = [] if by_request else list(accepted)
    told = list(by_request.values()) or [counts]
    for one in told:
        if not one or not all(type(count) is int and 0 <= count <= k for count in one):
            raise _error(
                f"{path}: accepted must hold numbers of drafts, from 0 to "
                f"num_speculative_tokens ({k})"
            )
    return accepted_as_counted(counts, by_request, seed)


def _error(message: str) -> ConfigError:
    return ConfigError([Problem(path=_KEY, message=message)])
