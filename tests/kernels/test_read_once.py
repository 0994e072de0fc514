"""Reading a tensor once: every element counts, and sizes that do not divide are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels.read_once import read_once  # noqa: E402


def test_the_sums_are_those_of_the_runs(device: str) -> None:
    source = torch.arange(192, dtype=torch.float32, device=device)
    sums = read_once(source, run=64, tile=32, num_warps=1)
    assert torch.equal(sums.cpu(), source.cpu().reshape(3, 64).sum(1))


@pytest.mark.parametrize(("length", "run", "tile"), [(100, 64, 32), (128, 64, 48)])
def test_sizes_must_divide(device: str, length: int, run: int, tile: int) -> None:
    with pytest.raises(ValueError, match="a multiple of run = 64"):
        read_once(torch.ones(length, device=device), run=run, tile=tile, num_warps=1)


def test_only_what_is_contiguous_is_read(device: str) -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        read_once(torch.ones(8, 32, device=device).t(), run=64, tile=32, num_warps=1)
