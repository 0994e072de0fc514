"""What prompts have in common with the requests before them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator

from simserve.segments import Part, Segments
from simserve.types import TraceRequest

__all__ = ["PrefixTree", "apart"]

_FIRST_ALIKE = sys.hash_info.modulus
"""Python's hash of a whole number is the remainder of its division by this; that of -1 is -2."""


def apart(name: Hashable) -> Hashable:
    """Something in place of a name whose hash no other name has, up to chance.

    >>> hash(-1) == hash(-2), hash(apart(-1)) == hash(apart(-2))
    (True, False)
    """
    if isinstance(name, int) and not 0 <= name < _FIRST_ALIKE:
        return (hex(name),)
    return name


class PrefixTree:
    """Remembers every prompt and output so far, as soon as the request is seen; so what it finds is
    an upper bound for any real prefix cache in the same order.

    Works on parts in place of tokens, and keeps hashes of them only. Cache salts and adapters keep
    requests apart; multimodal items are not looked at. Literal token ids are compared in pieces
    that end where blocks of `block_size` tokens do.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._block_size = block_size
        self._longest: dict[int, int] = {}
        """How many tokens of a part have been seen, by the hash of all before it and its name."""

    def hit_len(self, request: TraceRequest) -> int:
        """Tokens of the prompt that a cache without limit would find: full blocks, never all of it,
        none if the request looks nothing up."""
        common = self.common_len(request)
        if request.prompt_logprobs:
            return 0
        usable = min(common, request.prompt_len - 1)
        return usable - usable % self._block_size

    def common_len(self, request: TraceRequest) -> int:
        """Tokens at the beginning of the prompt that a request before had there too; then remember
        this one."""
        prompt_len = request.prompt_len
        # The last generated token is never computed, so nobody finds it.
        left = prompt_len + request.output_len - 1
        place = hash((request.cache_salt, apart(request.lora_id)))
        longest, found, known = self._longest, 0, True
        for segment, part_len in self._pieces(request.prompt + request.output_parts):
            length = part_len if part_len < left else left
            if length <= 0:
                break
            left -= length
            part = hash((place, apart(segment)))
            place = part + length
            if known:
                seen = longest.get(part, 0)
                if length <= seen:
                    found += length
                    continue
                found += seen
                known = False  # nor is anything that follows
            longest[part] = length
        return found if found < prompt_len else prompt_len

    def _pieces(self, parts: Segments) -> Segments | Iterator[Part]:
        """The parts, literal token ids cut at block boundaries: they share tokens without sharing a
        name."""
        if any(isinstance(segment, tuple) for segment, _ in parts):
            return self._cut(parts)
        return parts

    def _cut(self, parts: Segments) -> Iterator[Part]:
        offset = 0
        for segment, length in parts:
            if not isinstance(segment, tuple):
                yield segment, length
                offset += length
                continue
            start = 0
            while start < length:
                stop = min(length, start + self._block_size - offset % self._block_size)
                yield segment[start:stop], stop - start
                offset += stop - start
                start = stop
