"""Flash and naive attention over contiguous keys equal float64 attention; bytes are counted."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import reference  # noqa: E402
from simserve_kernels.attention_tile import Tile  # noqa: E402
from simserve_kernels.flash_attention import flash_attention  # noqa: E402
from simserve_kernels.naive_attention import naive_attention, traffic  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tile(16, 16, 4, 2)
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def fresh_inputs(seed: int, device: str) -> None:
    torch.manual_seed(seed)


def draw(
    q_len: int, kv_len: int, head_size: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2)
) -> list[torch.Tensor]:
    shapes = [(q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1])]
    tensors = [torch.randn(*shape, head_size) for shape in shapes]
    return [tensor.to(dtype).to(DEVICE) for tensor in tensors]


def starts(*lens: int) -> torch.Tensor:
    return torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; NaN anywhere is NaN, which no bound lets pass."""
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("q_len", "kv_len", "head_size", "causal", "dtype"),
    [  # every pair of two of the three
        (37, 37, 64, True, torch.float32),
        (37, 37, 64, False, torch.float16),
        (1, 70, 80, True, torch.float16),
        (1, 70, 80, False, torch.float32),
        (20, 50, 96, True, torch.float16),
        (20, 50, 96, False, torch.float32),
    ],
)
def test_one_sequence(
    q_len: int, kv_len: int, head_size: int, causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = draw(q_len, kv_len, head_size, dtype)
    expected = reference.attention(q, k, v, causal=causal)
    flash = flash_attention(q, k, v, starts(q_len), starts(kv_len), causal=causal, tile=SMALL)
    assert error(flash, expected) <= BOUND[dtype]
    assert error(naive_attention(q, k, v, causal=causal), expected) <= BOUND[dtype]


@pytest.mark.parametrize("kv_len", [3, 0])
def test_queries_that_see_no_key_are_zero(kv_len: int) -> None:
    q, k, v = draw(20, kv_len, 64, torch.float32)
    expected = reference.attention(q, k, v)
    assert not expected[: 20 - kv_len].any()
    flash = flash_attention(q, k, v, starts(20), starts(kv_len), tile=SMALL)
    for out in (flash, naive_attention(q, k, v)):
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_no_sequences() -> None:
    q, k, v = draw(0, 0, 64, torch.float32)
    assert flash_attention(q, k, v, starts(), starts()).shape == (0, 4, 64)
    with pytest.raises(ValueError, match="query_start_loc has no sequences: q has 5 tokens"):
        flash_attention(q.new_ones(5, 4, 64), k, v, starts(), starts())


def test_a_window_that_no_sequence_fills_is_no_limit() -> None:
    q, k, v = draw(5, 9, 64, torch.float32)
    wide = flash_attention(q, k, v, starts(5), starts(9), sliding_window=2**40)
    assert torch.equal(wide, flash_attention(q, k, v, starts(5), starts(9)))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 9},
        {"soft_cap": 2.0},
        {"alibi": True},
        {"sliding_window": 9, "causal": False},
    ],
    ids=str,
)
def test_sequences_do_not_see_each_other(options: dict[str, Any]) -> None:
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.7, 2.0], device=DEVICE)
    q_lens, kv_lens = [5, 0, 33, 1], [40, 3, 33, 20]
    q, k, v = draw(sum(q_lens), sum(kv_lens), 64, torch.float32)
    out = flash_attention(q, k, v, starts(*q_lens), starts(*kv_lens), tile=SMALL, **options)
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True)
    expected = torch.cat([reference.attention(*part, **options) for part in parts])
    assert error(out, expected) <= 1e-5


def test_chosen_tiles_and_views() -> None:
    q, k, v = draw(70, 150, 64, torch.float16)
    fused = torch.cat([k, v], dim=1)
    k, v = fused[:, :2], fused[:, 2:]
    expected = reference.attention(q, k, v)
    assert error(flash_attention(q, k, v, starts(70), starts(150)), expected) <= 5e-3
    assert error(naive_attention(q, k, v), expected) <= 5e-3


def test_traffic_is_counted() -> None:
    counted = traffic(8, 8, 2, 1, 64, torch.float16)
    assert counted.flash_bytes == 2 * 64 * (2 * 8 * 2 + 2 * 8)
    assert counted.naive_scratch_bytes == 2 * 8 * 8 * (4 + 2)
    assert counted.naive_bytes == counted.flash_bytes + 2 * counted.naive_scratch_bytes
    assert counted.flops == 4 * 2 * 64 * (8 * 9 // 2)
    assert traffic(1, 8, 2, 1, 64, torch.float16).flops == 4 * 2 * 64 * 8
    assert traffic(8, 3, 2, 1, 64, torch.float16).flops == 4 * 2 * 64 * (1 + 2 + 3)
    assert traffic(8, 8, 2, 1, 64, torch.float16, causal=False).flops == 4 * 2 * 64 * 64


@pytest.mark.parametrize("function", [flash_attention, naive_attention])
def test_refusals(function: Any) -> None:
    q, k, v = draw(5, 9, 64, torch.float16)
    rest = (starts(5), starts(9)) if function is flash_attention else ()
    with pytest.raises(TypeError, match=r"v is torch\.float32"):
        function(q, k, v.float(), *rest)
    with pytest.raises(ValueError, match="q has 3 heads, k 2"):
        function(q[:, :3], k, v, *rest)
    with pytest.raises(ValueError, match="v has shape"):
        function(q, k, v[1:], *rest)
    with pytest.raises(ValueError, match="k is on meta"):
        function(q, k.to("meta"), v, *rest)
    with pytest.raises(ValueError, match=r"k has shape \(9, 0, 64\): there must be a head"):
        function(q, k[:, :0], v[:, :0], *rest)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"alibi_slopes": torch.ones(8)[::2]}, "last dimension of alibi_slopes has stride 2"),
        ({"alibi_slopes": torch.ones(4).double()}, r"alibi_slopes is torch\.float64"),
        ({"sliding_window": 2.5}, r"sliding_window is 2\.5: it must be a positive integer"),
    ],
)
def test_options_that_are_refused(option: dict[str, Any], message: str) -> None:
    q, k, v = draw(5, 9, 64, torch.float16)
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attention(q, k, v, starts(5), starts(9), **option)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_on_the_gpu(head_size: int, causal: bool, dtype: torch.dtype) -> None:
    q, k, v = draw(700, 1111, head_size, dtype, heads=(8, 2))
    expected = reference.attention(q, k, v, causal=causal)
    flash = flash_attention(q, k, v, starts(700), starts(1111), causal=causal)
    assert error(flash, expected) <= BOUND[dtype]
    assert error(naive_attention(q, k, v, causal=causal), expected) <= BOUND[dtype]
