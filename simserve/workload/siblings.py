"""n > 1: requests that arrive together, with one prompt, and go on with tokens of their own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simserve.errors import TraceError
from simserve.types import TraceRequest
from simserve.workload.groups import Group, Method
from simserve.workload.streams import Stream, generator
from simserve.workload.transform import with_output_len

__all__ = ["ByClass", "Parallel", "Siblings", "draws_of", "sibling_ids", "sibling_of"]


def sibling_ids(request_id: str, n: int) -> list[str]:
    """What the sequences of a request are called, as vLLM does: `0_a` to `3_a` for four of `a`."""
    return [f"{i}_{request_id}" for i in range(n)]


def sibling_of(name: str, several: Mapping[str, int]) -> str | None:
    """The request, of those in `several` with their numbers of sequences, that has one called so.

    >>> sibling_of("3_a", {"a": 4}), sibling_of("4_a", {"a": 4}), sibling_of("03_a", {"a": 4})
    ('a', None, None)
    """
    place, _, request_id = name.partition("_")
    n = several.get(request_id, 0)
    is_one = len(place) <= len(str(n)) and place.isdecimal() and int(place) < n
    return request_id if is_one and place == str(int(place)) else None


class Siblings:
    """Each sibling is a request of its own (protocol `Group`).

    The first goes on with the tokens that
    the request has in the trace, so that a conversation continues it; the others with their own.
    A request for one sequence stays as it is.

    Args:
        request: of the user.
        output_lens: of the siblings (tokens).
    """

    def __init__(self, request: TraceRequest, output_lens: Sequence[int]) -> None:
        self._request = replace(request, n=1)
        self._output_lens = output_lens

    def first(self) -> list[TraceRequest]:
        """All of them."""
        request, lens = self._request, self._output_lens
        if len(lens) == 1:
            return [with_output_len(request, lens[0])]
        name = request.request_id
        outputs = (request.output_parts, *[None] * (len(lens) - 1))
        return [
            with_output_len(
                replace(request, request_id=own, output=output, group=name, sibling=i),
                lens[i],
            )
            for i, (own, output) in enumerate(
                zip(sibling_ids(name, len(lens)), outputs, strict=True)
            )
        ]

    def further(self, request_id: str, now_s: float) -> Sequence[TraceRequest]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """`n` sequences of each request (protocol `Method`).

    With `end_probability` p > 0 each sequence ends early: each of its tokens is the last with
    probability p, at most `output_len` tokens. The draw depends on the request's id and `seed`.
    """

    n: int = 1
    end_probability: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if not 0 <= self.end_probability <= 1:
            raise ValueError(f"end_probability must be from 0 to 1, got {self.end_probability}")

    def open(self, request: TraceRequest) -> Siblings:
        """Its siblings."""
        output_lens = [request.output_len] * self.n
        if self.end_probability:
            drawn = draws_of(request, self.seed).geometric(self.end_probability, self.n)
            output_lens = [min(request.output_len, length) for length in drawn.tolist()]
        return Siblings(request, output_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByClass:
    """A method for each class of requests, and one for all others (protocol `Method`).

    Requests that say themselves how many sequences they want get them where no method is given.
    """

    methods: Mapping[str, Method]
    others: Method | None = None

    def open(self, request: TraceRequest) -> Group:
        """By the request's class.

        Raises:
            TraceError: both the request and its class say how it is decoded.
        """
        method = self.methods.get(request.class_, self.others)
        if method is None:
            return Parallel(n=request.n).open(request)
        if request.n > 1:
            raise TraceError(
                f"request '{request.request_id}': n: is {request.n}, but the configuration says "
                "how it is decoded (workload.decoding): leave out one of the two"
            )
        return method.open(request)


def draws_of(request: TraceRequest, seed: int) -> np.random.Generator:
    """Random numbers of one request, whatever else there is."""
    return generator(seed, Stream.DECODING, zlib.crc32(request.request_id.encode()))
