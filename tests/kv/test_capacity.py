from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simserve.config.presets import gpu_names, load_gpu, load_model, model_names
from simserve.errors import CapacityError, ConfigError
from simserve.kv.capacity import Capacity, fit_kv_cache, kv_bytes_per_token
from simserve.shapes import num_parameters

GIB = 1024**3


def test_kv_bytes_of_a_token() -> None:
    """32 layers, 8 KV heads, head_dim 128 in bf16: 128 KiB a token and 4 GiB for 32K tokens."""
    assert kv_bytes_per_token(load_model("llama-3.1-8b")) == 128 * 1024 == 131072
    assert kv_bytes_per_token(load_model("llama-3.1-8b")) * 32768 == 4 * GIB
    assert kv_bytes_per_token(load_model("qwen3-32b")) == 262144
    assert kv_bytes_per_token(load_model("llama-3.1-8b"), "fp8") == 65536


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_parameters_are_the_published_number(name: str, published: int) -> None:
    assert num_parameters(load_model(name)) == pytest.approx(published, rel=1e-4)


def total(capacity: Capacity) -> int:
    """All byte terms but the memory, the budget and the figure per token."""
    other = ("gpu_memory_bytes", "budget_bytes")
    names = [f.name for f in fields(capacity) if f.name.endswith("_bytes") and f.name not in other]
    return sum(int(getattr(capacity, name)) for name in names)


@given(
    model=st.sampled_from(model_names()),
    gpu=st.sampled_from(gpu_names()),
    utilization=st.floats(0.05, 1.0),
    budget=st.integers(1, 100_000),
    block_size=st.sampled_from([1, 16, 32, 128]),
)
def test_terms_add_up_or_the_model_does_not_fit(
    model: str, gpu: str, utilization: float, budget: int, block_size: int
) -> None:
    try:
        capacity = fit_kv_cache(
            load_model(model),
            load_gpu(gpu),
            block_size=block_size,
            gpu_memory_utilization=utilization,
            max_num_batched_tokens=budget,
        )
    except CapacityError:
        return
    block_bytes = capacity.kv_bytes_per_token * block_size
    assert total(capacity) == capacity.budget_bytes
    assert capacity.kv_cache_bytes == capacity.num_gpu_blocks * block_bytes
    assert 0 <= capacity.unused_bytes < block_bytes
    assert capacity.num_gpu_blocks >= 2
    assert capacity.num_usable_blocks == capacity.num_gpu_blocks - 1


def test_a_model_that_cannot_fit_is_an_error_with_its_numbers() -> None:
    """Never a negative number of blocks, never a default."""
    with pytest.raises(CapacityError) as caught:
        fit_kv_cache(load_model("llama-3.1-70b"), load_gpu("h100"))
    message = str(caught.value)
    assert "llama-3.1-70b leaves no room" in message
    assert "weights 131.4" in message
    assert "79.11 GiB of h100" in message
    assert fit_kv_cache(load_model("llama-3.1-70b"), load_gpu("mi300x")).num_gpu_blocks > 5000


def test_a_draft_model_that_is_too_large_is_not_laid_on_the_model() -> None:
    shape, gpu = load_model("llama-3.2-1b"), load_gpu("a100")
    with pytest.raises(
        CapacityError, match=r"1b with the draft model llama-3.1-70b .*131\.42 of it"
    ):
        fit_kv_cache(shape, gpu, draft=load_model("llama-3.1-70b"))


def test_the_longest_request_has_to_fit_without_the_null_block() -> None:
    shape, gpu = load_model("llama-3.1-8b"), load_gpu("rtx4090")
    usable = fit_kv_cache(shape, gpu, max_model_len=32768).num_usable_tokens
    assert 32768 < usable < 131072
    with pytest.raises(CapacityError, match=f"max_model_len {usable + 1} of llama-3.1-8b does not"):
        fit_kv_cache(shape, gpu, max_model_len=usable + 1)
    assert fit_kv_cache(shape, gpu, max_model_len=usable).num_usable_tokens == usable


def test_each_term_takes_blocks_away() -> None:
    shape, gpu = load_model("llama-3.1-8b"), load_gpu("h200")
    base = fit_kv_cache(shape, gpu, max_num_batched_tokens=2048)
    assert fit_kv_cache(shape, gpu, max_num_batched_tokens=40960).num_gpu_blocks < (
        base.num_gpu_blocks
    )
    assert (
        fit_kv_cache(
            shape, gpu, max_num_batched_tokens=2048, gpu_memory_utilization=0.8
        ).num_gpu_blocks
        < base.num_gpu_blocks
    )
    fp8_weights = fit_kv_cache(replace(shape, dtype="fp8"), gpu, max_num_batched_tokens=2048)
    assert fp8_weights.weight_bytes * 2 == base.weight_bytes
    fp8_kv = fit_kv_cache(shape, gpu, max_num_batched_tokens=2048, kv_cache_dtype="fp8")
    assert fp8_kv.kv_scale_bytes == 32 * 2 * 4
    assert base.kv_scale_bytes == 0
    assert fp8_kv.num_gpu_blocks in (2 * base.num_gpu_blocks - 1, 2 * base.num_gpu_blocks)


def test_a_draft_model_shares_the_pool() -> None:
    large, small = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
    alone, other, both = (
        fit_kv_cache(model, load_gpu("h200"), draft=draft)
        for model, draft in ((large, None), (small, None), (large, small))
    )
    assert total(both) == both.budget_bytes
    assert both.weight_bytes == alone.weight_bytes + other.weight_bytes
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token + other.kv_bytes_per_token
    assert both.activation_bytes == max(alone.activation_bytes, other.activation_bytes)
    assert 0.7 * alone.num_gpu_blocks < both.num_gpu_blocks < 0.8 * alone.num_gpu_blocks


def test_a_measured_engine_is_met_within_two_percent() -> None:
    """A vLLM 0.19 on an RTX 4090 with max_model_len 32768 and budget 2048 had 2,588 blocks."""
    capacity = fit_kv_cache(
        load_model("llama-3.1-8b"),
        load_gpu("rtx4090"),
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_model_len=32768,
    )
    assert capacity.num_gpu_blocks == pytest.approx(2588, rel=0.02)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("block_size", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", -1),
        ("kv_cache_dtype", "fp7"),
    ],
)
def test_parameters_out_of_range_are_refused(parameter: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{parameter}|fp7"):
        fit_kv_cache(load_model("llama-3.1-8b"), load_gpu("h200"), **{parameter: value})  # type: ignore[arg-type]
