"""Inputs of a case: rotated copies on disjoint blocks, so that no call finds its data in a cache.

A copy's calls read or write blocks of one pool in random order. There are as many copies as move
two GiB, at most 256; a case that moves more has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from simserve.executor.real.bench.kernel_cases import AttentionCase, DenseCase, WriteCase
from simserve_kernels import reference
from simserve_kernels.layouts import CacheLayout, CacheShape, allocate_cache, check_cache

__all__ = ["DenseInputs", "PagedInputs", "WriteInputs"]

_ROTATED_BYTES = 2 << 30
_MAX_COPIES = 256
_CHECKED_QUERIES = 4
_BLOCKS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """One copy of an attention case: arguments of the paged kernels, and room for the result."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: torch.Tensor
    """Shared by all copies."""
    layout: CacheLayout

    @classmethod
    def copies(
        cls, case: AttentionCase, layout: CacheLayout, device: str, max_copies: int = _MAX_COPIES
    ) -> list[PagedInputs]:
        """Make all copies, of normal numbers. `out` holds NaN."""
        counts = [-(-tokens // case.block_size) for _, tokens in case.seqs]
        num_queries = sum(queries for queries, _ in case.seqs)
        heads, dtype = case.heads, torch.bfloat16
        q_shape = (num_queries, heads.num_heads, heads.head_size)
        moved = case.num_bytes + 2 * num_queries * heads.num_heads * heads.head_size * 2
        num_copies = min(max_copies, _num_copies(moved))
        caches = _random_cache(case, num_copies * sum(counts), layout, device)
        order = torch.randperm(num_copies * sum(counts), generator=_generator(), dtype=torch.int32)
        lens = torch.tensor([tokens for _, tokens in case.seqs], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *(queries for queries, _ in case.seqs)]).cumsum(0)
        out = torch.full(q_shape, torch.nan, dtype=dtype, device=device)
        found = []
        for owned in order.split(sum(counts)):
            rows = list(owned.split(counts))
            table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
            q = torch.randn(q_shape, device=device, dtype=dtype)
            found.append(cls(q, *caches, table, lens, starts.int().to(device), out, layout))
        return found

    def error(self) -> float:
        """The worst ‖out − ref‖ / ‖ref‖ of the last queries of the first and the last sequence."""
        return max(self._error_of(seq) for seq in (0, len(self.seq_lens) - 1))

    def _error_of(self, seq: int) -> float:
        begin, end = (int(self.query_start_loc[seq + i]) for i in (0, 1))
        rows = slice(max(begin, end - _CHECKED_QUERIES), end)
        token = torch.arange(int(self.seq_lens[seq]), device=self.q.device)
        block_size = check_cache(self.k_cache, self.v_cache, self.layout).block_size
        slots = self.block_table[seq, token // block_size] * block_size + token % block_size
        k, v = reference.gather_kv(self.k_cache, self.v_cache, self.layout, slots)
        return _relative_error(self.out[rows], reference.attention(self.q[rows], k, v))


@dataclass(frozen=True, slots=True)
class WriteInputs:
    """One copy of a write: up to 256 tokens each into a block of its own, more into whole ones."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    layout: CacheLayout

    @classmethod
    def copies(
        cls, case: WriteCase, layout: CacheLayout, device: str, max_copies: int = _MAX_COPIES
    ) -> list[WriteInputs]:
        """Make all copies, of normal numbers."""
        num_copies = min(max_copies, _num_copies(case.num_bytes))
        scattered = case.num_tokens <= 256
        per_copy = case.num_tokens if scattered else -(-case.num_tokens // case.block_size)
        caches = _random_cache(case, num_copies * per_copy, layout, device)
        order = torch.randperm(num_copies * per_copy, generator=_generator())
        heads, found = case.heads, []
        for blocks in order.split(per_copy):
            if scattered:
                slots = blocks * case.block_size + case.block_size // 3
            else:
                slots = blocks[:, None] * case.block_size + torch.arange(case.block_size)
            slots = slots.flatten()[: case.num_tokens].to(device)
            new = (2, case.num_tokens, heads.num_kv_heads, heads.head_size)
            k, v = torch.randn(new, device=device, dtype=torch.bfloat16)
            found.append(cls(k, v, *caches, slots, layout))
        return found

    def error(self) -> float:
        """Share of the elements that are not in their slots."""
        k, v = reference.gather_kv(self.k_cache, self.v_cache, self.layout, self.slot_mapping)
        wrong = [
            (stored != new.double()).double().mean() for stored, new in ((k, self.k), (v, self.v))
        ]
        return float(max(wrong))


@dataclass(frozen=True, slots=True)
class DenseInputs:
    """One copy of a dense case."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def copies(
        cls, case: DenseCase, device: str, max_copies: int = _MAX_COPIES
    ) -> list[DenseInputs]:
        """Make all copies, of normal numbers."""
        heads, dtype = case.heads, getattr(torch, case.dtype)
        q_shape = (case.num_queries, heads.num_heads, heads.head_size)
        kv_shape = (2, case.num_tokens, heads.num_kv_heads, heads.head_size)
        num_bytes = case.num_tokens * heads.kv_bytes(case.dtype) + math.prod(q_shape) * 2
        return [
            cls(
                torch.randn(q_shape, device=device, dtype=dtype),
                *torch.randn(kv_shape, device=device, dtype=dtype),
            )
            for _ in range(min(max_copies, _num_copies(num_bytes)))
        ]

    def error(self, out: torch.Tensor) -> float:
        """‖out − ref‖ / ‖ref‖ of the last queries, against float64."""
        last = slice(-_CHECKED_QUERIES, None)
        return _relative_error(out[last], reference.attention(self.q[last], self.k, self.v))


def _num_copies(num_bytes: int) -> int:
    return max(1, min(_MAX_COPIES, -(-_ROTATED_BYTES // num_bytes)))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _random_cache(
    case: AttentionCase | WriteCase, num_blocks: int, layout: CacheLayout, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = case.heads
    shape = CacheShape(num_blocks, case.block_size, heads.num_kv_heads, heads.head_size)
    caches = allocate_cache(shape, layout, getattr(torch, case.kv_dtype), device)
    for cache in caches:
        for part in cache.split(_BLOCKS_AT_ONCE):
            part.copy_(torch.randn(part.shape, device=device, dtype=torch.bfloat16))
    return caches


def _relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())
