"""Paged prefill equals float64 attention, whatever lies in the slots that nobody owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import reference  # noqa: E402
from simserve_kernels.attention_tile import Tile  # noqa: E402
from simserve_kernels.layouts import CacheShape, allocate_cache  # noqa: E402
from simserve_kernels.paged_prefill import paged_prefill  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
SMALL = Tile(16, 16, 4, 2)
MIXED = [(1, 17), (5, 40), (0, 0), (33, 33), (1, 1), (4, 50)]  # (queries, tokens)
BOUND = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def fresh_inputs(seed: int, device: str) -> None:
    torch.manual_seed(seed)


class Case(NamedTuple):
    """A batch whose unused slots hold NaN and whose unused table entries point nowhere."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


def make(
    seqs: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 64,
    block_size: int = 16,
    layout: Any = "nhd",
    fp8: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Case:
    lens = torch.tensor([tokens for _, tokens in seqs])
    needed = [-(-tokens // block_size) for _, tokens in seqs]
    shape = CacheShape(sum(needed) + 2, block_size, heads[1], head_size)
    k_cache, v_cache = allocate_cache(shape, layout, FP8 if fp8 else dtype, "cpu")
    for cache in (k_cache, v_cache):
        cache.copy_(torch.full(cache.shape, torch.nan).to(cache.dtype))
    order = torch.randperm(shape.num_blocks).int()
    table = torch.full((len(seqs), max(needed) + 2), 2**31 - 1, dtype=torch.int32)
    slots = []
    for row, (count, tokens) in enumerate(zip(needed, lens.tolist(), strict=True)):
        table[row, :count], order = order[:count], order[count:]
        token = torch.arange(tokens)
        slots.append(table[row, token // block_size] * block_size + token % block_size)
    size = (int(lens.sum()), heads[1], head_size)
    new = [torch.randn(size).to(dtype) for _ in range(2)]
    reference.kv_write(
        *new, k_cache, v_cache, torch.cat(slots), layout=layout, k_scale=k_scale, v_scale=v_scale
    )
    starts = torch.tensor([0, *(queries for queries, _ in seqs)]).cumsum(0)
    q = torch.randn(int(starts[-1]), heads[0], head_size).to(dtype)
    case = Case(q, k_cache, v_cache, table, lens.int(), starts.int())
    return Case(*(tensor.to(DEVICE) for tensor in case))


def longest(case: Case) -> int:
    return int(case.query_start_loc.diff().max())


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; NaN anywhere is NaN, which no bound lets pass."""
    return float((out.double() - expected).norm() / expected.norm())


def check(case: Case, *, tile: Tile | None = None, **options: Any) -> None:
    out = torch.full_like(case.q, torch.nan)
    paged_prefill(*case, max_query_len=longest(case), out=out, tile=tile, **options)
    expected = reference.paged_attention(*case[:5], query_start_loc=case.query_start_loc, **options)
    assert error(out, expected) <= BOUND[case.q.dtype]


@pytest.mark.parametrize("i", range(2), ids=["chosen", "small"].__getitem__)
@pytest.mark.parametrize("j", range(3), ids=lambda j: str(list(BOUND)[j]))
def test_mixed_batch_in_one_call(i: int, j: int) -> None:
    """Every pair of a tile, a dtype and a layout."""
    tile, dtype, layout = (None, SMALL)[i], list(BOUND)[j], ("nhd", "packed")[(i + j) % 2]
    check(make(MIXED, dtype=dtype, layout=layout), tile=tile, layout=layout)


@pytest.mark.parametrize(
    ("head_size", "block_size", "heads", "layout"),
    [
        (64, 1, (3, 3), "nhd"),
        (80, 7, (6, 2), "packed"),
        (96, 16, (12, 2), "packed"),
        (112, 32, (5, 1), "nhd"),
        (128, 256, (8, 2), "packed"),
        (192, 24, (7, 1), "nhd"),
        (256, 3, (4, 4), "packed"),
    ],
)
def test_head_sizes_block_sizes_and_groups(
    head_size: int, block_size: int, heads: tuple[int, int], layout: str
) -> None:
    case = make(
        [(1, 9), (20, 30)], dtype=torch.float32, head_size=head_size, block_size=block_size,
        heads=heads, layout=layout,
    )  # fmt: skip
    check(case, tile=SMALL, layout=layout)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 8},
        {"sliding_window": 1},
        {"sliding_window": 20, "soft_cap": 1.5},
        {"soft_cap": 30.0, "scale": 0.3},
        {"alibi": True},
        {"alibi": True, "sliding_window": 17, "soft_cap": 5.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("tile", [None, SMALL], ids=["chosen", "small"])
def test_options(options: dict[str, Any], tile: Tile | None) -> None:
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.7, 2.0], device=DEVICE)
    check(make(MIXED, dtype=torch.float32), tile=tile, **options)


def test_blocks_that_left_the_window_are_not_read() -> None:
    """Their table entries point nowhere, as after a sliding-window manager freed them."""
    case = make([(1, 60), (20, 90)], dtype=torch.float32, block_size=4)
    expected = reference.paged_attention(
        *case[:5], query_start_loc=case.query_start_loc, sliding_window=8
    )
    for row, (queries, tokens) in enumerate([(1, 60), (20, 90)]):
        case.block_table[row, : (tokens - queries - 7) // 4] = -(2**31)
    out = paged_prefill(*case, max_query_len=20, sliding_window=8, tile=SMALL)
    assert error(out, expected) <= 1e-5


@pytest.mark.parametrize("layout", ["nhd", "packed"])
def test_fp8_cache_equals_the_dequantised_one(layout: str) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    case = make(MIXED, dtype=torch.float16, layout=layout, fp8=True, **scales)
    check(case, layout=layout, **scales)


@pytest.mark.parametrize("layout", ["nhd", "packed"])
def test_fp8_cache_is_near_the_unquantised_one(layout: str, seed: int) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    batches = [(5, 40), (1, 17)]
    torch.manual_seed(seed)
    case = make(batches, dtype=torch.float16, layout=layout, fp8=True, **scales)
    torch.manual_seed(seed)
    exact = make(batches, dtype=torch.float16, layout=layout)
    assert torch.equal(case.q, exact.q)
    out = paged_prefill(*case, max_query_len=5, layout=layout, **scales)
    expected = reference.paged_attention(
        *exact[:5], query_start_loc=exact.query_start_loc, layout=layout
    )
    assert error(out, expected) <= 6e-2


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
def test_scores_of_ten_thousand_are_exact(dtype: torch.dtype) -> None:
    """Scores -1e4, ..., 1e4 in whole numbers: e^-1 between neighbours survives beside 1e4."""
    case = make([(3, 40), (40, 40)], dtype=dtype, heads=(2, 2))
    token = torch.arange(40, device=DEVICE)
    for table in case.block_table:
        rows = torch.zeros(40, 2, 64, device=DEVICE)
        rows[:, 0, 0], rows[:, 0, 1] = 100.0, (token % 4).float()
        rows[:, 1, 0], rows[:, 1, 1] = -100.0, (token % 4).float()
        slots = table[token // 16] * 16 + token % 16
        _, v = reference.gather_kv(case.k_cache, case.v_cache, "nhd", slots)
        reference.kv_write(rows, v, case.k_cache, case.v_cache, slots)
    case.q.zero_()
    case.q[:, :, 0], case.q[:, :, 1] = 100.0, 1.0
    check(case, scale=1.0, tile=SMALL)


def test_a_window_that_no_sequence_fills_is_no_limit() -> None:
    case = make([(3, 20)], dtype=torch.float32)
    wide = paged_prefill(*case, max_query_len=3, sliding_window=2**40)
    assert torch.equal(wide, paged_prefill(*case, max_query_len=3))


def test_query_start_loc_may_begin_inside_q() -> None:
    """As for the prefills behind the decodes of one batch; rows of others stay untouched."""
    case = make(MIXED, dtype=torch.float32)
    out = torch.zeros_like(case.q)
    part = case._replace(
        block_table=case.block_table[1:4],
        seq_lens=case.seq_lens[1:4],
        query_start_loc=case.query_start_loc[1:5],
    )
    paged_prefill(*part, max_query_len=33, out=out, tile=SMALL)
    expected = reference.paged_attention(*case[:5], query_start_loc=case.query_start_loc)
    assert error(out[1:39], expected[1:39]) <= 1e-5
    assert not out[0].any()
    assert not out[39:].any()


def test_views_of_fused_projections_and_interleaved_blocks() -> None:
    case = make(MIXED, dtype=torch.float32)
    fused = torch.full((len(case.q), 8, 64), torch.nan, device=DEVICE)
    fused[:, :4] = case.q
    pair = torch.stack([case.k_cache, case.v_cache], dim=1)
    wide = torch.zeros(len(MIXED), 64, dtype=torch.int64, device=DEVICE)[
        :, : case.block_table.shape[1]
    ]
    wide.copy_(case.block_table)
    check(case._replace(q=fused[:, :4], k_cache=pair[:, 0], v_cache=pair[:, 1], block_table=wide))


def test_nothing_to_do() -> None:
    case = make([(0, 0), (0, 5)], dtype=torch.float32)
    assert paged_prefill(*case, max_query_len=0).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c._replace(q=c.q.double()), "q is torch.float64"),
        (lambda c: c._replace(q=c.q[:, :3]), "q has 3 heads, the cache 2"),
        (lambda c: c._replace(q=c.q[..., :32]), "q has shape"),
        (lambda c: c._replace(q=c.q.mT.contiguous().mT), "last dimension of q has stride"),
        (lambda c: c._replace(k_cache=c.k_cache.half()), "must agree"),
        (lambda c: c._replace(block_table=c.block_table.float()), "block_table is torch.float32"),
        (lambda c: c._replace(seq_lens=c.seq_lens[1:]), "block_table has shape"),
        (lambda c: c._replace(query_start_loc=c.query_start_loc[1:]), "query_start_loc has shape"),
        (lambda c: c._replace(seq_lens=c.seq_lens.to("meta")), "seq_lens is on meta"),
        (
            lambda c: c._replace(k_cache=c.k_cache[:, :, :0], v_cache=c.v_cache[:, :, :0]),
            "the cache has 0 KV heads",
        ),
    ],
)
def test_refusals(change: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        paged_prefill(*change(make(MIXED, dtype=torch.float32)), max_query_len=33)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"k_scale": 2.0}, "k_scale and v_scale must be 1 for a cache of torch.float32"),
        ({"v_scale": 2.0}, "k_scale and v_scale must be 1 for a cache of torch.float32"),
        ({"alibi_slopes": torch.ones(4).double()}, "alibi_slopes is torch.float64"),
        ({"alibi_slopes": torch.ones(8)[::2]}, "last dimension of alibi_slopes has stride 2"),
        ({"sliding_window": 2.5}, "sliding_window is 2.5: it must be a positive integer"),
    ],
)
def test_options_that_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        paged_prefill(*make([(1, 9)], dtype=torch.float32), max_query_len=1, **option)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_long_mixed_batch_on_the_gpu(head_size: int, dtype: torch.dtype) -> None:
    layout = ["nhd", "packed"][(head_size // 16 + dtype.itemsize // 4) % 2]
    seqs = [(1, 700), (300, 1000), (5, 333), (129, 129), (1, 1), (0, 0), (64, 900)]
    block_size = {64: 1, 80: 16, 96: 32, 112: 7, 128: 16, 192: 64, 256: 256}[head_size]
    case = make(
        seqs, dtype=dtype, heads=(8, 2), head_size=head_size, block_size=block_size, layout=layout
    )
    check(case, layout=layout)
    alibi = torch.rand(8, device=DEVICE)
    check(case, layout=layout, alibi_slopes=alibi, sliding_window=200, soft_cap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nhd", "packed"])
@pytest.mark.parametrize("head_size", [64, 128, 192])
def test_fp8_on_the_gpu(layout: str, head_size: int) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    case = make(
        [(1, 700), (300, 1000), (129, 129)], dtype=torch.bfloat16, heads=(8, 2),
        head_size=head_size, layout=layout, fp8=True, **scales,
    )  # fmt: skip
    check(case, layout=layout, **scales)


@pytest.mark.gpu
def test_block_numbers_beyond_32_bits_of_elements() -> None:
    """Blocks past 2^31 elements of the cache equal the same blocks at its start."""
    num_blocks = 131_073 + 4
    cache = torch.zeros(2, num_blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    case = make([(20, 50)], dtype=torch.bfloat16, heads=(8, 8), head_size=128)
    for near, far in zip((case.k_cache, case.v_cache), cache, strict=True):
        far[-near.shape[0] :] = near
    far_case = case._replace(k_cache=cache[0], v_cache=cache[1])
    far_case.block_table.add_(num_blocks - case.k_cache.shape[0])
    out = paged_prefill(*far_case, max_query_len=20)
    case.block_table.sub_(num_blocks - case.k_cache.shape[0])
    assert torch.equal(out, paged_prefill(*case, max_query_len=20))
