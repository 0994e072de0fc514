"""Token identity without tokens: a prompt is a tuple of parts, a part is (segment, length).

Token i of a segment is a fixed function of (segment, i), so equal segments are equal tokens, in
every process, and nothing is materialised until a real executor asks for token ids.
A part always begins at token 0 of its segment. A segment is named by an int (the hash ids of
public traces; any size, never cut to 64 bits) or a str (made by readers and generators); a tuple
of ints stands for itself: literal token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Part",
    "Segment",
    "Segments",
    "segment_tokens",
    "split_blocks",
    "tokens",
    "total_len",
]

Segment = int | str | tuple[int, ...]
Part = tuple[Segment, int]
Segments = tuple[Part, ...]


def total_len(parts: Iterable[Part]) -> int:
    """Number of tokens in `parts`."""
    return sum(map(itemgetter(1), parts))


def segment_tokens(segment: Segment, length: int, vocab_size: int) -> NDArray[np.int64]:
    """The first `length` token ids of a segment, each in [0, vocab_size).

    Named segments are drawn from a counter-based generator keyed by a hash of the name, so that
    different names give different tokens (up to chance) and every process agrees.

    Raises:
        ValueError: a literal is shorter than `length` or holds an id outside the vocabulary.
    """
    if isinstance(segment, tuple):
        ids = np.asarray(segment[:length], dtype=np.int64)
        if len(ids) < length or (length and (ids.min() < 0 or ids.max() >= vocab_size)):
            raise ValueError(f"literal segment does not give {length} ids below {vocab_size}")
        return ids
    name = f"{type(segment).__name__}:{segment}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    raw = np.random.Philox(key=key).random_raw(length)
    return (raw >> np.uint64(11)).astype(np.int64) % vocab_size


def tokens(parts: Iterable[Part], vocab_size: int) -> NDArray[np.int64]:
    """All token ids of `parts`, in order; shape [total_len(parts)]."""
    arrays = [segment_tokens(segment, length, vocab_size) for segment, length in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def split_blocks(
    parts: Segments, block_size: int
) -> Iterator[tuple[tuple[Segment, int, int], ...]]:
    """Contents of each full block of `parts`: pieces (segment, first token, number of tokens)."""
    pieces: list[tuple[Segment, int, int]] = []
    room = block_size
    for segment, length in parts:
        offset = 0
        while length - offset >= room:
            pieces.append((segment, offset, room))
            yield tuple(pieces)
            offset += room
            pieces, room = [], block_size
        if offset < length:
            pieces.append((segment, offset, length - offset))
            room -= length - offset
