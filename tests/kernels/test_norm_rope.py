"""RMSNorm, rotary embedding and SiLU gate equal their float64 formulas."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import reference_dense  # noqa: E402
from simserve_kernels.norm_rope import rms_norm, rope, silu_mul  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]


@pytest.fixture(autouse=True)
def fresh_inputs(seed: int, device: str) -> None:
    torch.manual_seed(seed)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; NaN anywhere is NaN, which no bound lets pass."""
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 80, 4096, 5000])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = draw(3, size, dtype=dtype), draw(size, dtype=dtype)
    expected = reference_dense.rms_norm(x, weight, 1e-5)
    assert error(rms_norm(x, weight, 1e-5), expected) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_adds_to_the_residual_in_place(dtype: torch.dtype) -> None:
    x, weight = draw(3, 96, dtype=dtype), draw(96, dtype=dtype)
    residual = draw(3, 200, dtype=dtype)[:, :96]
    total = x + residual
    out = rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, total)
    assert error(out, reference_dense.rms_norm(total, weight, 1e-6)) <= BOUND[dtype]


def test_rms_norm_of_each_head_of_a_fused_projection() -> None:
    fused, weight = draw(3, 10, 64), draw(64)
    heads = fused[:, 4:7]
    out = rms_norm(heads, weight, 1e-6)
    assert out.shape == (3, 3, 64)
    assert error(out, reference_dense.rms_norm(heads, weight, 1e-6)) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (80, 80), (96, 32)])
def test_rope_rotates_in_place(head_size: int, rotated: int, dtype: torch.dtype) -> None:
    fused = draw(5, 9, head_size, dtype=dtype)
    before = fused.clone()
    positions = torch.tensor([7, 0, 99, 3, 3], device=DEVICE)
    angles = draw(100, rotated // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    rope(fused[:, :5], fused[:, 5:7], positions, table)
    expected = reference_dense.rope(before[:, :7], positions, table)
    assert error(fused[:, :7], expected) <= BOUND[dtype]
    assert torch.equal(fused[:, 7:], before[:, 7:])
    assert torch.equal(fused[:, :7, rotated:], before[:, :7, rotated:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_of_any_size_of_gate(dtype: torch.dtype) -> None:
    x = draw(3, 2 * 1100, dtype=dtype) * 5
    x[0, :4] = torch.tensor([-1e4, 1e4, -100.0, 0.0])
    x[0, 1100:1104] = 2.0  # their products fit into every dtype
    assert error(silu_mul(x), reference_dense.silu_mul(x)) <= BOUND[dtype]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(draw(3, 8), draw(9), 1e-6), "weight has shape"),
        (lambda: rms_norm(draw(3, 8), draw(8).half(), 1e-6), "weight is torch.float16"),
        (lambda: rms_norm(draw(8, 3).T, draw(8), 1e-6), "last dimension of x has stride"),
        (lambda: silu_mul(draw(3, 7)), "7 columns"),
        (lambda: rms_norm(draw(3, 8), draw(8).to("meta"), 1e-6), "weight is on meta"),
        (lambda: rope(draw(2, 4, 8), draw(2, 1, 8), torch.zeros(2).int(), draw(9, 10)), "columns"),
        (
            lambda: rope(draw(2, 4, 8), draw(3, 1, 8), torch.zeros(2).int(), draw(9, 8)),
            "k has shape",
        ),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
