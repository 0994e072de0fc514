from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import layouts, reference  # noqa: E402
from simserve_kernels.kv_write import kv_write  # noqa: E402

LAYOUTS = ("nhd", "packed")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


def tokens(seed, count, shape, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, shape.num_kv_heads, shape.head_size, generator=generator)
    slots = torch.randperm(shape.num_blocks * shape.block_size, generator=generator)[:count]
    return k.to(device, dtype), v.to(device, dtype), slots.to(device)


def two_caches(shape, layout, dtype, device):
    """Two equal caches of random bytes, so that a slot written by mistake is seen."""
    generator = torch.Generator().manual_seed(99)
    pair = layouts.allocate_cache(shape, layout, dtype, device)
    for cache in pair:
        cache.copy_(torch.rand(cache.shape, generator=generator))
    return pair, tuple(cache.clone() for cache in pair)


def same(cache, other):
    return torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 1), (96, 7), (192, 256)])
def test_slots_are_written_and_no_others(device, seed, layout, dtype, head_size, block_size):
    shape = layouts.CacheShape(max(2, 64 // block_size), block_size, 3, head_size)
    k, v, slots = tokens(seed, 21, shape, dtype, device)
    slots[::4] = -1
    ours, wanted = two_caches(shape, layout, dtype, device)
    kv_write(k, v, *ours, slots, layout=layout)
    reference.kv_write(k, v, *wanted, slots, layout=layout)
    assert same(ours[0], wanted[0])
    assert same(ours[1], wanted[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_values_survive_their_scale(device, seed, layout, dtype):
    """Numbers that e4m3 holds exactly; rounding is tested on the GPU, which does it right."""
    shape = layouts.CacheShape(4, 16, 2, 64)
    _, _, slots = tokens(seed, 30, shape, dtype, device)
    codes = torch.arange(30 * 2 * 64).remainder(127).to(torch.uint8).view(FP8)
    exact = codes.reshape(30, 2, 64).to(device).to(torch.float32)
    k, v = (exact * 0.5).to(dtype), (-exact * 2.0).to(dtype)
    ours, wanted = two_caches(shape, layout, FP8, device)
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    kv_write(k, v, *ours, slots, layout=layout, **scales)
    reference.kv_write(k, v, *wanted, slots, layout=layout, **scales)
    assert same(ours[0], wanted[0])
    assert same(ours[1], wanted[1])
    read = reference.gather_kv(*ours, layout, slots, **scales)
    assert torch.equal(read[0], exact.double() * 0.5)
    assert torch.equal(read[1], exact.double() * -2.0)


def test_fp8_saturates(device):
    shape = layouts.CacheShape(1, 1, 1, 64)
    (k_cache, v_cache), _ = two_caches(shape, "nhd", FP8, device)
    k = torch.full((1, 1, 64), 1e6, device=device)
    kv_write(k, -k, k_cache, v_cache, torch.zeros(1, dtype=torch.int64, device=device))
    assert (k_cache.float() == 448.0).all()
    assert (v_cache.float() == -448.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_rounds_as_torch_does(device, seed, layout, dtype):
    shape = layouts.CacheShape(128, 16, 8, 128)
    k, v, slots = tokens(seed, 2000, shape, dtype, device)
    k[:500] *= 1e-3
    v[:500] *= 300.0
    ours, wanted = two_caches(shape, layout, FP8, device)
    scales = {"k_scale": 0.37, "v_scale": 1.7}
    kv_write(k, v, *ours, slots, layout=layout, **scales)
    reference.kv_write(k, v, *wanted, slots, layout=layout, **scales)
    for cache, other in zip(ours, wanted, strict=True):
        assert same(cache, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(device, seed, layout):
    shape = layouts.CacheShape(4, 16, 2, 64)
    k, v, slots = tokens(seed, 10, shape, torch.float32, device)
    fused = torch.cat([k, v], dim=1)
    ours, wanted = two_caches(shape, layout, torch.float32, device)
    interleaved = [torch.stack([cache, cache], dim=1) for cache in ours]
    views = (interleaved[0][:, 0], interleaved[1][:, 1])
    kv_write(fused[:, :2], fused[:, 2:], *views, slots.int(), layout=layout)
    reference.kv_write(k, v, *wanted, slots, layout=layout)
    assert torch.equal(views[0], wanted[0])
    assert torch.equal(views[1], wanted[1])
    assert torch.equal(interleaved[0][:, 1], ours[0])


def test_nothing_to_write(device, seed):
    shape = layouts.CacheShape(4, 16, 2, 64)
    k, v, slots = tokens(seed, 6, shape, torch.float32, device)
    ours, before = two_caches(shape, "nhd", torch.float32, device)
    kv_write(k, v, *ours, torch.full_like(slots, -1))
    kv_write(k[:0], v[:0], *ours, slots[:0])
    assert torch.equal(ours[0], before[0])
    assert torch.equal(ours[1], before[1])


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"k": lambda a: a["k"].double()}, TypeError, "k is torch.float64"),
        ({"v": lambda a: a["v"].half()}, TypeError, "they must agree"),
        ({"v": lambda a: a["v"][:3]}, ValueError, "v has shape"),
        ({"k": lambda a: a["k"].mT.contiguous().mT}, ValueError, "last dimension of k"),
        ({"slot_mapping": lambda a: a["slot_mapping"][:3]}, ValueError, "slot_mapping has shape"),
        ({"slot_mapping": lambda a: a["slot_mapping"].float()}, TypeError, "slot_mapping is"),
        ({"slot_mapping": lambda a: a["slot_mapping"].to("meta")}, ValueError, "one device"),
        ({"k_scale": lambda a: 2.0}, ValueError, "must be 1 for a cache of torch.float32"),
        ({"v_scale": lambda a: 0.0}, ValueError, "v_scale is 0"),
    ],
)
def test_refusals(device, seed, change, error, sentence):
    shape = layouts.CacheShape(4, 16, 2, 64)
    k, v, slots = tokens(seed, 6, shape, torch.float32, device)
    k_cache, v_cache = layouts.allocate_cache(shape, "nhd", torch.float32, device)
    arguments = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    arguments |= {name: make(arguments) for name, make in change.items()}
    with pytest.raises(error, match=sentence):
        kv_write(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_beyond_2_31_elements(device, seed, layout):
    shape = layouts.CacheShape(131_080, 16, 8, 128)
    k, v, _ = tokens(seed, 4, shape._replace(num_blocks=1), torch.bfloat16, device)
    k_cache, v_cache = layouts.allocate_cache(shape, layout, torch.bfloat16, device)
    slots = torch.tensor([5, 131_073 * 16 + 3, -1, 131_079 * 16 + 15], device=device)
    kv_write(k, v, k_cache, v_cache, slots, layout=layout)
    written = slots >= 0
    read = reference.gather_kv(k_cache, v_cache, layout, slots[written])
    assert torch.equal(read[0], k[written].double())
    assert torch.equal(read[1], v[written].double())
