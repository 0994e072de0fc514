"""The calls that compute a case, by way, and whether what they compute is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch

from simserve.executor.real.bench.kernel_cases import AttentionCase, Case, DenseCase, WriteCase
from simserve.executor.real.bench.kernel_inputs import DenseInputs, PagedInputs, WriteInputs
from simserve.executor.real.bench.sample_calls import SampleInputs
from simserve.executor.real.bench.sample_cases import SampleCase
from simserve.executor.real.bench.timing import Call
from simserve_kernels.flash_attention import flash_attention
from simserve_kernels.kv_write import kv_write
from simserve_kernels.layouts import CacheLayout
from simserve_kernels.naive_attention import naive_attention, traffic
from simserve_kernels.paged_decode import DecodePath, paged_decode
from simserve_kernels.paged_prefill import paged_prefill

__all__ = ["Work", "work_of"]


class Work(NamedTuple):
    """One way of computing a case."""

    way: str
    calls: Sequence[Call]
    """One for each copy of the inputs."""
    error: Callable[[object], float]
    """Of the first call, given what it returned; of a write the share of wrong elements, of chosen
    tokens how far they are from where their random numbers point."""
    max_error: float
    num_bytes: int
    flops: int | None


def work_of(
    case: Case, layout: CacheLayout, ways: tuple[str, ...], device: str, max_copies: int | None
) -> Iterator[Work]:
    """Yield the calls for each of `ways` that computes the case, all on the same inputs."""
    chosen = [way for way in case.ways if way in ways]
    if not chosen:
        return
    limit = {} if max_copies is None else {"max_copies": max_copies}
    if isinstance(case, WriteCase):
        yield _write(case, WriteInputs.copies(case, layout, device, **limit))
    elif isinstance(case, DenseCase):
        dense = DenseInputs.copies(case, device, **limit)
        yield from (_dense(case, way, dense) for way in chosen)
    elif isinstance(case, SampleCase):
        rows = SampleInputs.copies(case, device, **limit)
        yield from (_sample(case, way, rows) for way in chosen)
    else:
        paged = PagedInputs.copies(case, layout, device, **limit)
        yield from (_paged(case, way, paged) for way in chosen)


def _write(case: WriteCase, copies: list[WriteInputs]) -> Work:
    calls = [
        partial(
            kv_write, one.k, one.v, one.k_cache, one.v_cache, one.slot_mapping, layout=one.layout
        )
        for one in copies
    ]
    return Work("kv_write", calls, lambda _: copies[0].error(), 0.0, case.num_bytes, None)


def _dense(case: DenseCase, way: str, copies: list[DenseInputs]) -> Work:
    heads, dtype = case.heads, getattr(torch, case.dtype)
    counted = traffic(
        case.num_queries, case.num_tokens, heads.num_heads, heads.num_kv_heads,
        heads.head_size, dtype,
    )  # fmt: skip
    device = copies[0].q.device
    starts = [
        torch.tensor([0, n], device=device, dtype=torch.int32)
        for n in (case.num_queries, case.num_tokens)
    ]
    calls: list[Call] = []
    for one in copies:
        if way == "flash":
            calls.append(partial(flash_attention, one.q, one.k, one.v, *starts))
        else:
            calls.append(partial(naive_attention, one.q, one.k, one.v))
    num_bytes = counted.flash_bytes if way == "flash" else counted.naive_bytes
    bound = 1e-5 if dtype == torch.float32 else 5e-3

    def error(out: object) -> float:
        assert isinstance(out, torch.Tensor)
        return copies[0].error(out)

    return Work(way, calls, error, bound, num_bytes, counted.flops)


def _sample(case: SampleCase, way: str, copies: list[SampleInputs]) -> Work:
    calls = [one.call(way) for one in copies]
    return Work(way, calls, copies[0].error, 1e-4, case.num_bytes, None)


def _paged(case: AttentionCase, way: str, copies: list[PagedInputs]) -> Work:
    make = {"varlen": _varlen, "split": _split}.get(way)
    if make is None:
        make = partial(_decode, way=cast(DecodePath, way))
    calls = [make(one, case) for one in copies]
    copies[0].out.fill_(torch.nan)
    return Work(way, calls, lambda _: copies[0].error(), 5e-3, case.num_bytes, case.flops)


def _decode(one: PagedInputs, case: AttentionCase, way: DecodePath) -> Call:
    longest = max(tokens for _, tokens in case.seqs)
    return partial(
        paged_decode, one.q, one.k_cache, one.v_cache, one.block_table, one.seq_lens,
        max_seq_len=longest, layout=one.layout, path=way, out=one.out,
    )  # fmt: skip


def _varlen(one: PagedInputs, case: AttentionCase) -> Call:
    longest = max(queries for queries, _ in case.seqs)
    return partial(
        paged_prefill, one.q, one.k_cache, one.v_cache, one.block_table, one.seq_lens,
        one.query_start_loc, max_query_len=longest, layout=one.layout, out=one.out,
    )  # fmt: skip


def _split(one: PagedInputs, case: AttentionCase) -> Call:
    """Decodes stand first in a mixed case: they go through `auto`, the rest through `varlen`."""
    n = sum(queries == 1 for queries, _ in case.seqs)
    decodes = PagedInputs(
        one.q[:n], one.k_cache, one.v_cache, one.block_table[:n], one.seq_lens[:n],
        one.query_start_loc[: n + 1], one.out[:n], one.layout,
    )  # fmt: skip
    # The first row of the remaining queries is row 0 of what the call is given.
    rest = PagedInputs(
        one.q[n:], one.k_cache, one.v_cache, one.block_table[n:], one.seq_lens[n:],
        one.query_start_loc[n:] - n, one.out[n:], one.layout,
    )  # fmt: skip
    first = _decode(decodes, _part(case, slice(n)), "auto")
    second = _varlen(rest, _part(case, slice(n, None)))
    return lambda: (first(), second())


def _part(case: AttentionCase, seqs: slice) -> AttentionCase:
    return AttentionCase(
        name=case.name,
        seqs=case.seqs[seqs],
        kv_dtype=case.kv_dtype,
        block_size=case.block_size,
        heads=case.heads,
    )
