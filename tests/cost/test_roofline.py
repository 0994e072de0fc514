from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.config.presets import gpu_names, load_gpu, load_model, model_names
from simserve.cost.roofline import PARTS, RooflineCost
from simserve.errors import ConfigError
from simserve.types import GPU, ModelShape, StepRun
from tests.cost.columns import column

IDEAL: dict[str, Any] = {
    "linear_flops_efficiency": 1.0,
    "attention_flops_efficiency": 1.0,
    "linear_bandwidth_efficiency": 1.0,
    "attention_bandwidth_efficiency": 1.0,
    "layer_launch_s": 0.0,
    "host_step_s": 0.0,
    "host_request_s": 0.0,
}


def duration_s(model: RooflineCost, run: StepRun) -> float:
    return float(model.price(run).durations_s[0])


def positions(requests: list[tuple[int, int]]) -> Iterator[int]:
    for start, n in requests:
        yield from range(start, start + n)


def least_flops(m: ModelShape, requests: list[tuple[int, int]]) -> int:
    """Counted per token, from the shape alone: layers, and the head once a request."""
    width = m.num_attention_heads * m.head_dim
    projections = m.hidden_size * (2 * width + 2 * m.num_key_value_heads * m.head_dim)
    mlp = m.num_experts_per_tok * 3 * m.hidden_size * m.intermediate_size
    flops = 0
    for position in positions(requests):
        keys = min(position + 1, m.sliding_window or position + 1)
        flops += m.num_hidden_layers * (2 * (projections + mlp) + 4 * width * keys)
    return flops + len(requests) * 2 * m.hidden_size * m.vocab_size


def least_bytes(m: ModelShape, requests: list[tuple[int, int]]) -> int:
    """Weights that any step has to read, and the KV of every request once (bf16)."""
    width = m.num_attention_heads * m.head_dim
    projections = m.hidden_size * (2 * width + 2 * m.num_key_value_heads * m.head_dim)
    mlp = m.num_experts_per_tok * 3 * m.hidden_size * m.intermediate_size
    weights = m.num_hidden_layers * (projections + mlp) + m.hidden_size * m.vocab_size
    kv = sum(min(s + n, m.sliding_window or s + n) for s, n in requests)
    return 2 * (weights + kv * 2 * m.num_hidden_layers * m.num_key_value_heads * m.head_dim)


@pytest.mark.parametrize("efficiencies", [IDEAL, {}], ids=["ideal", "default"])
@given(
    name=st.sampled_from(model_names()),
    gpu_name=st.sampled_from(gpu_names()),
    requests=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 700)), min_size=1, max_size=4),
)
@settings(max_examples=60)
def test_no_step_is_faster_than_its_flops_or_its_bytes(
    efficiencies: dict[str, Any],
    step: Callable[..., StepRun],
    name: str,
    gpu_name: str,
    requests: list[tuple[int, int]],
) -> None:
    shape, gpu = load_model(name), load_gpu(gpu_name)
    took = duration_s(RooflineCost(shape, gpu, **efficiencies), step(*requests)) * (1 + 1e-12)
    assert took >= least_flops(shape, requests) / gpu.flops_per_s["bfloat16"]
    assert took >= least_bytes(shape, requests) / gpu.bandwidth_bytes_per_s


def test_attention_flops_of_a_prompt_are_equal_for_every_chunking(
    step: Callable[..., StepRun],
) -> None:
    """With bandwidth to spare, prefill attention time is FLOPs alone."""
    gpu = replace(load_gpu("h100"), bandwidth_bytes_per_s=1e30)
    model = RooflineCost(load_model("llama-3.1-8b"), gpu, **IDEAL)

    def attention_s(chunks: list[int]) -> float:
        starts = [sum(chunks[:i]) for i in range(len(chunks))]
        prices = (model.price(step((s, n))) for s, n in zip(starts, chunks, strict=True))
        return sum(column(price.parts["attention_prefill_s"])[0] for price in prices)

    whole = attention_s([8192])
    assert whole == pytest.approx(32 * 4 * 4096 * 8192 * 8193 / 2 / 989e12, rel=1e-12)
    for chunks in ([4096, 4096], [2048] * 4, [512] * 16, [5000, 3192], [2, 8190]):
        assert attention_s(chunks) == pytest.approx(whole, rel=1e-12)


def test_seconds_come_out(step: Callable[..., StepRun]) -> None:
    """8,000 tokens of an 8B model are 112 TFLOP in the layers alone: 113 ms on an H100's peak."""
    ideal = RooflineCost(load_model("llama-3.1-8b"), load_gpu("h100"), **IDEAL)
    assert 0.113 < duration_s(ideal, step((0, 8000))) < 0.14
    default = RooflineCost(load_model("llama-3.1-8b"), load_gpu("h100"))
    assert 0.15 < duration_s(default, step((0, 8000))) < 0.3


@pytest.mark.parametrize(
    ("requests", "measured_ms"),
    [
        ([(128, 1)], 5.73),
        ([(32768, 1)], 6.91),
        ([(2048, 1)] * 8, 6.54),
        ([(128, 1)] * 32, 6.88),
        ([(2048, 1)] * 64, 12.47),
        ([(1024, 1)] * 128, 15.41),
        ([(512, 1)] * 256, 18.26),
        ([(0, 1024)], 25.67),
        ([(0, 8192)], 208.0),
        ([(0, 32768)], 1200.0),
    ],
)
def test_defaults_are_near_a_measured_engine(
    step: Callable[..., StepRun], requests: list[tuple[int, int]], measured_ms: float
) -> None:
    """Steps of vLLM 0.20.2 with Llama-3.1-8B's shape on an H200: within 20 %."""
    model = RooflineCost(load_model("llama-3.1-8b"), load_gpu("h200"))
    assert 1e3 * duration_s(model, step(*requests)) == pytest.approx(measured_ms, rel=0.2)


def test_experts_are_read_as_tokens_reach_them(step: Callable[..., StepRun]) -> None:
    model = RooflineCost(load_model("mixtral-8x7b"), load_gpu("h200"), **IDEAL)

    def linear_s(batch: int) -> float:
        return column(model.price(step(*[(100, 1)] * batch)).parts["linear_s"])[0]

    expert_s = 32 * 3 * 4096 * 14336 * 2 / 4.8e12
    assert linear_s(2) - linear_s(1) == pytest.approx(2 * expert_s, rel=0.01)
    assert linear_s(4) - linear_s(2) == pytest.approx(4 * expert_s, rel=0.01)
    assert linear_s(8) - linear_s(4) < 0.01 * expert_s


def test_fp8_halves_the_kv_traffic(step: Callable[..., StepRun]) -> None:
    shape, gpu = load_model("llama-3.1-8b"), load_gpu("h200")
    run = step(*[(8000, 1)] * 64)
    full, half = (
        column(model.price(run).parts["attention_decode_s"])[0]
        for model in (RooflineCost(shape, gpu, kv_cache_dtype=name) for name in ("auto", "fp8"))
    )
    assert half == pytest.approx(full / 2, rel=0.01)


def test_overheads_are_their_own_parts(step: Callable[..., StepRun]) -> None:
    shape, gpu = load_model("llama-3.1-8b"), load_gpu("h200")
    model = RooflineCost(shape, gpu, layer_launch_s=1e-5, host_step_s=0.25, host_request_s=0.5)
    price = model.price(step((10, 1), (10, 1), (10, 1)))
    assert tuple(price.parts) == PARTS
    assert column(price.parts["launch_s"]) == [pytest.approx(32e-5)]
    assert column(price.parts["host_s"]) == [0.25 + 3 * 0.5]


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("linear_flops_efficiency", 0.0),
        ("attention_bandwidth_efficiency", 1.01),
        ("attention_flops_efficiency", float("nan")),
        ("host_step_s", -1e-3),
        ("layer_launch_s", float("inf")),
    ],
)
def test_parameters_out_of_range_are_named(parameter: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"cost\.{parameter}: roofline: must be"):
        RooflineCost(load_model("llama-3.1-8b"), load_gpu("h200"), **{parameter: value})  # type: ignore[arg-type]


def test_a_gpu_without_the_dtype_is_refused() -> None:
    shape: ModelShape = replace(load_model("llama-3.1-8b"), dtype="fp8")
    gpu: GPU = load_gpu("a100")
    with pytest.raises(ConfigError, match="GPU 'a100' has no float8 matrix units; it has bfloat16"):
        RooflineCost(shape, gpu)
