"""How requests ended, in words: why some were rejected, and how much of the prompts was cached."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from simserve.errors import counted
from simserve.metrics.options import Scalar

__all__ = ["NONE_COMPLETED", "cached_share", "points_warnings", "rejections"]

NONE_COMPLETED = "No request completed: there are no latencies."

_NUMBER = re.compile(r"\d[\d,.]*")


def rejections(errors: Iterable[str]) -> Iterator[str]:
    """Why requests were rejected, the most frequent reason first; numbers in it may differ.

    >>> list(rejections(["12 tokens are too many", "no room", "15 tokens are too many"]))
    ['2 rejected, such as: 12 tokens are too many', '1 rejected: no room']
    """
    alike: dict[str, list[str]] = {}
    for error in errors:
        alike.setdefault(_NUMBER.sub("#", error), []).append(error)
    for found in sorted(alike.values(), key=len, reverse=True):
        such = ", such as" if len(set(found)) > 1 else ""
        yield f"{len(found):,} rejected{such}: {found[0]}"


def points_warnings(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came up in points of a sweep, and in how many of them.

    >>> points_warnings([{"rejected": 2}, {"rejected": 0, "warnings": "too long"}, {}])[1:]
    ['too long (1 of 3 points)']
    """
    counts: Counter[str] = Counter()
    for summary in summaries:
        if (summary.get("rejected") or 0) > 0:
            counts["rejected requests are in no latency: see the column `rejected`"] += 1
        if isinstance(text := summary.get("warnings"), str):
            counts[text] += 1
    points = counted(len(summaries), "point")
    return [f"{text} ({count} of {points})" for text, count in counts.items()]


def cached_share(summary: Mapping[str, Scalar]) -> float | None:
    """Share of all prompt tokens that the prefix cache had when requests were first admitted."""
    cached, prompts = summary.get("total_cached_tokens"), summary.get("total_input_tokens")
    if not isinstance(cached, int | float) or not isinstance(prompts, int | float) or not prompts:
        return None
    return cached / prompts
