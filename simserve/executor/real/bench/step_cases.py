"""Shapes of a step in the grammar `[NAME=]PART{,PART}`, PART `[N*]Q[@K[~S]]`. Needs no torch.

N requests (1) of Q new tokens each, after K tokens (0) that are computed already, of which the
first S (0) are the same of all N, in the same blocks, as far as S fills these. Equal parts that
follow one another are one.

    64*1@2048          64 decodes, each at token number 2,048 (counted from 0)
    8192               one prompt of 8,192 tokens
    2048@30720         a chunk of 2,048 tokens after 30,720
    64*1@2048~512      64 decodes that have a prompt of 512 tokens together
    mix=64*1@2048,1984   the decodes beside a chunk, called mix
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import NamedTuple

from simserve.errors import SimserveError

__all__ = ["StepCase", "parse_step_case"]

_NAME = re.compile(r"[\w.-]+")
_PART = re.compile(r"(?:(?P<count>\d+)\*)?(?P<new>\d+)(?:@(?P<computed>\d+)(?:~(?P<shared>\d+))?)?")
_MAX_REQUESTS = 100_000


class RequestShape(NamedTuple):
    """What one request has in a step."""

    num_new_tokens: int
    num_computed_tokens: int
    num_shared_tokens: int = 0
    """Of those, how many it has together with its neighbours that are like it."""

    @property
    def num_tokens(self) -> int:
        """Its length after the step."""
        return self.num_new_tokens + self.num_computed_tokens

    def __str__(self) -> str:
        shared = f"~{self.num_shared_tokens}" if self.num_shared_tokens else ""
        return f"{self.num_new_tokens}@{self.num_computed_tokens}{shared}"


class StepCase(NamedTuple):
    """A step to measure."""

    name: str
    requests: tuple[RequestShape, ...]

    @property
    def shape(self) -> str:
        """The requests in the grammar, equal ones that follow one another together."""
        groups = ((len(list(same)), request) for request, same in groupby(self.requests))
        return ",".join(f"{count}*{request}" for count, request in groups)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(request.num_new_tokens for request in self.requests)

    @property
    def max_len(self) -> int:
        """Most tokens of a request after the step."""
        return max(request.num_tokens for request in self.requests)


def parse_step_case(text: str) -> StepCase:
    """Read one case; without a name it is called by its shape.

    >>> parse_step_case("mix=2*1@9,4").requests[1:]
    (RequestShape(num_new_tokens=1, num_computed_tokens=9, num_shared_tokens=0), \
RequestShape(num_new_tokens=4, num_computed_tokens=0, num_shared_tokens=0))

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
            raise _error(
                text, f"'{part}' is not [N*]Q[@K[~S]], such as 64*1@2048, 8192 or 2048@30720"
            )
        count, new = int(found["count"] or 1), int(found["new"])
        if not count or not new:
            raise _error(text, f"'{part}' computes nothing: N and Q must be at least 1")
        if len(requests) + count > _MAX_REQUESTS:
            raise _error(text, f"more than {_MAX_REQUESTS} requests")
        computed, shared = int(found["computed"] or 0), int(found["shared"] or 0)
        if shared > computed:
            raise _error(text, f"'{part}' shares more tokens than are computed")
        requests += [RequestShape(new, computed, shared)] * count
    return StepCase(name.strip() or shape.replace(" ", ""), tuple(requests))


def _error(text: str, message: str) -> SimserveError:
    return SimserveError(f"--case {text:.100}: {message}")
