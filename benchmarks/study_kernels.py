"""Kernels by themselves for the studies: what `studies_gpu.py` times of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch

from simserve.executor.real.bench.ceilings import Ceilings, measure_ceilings
from simserve.executor.real.bench.kernel_cases import AttentionCase, Heads
from simserve.executor.real.bench.kernel_inputs import PagedInputs
from simserve.executor.real.bench.kernels import measure_kernels
from simserve.executor.real.bench.timing import Call, Timer, time_graph
from simserve_kernels.paged_decode import paged_decode

__all__ = ["kernel_pieces"]

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
Piece = tuple[str, Callable[[], dict[str, Any]]]


def kernel_pieces(*, is_rehearsal: bool) -> Iterator[Piece]:
    """Yield names and what measures them."""
    device, timer, copies = ("cpu", wall, 1) if is_rehearsal else ("cuda", time_graph, None)
    yield "ceilings", partial(ceilings, device)
    for case in [tiny_decode()] if is_rehearsal else decodes():
        for order in ("in order", "at random"):
            yield f"{case.name}, blocks {order}", partial(ordered, case, order, device, timer)
    for case in [tiny_decode()] if is_rehearsal else pages():
        yield case.name, partial(measured, case, device, timer, copies)


def pages() -> Iterator[AttentionCase]:
    """The same decodes and the same chunk on blocks of other sizes."""
    for size in PAGE_SIZES:
        name = f"decode b64 ctx2048 page{size}"
        yield AttentionCase(name=name, seqs=((1, 2048),) * 64, block_size=size)
    for size in (16, 64, 256):
        name = f"chunk 2048 @ 8192 page{size}"
        yield AttentionCase(name=name, seqs=((2048, 10240),), block_size=size)


def decodes() -> Iterator[AttentionCase]:
    for batch, context in ((1, 32768), (64, 2048)):
        name = f"decode b{batch} ctx{context}"
        yield AttentionCase(name=name, seqs=((1, context),) * batch)


def tiny_decode() -> AttentionCase:
    return AttentionCase(name="decode b2 ctx32", seqs=((1, 32),) * 2, heads=Heads(2, 1, 64))


@cache
def ceilings_of(device: str) -> Ceilings:
    if device == "cuda":
        return measure_ceilings(time_graph)
    return Ceilings(1.0, 1.0, [1.0], [1.0])  # of a rehearsal, whose times say nothing


def ceilings(device: str) -> dict[str, Any]:
    return dict(ceilings_of(device)._asdict())


def measured(
    case: AttentionCase, device: str, timer: Timer, max_copies: int | None
) -> dict[str, Any]:
    """A row of `simserve bench kernels`; in a rehearsal of what makes the inputs alone."""
    if device != "cuda":  # the interpreter multiplies the bit patterns of bfloat16
        return ordered(case, "at random", device, timer)
    (row,) = measure_kernels(
        [case], ways=case.ways[:1], layouts=["nhd"], timer=timer, max_copies=max_copies
    )
    ceilings = ceilings_of(device)
    return row.as_json(ceilings.read_gb_s, ceilings.matmul_tflop_s)


def ordered(case: AttentionCase, order: str, device: str, timer: Timer) -> dict[str, Any]:
    """Decodes whose blocks lie one after another, or anywhere: what a table costs a kernel."""
    copies = PagedInputs.copies(case, "nhd", device)
    if order == "in order":
        tables = torch.arange(
            sum(one.block_table.numel() for one in copies), dtype=torch.int32, device=device
        ).split(copies[0].block_table.numel())
        copies = [
            replace(one, block_table=table.view_as(one.block_table))
            for one, table in zip(copies, tables, strict=True)
        ]
    longest = max(tokens for _, tokens in case.seqs)
    calls: Sequence[Call] = [
        partial(
            paged_decode, one.q, one.k_cache, one.v_cache, one.block_table, one.seq_lens,
            max_seq_len=longest, layout=one.layout, path="auto", out=one.out,
        )
        for one in copies
    ]  # fmt: skip
    calls[0]()
    # Not in a rehearsal: the interpreter multiplies the bit patterns of bfloat16.
    if device == "cuda" and not (error := copies[0].error()) <= 5e-3:
        raise ValueError(f"error {error:.1e} against float64")
    samples = timer(calls)
    return {"num_bytes": case.num_bytes, "samples_us": samples}


def wall(calls: Sequence[Call]) -> list[float]:
    """What a rehearsal has for a timer."""
    began = perf_counter()
    calls[0]()
    return [1e6 * (perf_counter() - began)]
