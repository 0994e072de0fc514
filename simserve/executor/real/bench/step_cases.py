"""Shapes of a step in the grammar `[NAME=][N*]Q[@K]{,[N*]Q[@K]}`. Needs no torch.

N requests (1) of Q new tokens each, after K tokens (0) that are computed already:

    64*1@2048          64 decodes, each at token number 2,048 (counted from 0)
    8192               one prompt of 8,192 tokens
    2048@30720         a chunk of 2,048 tokens after 30,720
    mix=64*1@2048,1984   the decodes beside a chunk, called mix
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import NamedTuple

from simserve.errors import SimserveError

__all__ = ["StepCase", "parse_step_case"]

_NAME = re.compile(r"[\w.-]+")
_PART = re.compile(r"(?:(?P<count>\d+)\*)?(?P<new>\d+)(?:@(?P<computed>\d+))?")
_MAX_REQUESTS = 100_000


class RequestShape(NamedTuple):
    """What one request has in a step."""

    num_new_tokens: int
    num_computed_tokens: int


class StepCase(NamedTuple):
    """A step to measure."""

    name: str
    requests: tuple[RequestShape, ...]

    @property
    def shape(self) -> str:
        """The requests in the grammar, equal ones that follow one another together."""
        groups = ((len(list(same)), *request) for request, same in groupby(self.requests))
        return ",".join(f"{count}*{new}@{before}" for count, new, before in groups)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(request.num_new_tokens for request in self.requests)

    @property
    def max_len(self) -> int:
        """Most tokens of a request after the step."""
        return max(sum(request) for request in self.requests)


def parse_step_case(text: str) -> StepCase:
    """Read one case; without a name it is called by its shape.

    >>> parse_step_case("mix=2*1@9,4").requests[1:]
    (RequestShape(num_new_tokens=1, num_computed_tokens=9), RequestShape(num_new_tokens=4, \
num_computed_tokens=0))

    Raises:
        SimserveError: the text is not in the grammar, or there is nothing to compute.
    """
    name, equals, shape = text.rpartition("=")
    if equals and not _NAME.fullmatch(name.strip()):
        raise _error(text, f"'{name}' is no name: use letters, digits, '.', '_' and '-'")
    requests: list[RequestShape] = []
    for part in shape.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise _error(text, f"'{part}' is not [N*]Q[@K], such as 64*1@2048, 8192 or 2048@30720")
        count, new = int(found["count"] or 1), int(found["new"])
        if not count or not new:
            raise _error(text, f"'{part}' computes nothing: N and Q must be at least 1")
        if len(requests) + count > _MAX_REQUESTS:
            raise _error(text, f"more than {_MAX_REQUESTS} requests")
        requests += [RequestShape(new, int(found["computed"] or 0))] * count
    return StepCase(name.strip() or shape.replace(" ", ""), tuple(requests))


def _error(text: str, message: str) -> SimserveError:
    return SimserveError(f"--case {text:.100}: {message}")
