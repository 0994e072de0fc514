from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import paged_decode as decode  # noqa: E402
from simserve_kernels import reference  # noqa: E402

PATHS = ("auto", "v1", "v2")
LAYOUTS = ("nhd", "packed")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


def run(case, path, *, layout="nhd", **options):
    """Decode into an output that is poisoned beforehand."""
    out = torch.full_like(case.q, float("nan"))
    bound = case.block_table.shape[1] * (
        case.v_cache.shape[1] if layout == "nhd" else case.v_cache.shape[3]
    )
    return decode.paged_decode(
        *case.tensors, max_seq_len=bound, layout=layout, path=path, out=out, **options
    )


def check(case, path, assert_close, *, bound=None, **options):
    assert_close(
        run(case, path, **options), reference.paged_attention(*case.tensors, **options), bound
    )


@pytest.mark.parametrize(
    ("max_seq_len", "num_seqs", "num_heads", "expected"),
    [
        (1, 1, 1, True),
        (512, 1, 32, True),
        (513, 1, 32, False),
        (513, 16, 32, False),  # 512 pairs
        (513, 513, 1, True),
        (513, 19, 27, True),  # 513 pairs
        (8192, 16, 32, False),
        (8192, 17, 32, True),
        (8193, 17, 32, False),
        (8193, 1, 1, False),
        (32768, 256, 64, False),
    ],
)
def test_the_rule_of_v0_11_0(max_seq_len, num_seqs, num_heads, expected):
    assert decode.use_v1_0_11_0(max_seq_len, num_seqs, num_heads) is expected


@pytest.mark.parametrize("i", range(3), ids=PATHS.__getitem__)
@pytest.mark.parametrize("j", range(3), ids=lambda j: str(DTYPES[j]))
def test_dtypes_and_layouts(paged, assert_close, i, j):
    """Every pair of a path, a dtype and a layout."""
    path, dtype, layout = PATHS[i], DTYPES[j], LAYOUTS[(i + j) % 2]
    case = paged(11, [1, 40], dtype=dtype, layout=layout)
    check(case, path, assert_close, layout=layout)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("head_size", "block_size"), [(80, 1), (96, 5), (112, 256), (128, 8), (192, 48), (256, 32)]
)
def test_head_and_block_sizes(paged, assert_close, path, head_size, block_size):
    layout = LAYOUTS[block_size % 2]
    case = paged(head_size, [33, 7], head_size=head_size, block_size=block_size, layout=layout)
    check(case, path, assert_close, layout=layout)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (12, 2), (20, 1)])
def test_grouped_queries(paged, assert_close, path, num_heads, num_kv_heads):
    case = paged(num_heads, [20], num_heads=num_heads, num_kv_heads=num_kv_heads)
    check(case, path, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(71, 1), (128, 1), (32, 8), (40, 40)])
def test_wide_groups(paged, assert_close, num_heads, num_kv_heads):
    case = paged(5, [700, 3], num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=128)
    for path in PATHS:
        check(case, path, assert_close)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)], ids=str)
def test_every_option_once(paged, assert_close, device, path, options):
    alibi, window, cap = options
    case = paged(2, [41, 6], dtype=torch.bfloat16, block_size=4)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    check(
        case,
        path,
        assert_close,
        alibi_slopes=slopes if alibi else None,
        sliding_window=8 if window else None,
        soft_cap=1.5 if cap else None,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_outside_the_window_may_hold_anything(paged, assert_close, path, layout):
    lengths = [530, 9, 8]
    case = paged(3, lengths, layout=layout, hidden=8)
    whole = paged(3, lengths, layout=layout)
    out = run(case, path, layout=layout, sliding_window=8)
    assert_close(out, reference.paged_attention(*whole.tensors, layout=layout, sliding_window=8))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8(paged, assert_close, path, layout):
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    shape = {"layout": layout, "dtype": torch.bfloat16}
    case = paged(8, [40], kv_dtype=FP8, **shape, **scales)
    check(case, path, assert_close, layout=layout, **scales)
    exact = paged(8, [40], **shape)
    ref = reference.paged_attention(*exact.tensors, layout=layout)
    assert_close(run(case, path, layout=layout, **scales), ref, 6e-2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e-6, 1e5])
def test_fp8_with_queries_beyond_float16(paged, assert_close, path, size):
    case = paged(9, [16], kv_dtype=FP8, dtype=torch.bfloat16)
    case.q *= size
    check(case, path, assert_close, scale=0.125 / size)


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_length_zero_are_zero(paged, path):
    case = paged(4, [0, 20, 0])
    out = run(case, path)
    assert (out[0] == 0).all()
    assert (out[2] == 0).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("path", PATHS)
def test_no_sequences(paged, path):
    case = paged(4, [20])
    out = decode.paged_decode(
        case.q[:0],
        case.k_cache,
        case.v_cache,
        case.block_table[:0],
        case.seq_lens[:0],
        max_seq_len=0,
        path=path,
    )
    assert out.shape == (0, 4, 64)


@pytest.mark.parametrize("path", PATHS)
def test_scores_of_any_size(paged, assert_close, path):
    case = paged(6, [40], num_heads=2, num_kv_heads=1)
    for size in (1e-4, 1e4):
        check(case, path, assert_close, bound=1e-3, scale=size)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
def test_scores_of_ten_thousand_are_exact(paged, assert_close, device, path, dtype):
    """Scores -1e4, ..., 1e4 in whole numbers: e^-1 between neighbours survives beside 1e4."""
    case = paged(6, [40], dtype=dtype, num_heads=2, num_kv_heads=2)
    token = torch.arange(40, device=device)
    rows = torch.zeros(40, 2, 64, device=device)
    rows[:, 0, 0], rows[:, 1, 0] = 100.0, -100.0
    rows[:, :, 1] = (token % 4).float()[:, None]
    slots = case.block_table[0, token // 16] * 16 + token % 16
    _, v = reference.gather_kv(case.k_cache, case.v_cache, "nhd", slots)
    reference.kv_write(rows, v, case.k_cache, case.v_cache, slots)
    case.q.zero_()
    case.q[:, :, 0], case.q[:, :, 1] = 100.0, 1.0
    check(case, path, assert_close, scale=1.0)


@pytest.mark.parametrize("path", PATHS)
def test_a_window_that_no_sequence_fills_is_no_limit(paged, path):
    case = paged(6, [20])
    assert torch.equal(run(case, path, sliding_window=2**40), run(case, path))


@pytest.mark.parametrize("path", PATHS)
def test_several_partitions_and_chunks(paged, assert_close, path):
    case = paged(7, [1030, 513], num_heads=1, num_kv_heads=1)
    check(case, path, assert_close)
    check(case, path, assert_close, sliding_window=520)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(paged, path, layout):
    case = paged(12, [30, 18], layout=layout)
    plain = run(case, path, layout=layout)
    # q cut from a fused projection; K and V interleaved per block; a table with a longer stride
    fused = torch.full((2, 8, 64), float("nan"), device=case.q.device)
    fused[:, 2:6] = case.q
    case.q = fused[:, 2:6]
    k_view = torch.stack([case.k_cache, case.k_cache], dim=1)
    v_view = torch.stack([case.v_cache, case.v_cache], dim=1)
    case.k_cache, case.v_cache = k_view[:, 0], v_view[:, 1]
    case.block_table = torch.cat([case.block_table, case.block_table], dim=1)[:, :4]
    if layout == "nhd":
        case.block_table, case.seq_lens = case.block_table.long(), case.seq_lens.long()
    out = torch.full((2, 6, 64), float("nan"), device=case.q.device)[:, 1:5]
    decode.paged_decode(*case.tensors, max_seq_len=64, layout=layout, path=path, out=out)
    assert torch.equal(out, plain)


def test_a_workspace_serves_calls_of_any_lengths(paged, assert_close, device):
    workspace = decode.decode_workspace(3, 4, 2, 64, device)
    for lengths in ([150, 3, 41], [5, 120]):
        case = paged(14, lengths)
        for tensor in workspace:
            tensor.fill_(float("nan"))
        out = run(case, "auto", workspace=workspace)
        assert_close(out, reference.paged_attention(*case.tensors))


def test_a_workspace_that_does_not_fit_is_refused(paged, device):
    case = paged(14, [20, 30, 40])
    for sizes in ((2, 4, 2, 64), (3, 8, 2, 64), (3, 4, 2, 128)):
        workspace = decode.decode_workspace(*sizes, device)
        with pytest.raises(ValueError, match="the workspace holds"):
            run(case, "auto", workspace=workspace)


def test_article_follows_the_rule(paged, monkeypatch):
    case = paged(1, [20])
    taken = []
    monkeypatch.setattr(decode, "decode_v1", lambda call, out: taken.append("v1"))
    monkeypatch.setattr(decode, "decode_v2", lambda call, out: taken.append("v2"))
    for rule in (True, False):
        monkeypatch.setattr(decode, "use_v1_0_11_0", lambda *_, answer=rule: answer)
        run(case, "article")
    assert taken == ["v1", "v2"]


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"q": lambda c: c.q.double()}, TypeError, "q is torch.float64"),
        ({"q": lambda c: c.q.half()}, TypeError, "k_cache is torch.float32"),
        ({"q": lambda c: c.q[:, :3]}, ValueError, "multiple of the KV heads"),
        ({"q": lambda c: c.q[..., :32]}, ValueError, "q has shape"),
        ({"q": lambda c: c.q.mT.contiguous().mT}, ValueError, "last dimension of q"),
        ({"v_cache": lambda c: c.v_cache.half()}, TypeError, "they must agree"),
        ({"k_cache": lambda c: c.k_cache[1:]}, ValueError, "k_cache has shape"),
        ({"seq_lens": lambda c: c.seq_lens.float()}, TypeError, "seq_lens is torch.float32"),
        ({"seq_lens": lambda c: c.seq_lens[:1]}, ValueError, "seq_lens has shape"),
        ({"block_table": lambda c: c.block_table[0]}, ValueError, "block_table has shape"),
        ({"q": lambda c: c.q.to("meta")}, ValueError, "must be on one device"),
        ({"layout": lambda c: "hnd"}, ValueError, "layout is 'hnd'"),
        ({"layout": lambda c: "packed"}, ValueError, "k_cache has 4 dimensions"),
        ({"path": lambda c: "v3"}, ValueError, "path is 'v3'"),
        ({"max_seq_len": lambda c: 65}, ValueError, "max_seq_len is 65"),
        ({"scale": lambda c: float("nan")}, ValueError, "scale is nan"),
        ({"sliding_window": lambda c: 0}, ValueError, "sliding_window is 0"),
        ({"sliding_window": lambda c: 2.5}, ValueError, "sliding_window is 2.5: it must be a pos"),
        ({"soft_cap": lambda c: -1.0}, ValueError, "soft_cap is -1"),
        ({"k_scale": lambda c: 0.5}, ValueError, "k_scale and v_scale must be 1"),
        ({"alibi_slopes": lambda c: c.q[0, :2, 0]}, ValueError, "alibi_slopes has shape"),
        ({"alibi_slopes": lambda c: c.q[0, :, 0].long()}, TypeError, "alibi_slopes is torch.int64"),
        ({"alibi_slopes": lambda c: c.q[0, :, 0].double()}, TypeError, "alibi_slopes is torch.fl"),
        ({"alibi_slopes": lambda c: c.q[0, :, 0]}, ValueError, "last dimension of alibi_slopes"),
        ({"out": lambda c: c.q.half()}, TypeError, "out is torch.float16"),
    ],
)
def test_refusals(paged, change, error, sentence):
    case = paged(1, [20, 30])
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    arguments = dict(zip(names, case.tensors, strict=True), max_seq_len=64)
    arguments |= {name: make(case) for name, make in change.items()}
    with pytest.raises(error, match=sentence):
        decode.paged_decode(**arguments)


def test_head_size_and_block_size_are_refused(paged):
    for wrong, sentence in (({"head_size": 48}, "head size is 48"), ({"block_size": 257}, "257")):
        case = paged(1, [20], **wrong)
        with pytest.raises(ValueError, match=sentence):
            run(case, "auto")


def test_a_cache_without_heads_is_refused(paged):
    case = paged(1, [20])
    case.k_cache, case.v_cache = case.k_cache[:, :, :0], case.v_cache[:, :, :0]
    with pytest.raises(ValueError, match="the cache has 0 KV heads: there must be one at least"):
        run(case, "auto")


def test_a_cpu_tensor_is_refused_without_the_interpreter(paged, monkeypatch):
    case = paged(1, [20])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = [tensor.cpu() for tensor in case.tensors]
    with pytest.raises(ValueError, match="q is on cpu: the Triton kernels need a CUDA GPU"):
        decode.paged_decode(*tensors, max_seq_len=64)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
def test_larger_batches(paged, assert_close, path, layout, kv_dtype):
    lengths = [1, 16, 511, 512, 513, 2048, 9000, 0, 77, 4097]
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "layout": layout}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = paged(20, lengths, dtype=dtype, kv_dtype=kv_dtype, **shape)
        bound = None if kv_dtype is None else 5e-3
        check(case, path, assert_close, layout=layout, bound=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_size_fits_the_shared_memory(paged, assert_close, device, head_size, dtype):
    slopes = torch.rand(4, device=device)
    for path, layout, kv_dtype in itertools.product(PATHS, LAYOUTS, (None, FP8)):
        case = paged(21, [300], dtype=dtype, kv_dtype=kv_dtype, head_size=head_size, layout=layout)
        bound = None if kv_dtype is None else 5e-3
        options = {"alibi_slopes": slopes, "sliding_window": 200, "soft_cap": 30.0}
        check(case, path, assert_close, layout=layout, bound=bound, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_blocks_beyond_2_31_elements(paged, path):
    case = paged(22, [40], num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    near = run(case, path)
    far = 131_073
    owned = case.block_table[0, :3].long()
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        moved = torch.empty((far + 3, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
        moved[far : far + 3] = cache[owned]
        setattr(case, name, moved)
    case.block_table[0, :3] = torch.arange(far, far + 3)
    assert torch.equal(run(case, path), near)


@pytest.mark.gpu
def test_many_long_sequences(paged, assert_close):
    """They are taken by another tile."""
    case = paged(24, [9000, 8192, 1] + [100] * 30, num_heads=8, head_size=128, dtype=torch.bfloat16)
    check(case, "auto", assert_close)
    check(case, "auto", assert_close, sliding_window=5000)


@pytest.mark.gpu
def test_a_graph_allocates_nothing(paged, assert_close, device):
    case = paged(25, [900, 40, 2100], num_heads=32, num_kv_heads=8, head_size=128)
    workspace = decode.decode_workspace(3, 32, 8, 128, device)
    out = torch.empty_like(case.q)
    options = {"max_seq_len": 2100, "out": out, "workspace": workspace}
    decode.paged_decode(*case.tensors, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    decode.paged_decode(*case.tensors, **options)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_close(out, reference.paged_attention(*case.tensors))


@pytest.mark.gpu
def test_a_graph_replays_other_lengths(paged, assert_close):
    case = paged(23, [900, 40, 2100], num_heads=32, num_kv_heads=8, head_size=128)
    for path in PATHS:
        run(case, path)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(case, path)
        for lengths in ([900, 40, 2100], [1, 0, 700]):
            case.seq_lens.copy_(torch.tensor(lengths))
            graph.replay()
            assert_close(out, reference.paged_attention(*case.tensors))
        case.seq_lens.copy_(torch.tensor([900, 40, 2100]))
