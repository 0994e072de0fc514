"""Tensors of a GPU that is not the current one: kernels run where their tensors are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import layouts, reference  # noqa: E402
from simserve_kernels.flash_attention import flash_attention  # noqa: E402
from simserve_kernels.kv_write import kv_write  # noqa: E402
from simserve_kernels.naive_attention import naive_attention  # noqa: E402
from simserve_kernels.norm_rope import rms_norm, rope, silu_mul  # noqa: E402
from simserve_kernels.paged_decode import paged_decode  # noqa: E402
from simserve_kernels.paged_prefill import paged_prefill  # noqa: E402
from simserve_kernels.rope_write import rope_kv_write  # noqa: E402

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 8, 2, 64, 16, 24
LENS = [150, 17, 1]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs"),
]


@pytest.fixture
def second():
    """The GPU that is not the current one, which stays what it is."""
    torch.cuda.set_device(0)
    yield torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


def normal(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def paged(seed, second, layout):
    """Keys and values of three sequences, their table and their lengths."""
    shape = layouts.CacheShape(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    caches = layouts.allocate_cache(shape, layout, torch.bfloat16, second)
    for number, cache in enumerate(caches):
        cache.copy_(normal(seed + number, *cache.shape))
    table = torch.arange(NUM_BLOCKS, dtype=torch.int32).flip(0)[:20].reshape(2, 10)
    table = torch.cat([table, table[:1]])
    lens = torch.tensor(LENS, dtype=torch.int32)
    return *caches, table.to(second), lens.to(second)


def close(out, expected):
    assert out.device.index == 1
    assert (out.double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("layout", ["nhd", "packed"])
@pytest.mark.parametrize("path", ["auto", "v1", "v2"])
def test_decode(seed, second, layout, path):
    k, v, table, lens = paged(seed, second, layout)
    q = normal(seed + 2, 3, HEADS, HEAD_SIZE).to(second)
    out = paged_decode(q, k, v, table, lens, max_seq_len=160, layout=layout, path=path)
    close(out, reference.paged_attention(q, k, v, table, lens, layout=layout))


@pytest.mark.parametrize("layout", ["nhd", "packed"])
def test_mixed_batch(seed, second, layout):
    """Two launches, on two streams of that GPU."""
    k, v, table, lens = paged(seed, second, layout)
    q = normal(seed + 2, 102, HEADS, HEAD_SIZE).to(second)
    starts = torch.tensor([0, 100, 101, 102], dtype=torch.int32, device=second)
    out = paged_prefill(q, k, v, table, lens, starts, max_query_len=100, layout=layout)
    expected = reference.paged_attention(
        q, k, v, table, lens, query_start_loc=starts, layout=layout
    )
    close(out, expected)


@pytest.mark.parametrize("layout", ["nhd", "packed"])
def test_writes(seed, second, layout):
    k, v, *_ = paged(seed, second, layout)
    copies = k.clone(), v.clone()
    new = normal(seed + 2, 2, 5, KV_HEADS, HEAD_SIZE).to(second)
    slots = torch.tensor([3, -1, 40, 41, 383], device=second)
    kv_write(*new, k, v, slots, layout=layout)
    reference.kv_write(*new, *copies, slots, layout=layout)
    assert torch.equal(k, copies[0])
    assert torch.equal(v, copies[1])
    q = normal(seed + 3, 5, HEADS, HEAD_SIZE).to(second)
    positions = torch.arange(5, device=second)
    table = torch.cat([torch.ones(5, HEAD_SIZE // 2), torch.zeros(5, HEAD_SIZE // 2)], 1)
    rope_kv_write(q, *new, positions, table.to(second), k, v, slots, layout=layout)
    assert torch.equal(k, copies[0])  # turned by no angle


def test_dense(seed, second):
    q = normal(seed, 40, HEADS, HEAD_SIZE).to(second)
    k, v = normal(seed + 1, 2, 40, KV_HEADS, HEAD_SIZE).to(second)
    starts = torch.tensor([0, 40], dtype=torch.int32, device=second)
    expected = reference.attention(q, k, v)
    close(flash_attention(q, k, v, starts, starts), expected)
    close(naive_attention(q, k, v), expected)


def test_steps_between(seed, second):
    x = normal(seed, 6, 128).to(second)
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    close(rms_norm(x, torch.ones_like(x[0]), 1e-5), wide * scale)
    close(silu_mul(x), torch.nn.functional.silu(wide[:, :64]) * wide[:, 64:])
    q, k = (normal(seed + n, 6, heads, 64).to(second) for n, heads in ((1, HEADS), (2, KV_HEADS)))
    before = q.double()
    table = torch.cat([torch.zeros(6, 32), torch.ones(6, 32)], 1).to(second)
    rope(q, k, torch.arange(6, device=second), table)
    close(q, torch.cat([-before[..., 32:], before[..., :32]], -1))
