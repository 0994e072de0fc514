"""How requests ended, in words: why some were rejected, and how much of the prompts was cached."""

from __future__ import annotations

import re
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
    for first, count, differ in sorted(_alike(errors), key=lambda one: -one[1]):
        yield f"{count:,} rejected{', such as' if differ else ''}: {first}"


def points_warnings(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What came up in points of a sweep, and in how many of them; numbers in it may differ.

    >>> said = [{"rejected": 2}, {"warnings": "3 are far"}, {"warnings": "4 are far"}]
    >>> points_warnings(said)[1:]
    ['3 are far (2 of 3 points, with other numbers)']
    """
    said = []
    for summary in summaries:
        if (summary.get("rejected") or 0) > 0:
            said.append("rejected requests are in no latency: see the column `rejected`")
        if isinstance(text := summary.get("warnings"), str):
            said.append(text)
    points = counted(len(summaries), "point")
    return [
        f"{first} ({count} of {points}{', with other numbers' if differ else ''})"
        for first, count, differ in _alike(said)
    ]


def _alike(texts: Iterable[str]) -> Iterator[tuple[str, int, bool]]:
    """The first of those alike but for numbers, how many there are, and whether they differ."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(_NUMBER.sub("#", text), []).append(text)
    for found in alike.values():
        yield found[0], len(found), len(set(found)) > 1


def cached_share(summary: Mapping[str, Scalar]) -> float | None:
    """Share of all prompt tokens that the prefix cache had when requests were first admitted."""
    cached, prompts = summary.get("total_cached_tokens"), summary.get("total_input_tokens")
    if not isinstance(cached, int | float) or not isinstance(prompts, int | float) or not prompts:
        return None
    return cached / prompts
