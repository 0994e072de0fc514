"""Measuring kernels: every way of each kind of case is checked, timed and described."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from simserve.executor.real.bench import kernel_calls  # noqa: E402
from simserve.executor.real.bench.kernel_cases import (  # noqa: E402
    WAYS,
    AttentionCase,
    DenseCase,
    Heads,
    WriteCase,
)
from simserve.executor.real.bench.kernels import measure_kernels  # noqa: E402
from simserve.executor.real.bench.launches import recorded_launches  # noqa: E402

SMALL = Heads(num_heads=4, num_kv_heads=2, head_size=64)
CASES = {
    "decode": AttentionCase(name="decode", seqs=((1, 5), (1, 37)), heads=SMALL),
    "fp8": AttentionCase(name="fp8", seqs=((1, 21),), kv_dtype="float8_e4m3fn", heads=SMALL),
    "mixed": AttentionCase(name="mixed", seqs=((1, 9), (1, 18), (7, 20)), heads=SMALL),
    "write": WriteCase(name="write", num_tokens=20, heads=SMALL),
    "whole": WriteCase(name="whole", num_tokens=300, heads=SMALL),
    "dense": DenseCase(name="dense", num_queries=6, num_tokens=9, dtype="float32", heads=SMALL),
}


def measure(device: str, *names: str, layouts: Sequence[Any] = ("nhd",), ways: Any = WAYS) -> Any:
    timed: list[int] = []

    def timer(calls: Any) -> list[float]:
        timed.append(len(calls))
        return [3.0, 1.0, 2.0]

    rows = measure_kernels(
        [CASES[name] for name in names],
        ways=ways,
        layouts=layouts,
        device=device,
        timer=timer,
        max_copies=2,
    )
    return list(rows), timed


def test_every_way_gives_a_checked_row(device: str) -> None:
    rows, timed = measure(device, "decode", "mixed", "write", "whole", "dense")
    assert [(row.case, row.path) for row in rows] == [
        *(("decode", path) for path in ("auto", "v1", "v2", "article")),
        ("mixed", "varlen"),
        ("mixed", "split"),
        ("write", "kv_write"),
        ("whole", "kv_write"),
        ("dense", "flash"),
        ("dense", "naive"),
    ]
    assert [row.failure for row in rows] == [None] * len(rows)
    assert timed == [2] * len(rows)
    assert {row.samples_us for row in rows} == {(3.0, 1.0, 2.0)}


def test_layouts_and_ways_are_those_asked_for(device: str) -> None:
    rows, _ = measure(device, "fp8", "write", "dense", layouts=("nhd", "packed"), ways=("auto",))
    assert [(row.case, row.layout) for row in rows] == [("fp8", "nhd"), ("fp8", "packed")]


def test_a_wrong_result_is_not_timed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "paged_decode", lambda *_, out, **__: out.fill_(1.0))
    rows, timed = measure(device, "decode", ways=("auto",))
    assert timed == []
    assert rows[0].samples_us == ()
    assert "against float64, allowed 5e-03" in rows[0].failure


def test_an_output_that_is_not_written_is_not_timed(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the way before has left the right result in the same place."""
    real = kernel_calls.paged_decode

    def lazy(*tensors: Any, path: str, **options: Any) -> Any:
        return None if path == "v2" else real(*tensors, path=path, **options)

    monkeypatch.setattr(kernel_calls, "paged_decode", lazy)
    rows, _ = measure(device, "decode", ways=("auto", "v2"))
    assert [row.failure is None for row in rows] == [True, False]


def test_a_case_that_does_not_fit_leaves_the_others(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(kernel_calls, "kv_write", full)
    rows, _ = measure(device, "write", "decode", ways=("kv_write", "auto"))
    assert [row.failure for row in rows] == ["there is not enough GPU memory for it", None]


def test_launches_are_recorded_once_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    jit_function = triton.runtime.jit.JITFunction
    metadata = SimpleNamespace(name="kernel", num_warps=4, num_stages=2, shared=1024)
    kernel = SimpleNamespace(metadata=metadata, n_regs=40, n_spills=0, function=0)
    monkeypatch.setattr(jit_function, "run", lambda self, *args, grid, warmup, **kwargs: kernel)
    function = SimpleNamespace(arg_names=["x", "n", "TILE"])
    before = jit_function.run
    with recorded_launches() as launches:
        for _ in range(2):
            jit_function.run(function, None, 63, 32, grid=(2,), warmup=False, ROWS=16, num_warps=4)
    assert jit_function.run is before
    (launch,) = launches
    assert launch.tile == {"tile": 32, "rows": 16}
    assert (launch.kernel, launch.num_warps, launch.registers) == ("kernel", 4, 40)


@pytest.mark.gpu
def test_kernels_are_timed_and_described_on_a_gpu() -> None:
    from simserve.executor.real.bench.ceilings import measure_ceilings
    from simserve.executor.real.bench.timing import time_graph

    ceilings = measure_ceilings(time_graph)
    assert ceilings.read_gb_s > 0
    assert ceilings.matmul_tflop_s > 0
    rows = list(measure_kernels(list(CASES.values()), ways=WAYS, layouts=("nhd",)))
    for row in rows:
        assert row.failure is None, row
        assert min(row.samples_us) > 0
        assert row.kernels
        for launch in row.kernels:
            assert launch.registers > 0
            assert launch.occupancy is not None
            assert 0 < launch.occupancy <= 1
