"""The gpu extra hangs together: its triton compiles for the GPU that its torch sees."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.store(x + offsets, 2 * values, mask=offsets < n)


@pytest.mark.gpu
def test_triton_compiles_and_runs_on_the_gpu() -> None:
    x = torch.arange(63, dtype=torch.float32, device="cuda")
    double_kernel[(2,)](x, 63, BLOCK=32)
    assert torch.equal(x.cpu(), 2 * torch.arange(63, dtype=torch.float32))
