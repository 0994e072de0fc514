"""The fused kernel leaves what `rope` and then `kv_write` leave, bit by bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from simserve_kernels import layouts, reference, reference_dense, rope_write  # noqa: E402
from simserve_kernels.kv_write import kv_write  # noqa: E402
from simserve_kernels.norm_rope import rope  # noqa: E402
from simserve_kernels.rope_write import rope_kv_write  # noqa: E402

FP8 = torch.float8_e4m3fn
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 9, 5, 3


def inputs(seed, device, *, head_size=64, rotated=64, dtype=torch.float32):
    """q, k and v as views of one projection, positions, table and slots, two of them padding."""
    generator = torch.Generator().manual_seed(seed)
    width = NUM_HEADS + 2 * NUM_KV_HEADS
    fused = torch.randn(NUM_TOKENS, width, head_size, generator=generator).to(device, dtype)
    parts = fused.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    positions = torch.randint(50, (NUM_TOKENS,), generator=generator).to(device)
    angles = torch.randn(50, rotated // 2, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
    slots = torch.randperm(64, generator=generator)[:NUM_TOKENS]
    slots[::4] = -1
    return *parts, positions, table, slots.to(device)


def cache(layout, dtype, device, head_size=64, block_size=16):
    shape = layouts.CacheShape(64 // block_size, block_size, NUM_KV_HEADS, head_size)
    pair = layouts.allocate_cache(shape, layout, dtype, device)
    for tensor in pair:
        tensor.copy_(torch.full(tensor.shape, 0.5))
    return pair


def same(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("layout", ["nhd", "packed"])
@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (80, 80), (96, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_two_calls(seed, device, layout, head_size, rotated, dtype):
    case = inputs(seed, device, head_size=head_size, rotated=rotated, dtype=dtype)
    q, k, v, positions, table, slots = case
    ours, theirs = (cache(layout, dtype, device, head_size) for _ in range(2))
    their_q, their_k = q.clone(), k.clone()
    rope_kv_write(q, k, v, positions, table, *ours, slots, layout=layout)
    rope(their_q, their_k, positions, table)
    kv_write(their_k, v, *theirs, slots, layout=layout)
    assert torch.equal(q, their_q)
    assert same(ours[0], theirs[0])
    assert same(ours[1], theirs[1])


def test_many_tokens_of_the_packed_layout(seed, device, monkeypatch):
    monkeypatch.setattr(rope_write, "_MAX_PACKED_TOKENS", NUM_TOKENS - 1)
    test_equals_the_two_calls(seed, device, "packed", 64, 64, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nhd", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equals_the_two_calls_on_a_gpu(seed, device, layout, dtype):
    test_equals_the_two_calls(seed, device, layout, 128, 128, dtype)
    test_equals_the_two_calls(seed, device, layout, 96, 32, dtype)


@pytest.mark.parametrize("layout", ["nhd", "packed"])
def test_fp8_is_quantised_from_the_rounded_keys(seed, device, layout):
    q, k, v, positions, table, slots = inputs(seed, device, dtype=torch.bfloat16)
    ours, theirs = (cache(layout, FP8, device) for _ in range(2))
    scales = {"k_scale": 0.37, "v_scale": 1.7}
    their_q, their_k = q.clone(), k.clone()
    rope_kv_write(q, k, v, positions, table, *ours, slots, layout=layout, **scales)
    rope(their_q, their_k, positions, table)
    kv_write(their_k, v, *theirs, slots, layout=layout, **scales)
    assert same(ours[0], theirs[0])
    assert same(ours[1], theirs[1])


def test_equals_float64(seed, device, assert_close):
    q, k, v, positions, table, slots = inputs(seed, device)
    written = slots >= 0
    before, keys = q.clone(), k.clone()
    caches = cache("nhd", torch.float32, device)
    rope_kv_write(q, k, v, positions, table, *caches, slots)
    assert_close(q, reference_dense.rope(before, positions, table))
    read_k, read_v = reference.gather_kv(*caches, "nhd", slots[written])
    assert_close(read_k.float(), reference_dense.rope(keys, positions, table)[written])
    assert torch.equal(read_v, v[written].double())
    assert torch.equal(k, keys)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"positions": lambda a: a["positions"].float()}, TypeError, "positions is torch.float32"),
        ({"table": lambda a: a["table"][:, :5]}, ValueError, "5 columns"),
        ({"k_cache": lambda a: a["k_cache"].half()}, TypeError, "they must agree"),
        ({"slot_mapping": lambda a: a["slot_mapping"][:2]}, ValueError, "slot_mapping has shape"),
        ({"k_scale": lambda a: 2.0}, ValueError, "must be 1 for a cache of torch.float32"),
    ],
)
def test_refusals(seed, device, change, error, sentence):
    q, k, v, positions, table, slots = inputs(seed, device)
    k_cache, v_cache = cache("nhd", torch.float32, device)
    arguments = {"q": q, "k": k, "v": v, "positions": positions, "table": table}
    arguments |= {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    arguments |= {name: make(arguments) for name, make in change.items()}
    with pytest.raises(error, match=sentence):
        rope_kv_write(**arguments)
