"""Prompts given as ids of fixed-size blocks: equal ids are equal tokens, tails are private."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from simserve.segments import Segments
from simserve.workload.rows import BadRow, Record

__all__ = ["HashBlocks"]


class HashBlocks:
    """The block ids met so far in a file, and the prompts that they make.

    An id stands for `block_size` tokens, always the same ones. The last block of a prompt may be
    partial: it becomes a segment of the request's own, because what follows it in another request
    is unknown. An id that is partial in one row and full in another has no single meaning: a bad
    row. Ids are whole numbers of any size (64-bit hashes go beyond int64 and float64).
    """

    def __init__(self, block_size: int, hint: str = "") -> None:
        self.block_size = block_size
        self._hint = hint
        self._full: set[int] = set()
        self._partial: dict[int, int] = {}

    def prompt(
        self, number: int, request_id: str, record: Record, field: str, input_len: int
    ) -> Segments:
        """The prompt of `input_len` tokens whose block ids stand in `record[field]`.

        Raises:
            BadRow: ids are no whole numbers, too many or too few, or partial as well as full.
        """
        ids = self._checked(record.get(field), field, input_len)
        num_full, tail_len = divmod(input_len, self.block_size)
        full = ids[:num_full]
        self._refuse_mixed(field, full, ids[num_full:])
        self._full.update(full)
        parts = tuple(zip(full, repeat(self.block_size), strict=False))
        if not tail_len:
            return parts
        self._partial.setdefault(ids[num_full], number)
        return (*parts, (f"{request_id}/tail", tail_len))

    def _checked(self, ids: Any, field: str, input_len: int) -> Sequence[int]:
        if not isinstance(ids, list):
            raise BadRow(field, "is not a list of block ids", "bad_hash_ids")
        if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
            message = "holds something that is not a whole number >= 0"
            raise BadRow(field, message, "bad_hash_ids")
        wanted = -(-input_len // self.block_size)
        if len(ids) != wanted:
            message = (
                f"has {len(ids)} ids, but {input_len} tokens are {wanted} blocks at "
                f"block_size {self.block_size}; set the option block_size to that of the trace"
            )
            raise BadRow(field, message + self._hint, "wrong_block_size")
        return ids

    def _refuse_mixed(self, field: str, full: Sequence[int], tail: Sequence[int]) -> None:
        if self._partial.keys().isdisjoint(full) and self._full.isdisjoint(tail):
            return
        mixed = [i for i in full if i in self._partial] + [i for i in tail if i in self._full]
        here, there = ("full", "partial") if mixed[0] in self._partial else ("partial", "full")
        row = self._partial.get(mixed[0])
        where = f"row {row}" if row is not None else "an earlier row"
        message = (
            f"uses id {mixed[0]} as a {here} block, but {where} as a {there} one: "
            f"it cannot stand for the same tokens (is block_size {self.block_size} right?)"
        )
        raise BadRow(field, message, "partial_and_full")
