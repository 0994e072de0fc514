"""Measures kernels: checks each against float64 once, then times it on rotated inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from simserve.executor.real.bench.kernel_calls import Work, work_of
from simserve.executor.real.bench.kernel_cases import Case, DenseCase
from simserve.executor.real.bench.kernel_report import KernelRow
from simserve.executor.real.bench.launches import recorded_launches
from simserve.executor.real.bench.sample_cases import SampleCase
from simserve.executor.real.bench.timing import Timer, time_graph
from simserve_kernels.layouts import CacheLayout

__all__ = ["measure_kernels"]


def measure_kernels(
    cases: Sequence[Case],
    *,
    ways: tuple[str, ...],
    layouts: Sequence[CacheLayout],
    device: str = "cuda",
    timer: Timer = time_graph,
    max_copies: int | None = None,
) -> Iterator[KernelRow]:
    """Yield a row for each case, layout and way. What is wrong or does not fit is not timed.

    Args:
        cases: what to compute.
        ways: how, of those that a case has.
        layouts: of the paged cache; dense cases and those of sampling have none.
        device: where tensors live.
        timer: gives samples of µs a call.
        max_copies: of the inputs, instead of as many as outgrow the caches.
    """
    torch.manual_seed(0)
    for case in cases:
        for layout in layouts if _has_layout(case) else layouts[:1]:
            try:
                works = work_of(case, layout, ways, device, max_copies)
                yield from (_row(case, layout, work, timer) for work in works)
            except torch.OutOfMemoryError:
                yield _unmeasured(case, layout, "", "there is not enough GPU memory for it")
            if device == "cuda":
                torch.cuda.empty_cache()


def _row(case: Case, layout: CacheLayout, work: Work, timer: Timer) -> KernelRow:
    before = _memory()
    with recorded_launches() as launches:
        out = work.calls[0]()
    peak_bytes = None if before is None else int(torch.cuda.max_memory_allocated()) - before
    error = work.error(out)
    del out
    if not error <= work.max_error:
        failure = f"error {error:.1e} against float64, allowed {work.max_error:.0e}"
        return _unmeasured(case, layout, work.way, failure)
    return KernelRow(
        case=case.name,
        path=work.way,
        layout=_layout(case, layout),
        kv_dtype=_dtype(case),
        num_bytes=work.num_bytes,
        flops=work.flops,
        relative_error=error,
        peak_bytes=peak_bytes,
        kernels=tuple(launches),
        samples_us=tuple(timer(work.calls)),
    )


def _memory() -> int | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _unmeasured(case: Case, layout: CacheLayout, way: str, failure: str) -> KernelRow:
    return KernelRow(
        case=case.name,
        path=way,
        layout=_layout(case, layout),
        kv_dtype=_dtype(case),
        failure=failure,
    )


def _layout(case: Case, layout: CacheLayout) -> str:
    return layout if _has_layout(case) else ""


def _dtype(case: Case) -> str:
    return case.dtype if isinstance(case, DenseCase | SampleCase) else case.kv_dtype


def _has_layout(case: Case) -> bool:
    return not isinstance(case, DenseCase | SampleCase)
