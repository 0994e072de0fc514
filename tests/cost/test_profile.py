from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve.config.presets import load_gpu, load_model, model_names
from simserve.cost.coefficients import COEFFICIENTS
from simserve.cost.noise import ResidualNoise
from simserve.cost.profile import ProfileCost
from simserve.cost.profile_file import load_profile, profile_names
from simserve.cost.step_model import PARTS, blend
from simserve.errors import ConfigError, OutOfDomainError, UnknownNameError
from simserve.types import Kind, StepRun, TraceRequest
from tests.cost.columns import column

Change = Callable[[dict[str, Any]], object]
BANDWIDTH, FLOPS = 4.8e12, 989e12


@pytest.fixture
def load(tmp_path: Path, profile_json: dict[str, Any]) -> Callable[..., ProfileCost]:
    """Makes a cost model of the synthetic profile after some changes to it."""

    def make(*changes: Change, options: dict[str, Any] | None = None, **top: Any) -> ProfileCost:
        content = {**copy.deepcopy(profile_json), **top}
        for change in changes:
            change(content)
        (tmp_path / "p.json").write_text(json.dumps(content))
        options = {"path": "p.json", "base_dir": tmp_path, **(options or {})}
        model = load_model(options.pop("model", "llama-3.1-8b"))
        return ProfileCost(model, load_gpu("h200"), **options)

    return make


def coefficient(**values: Any) -> Change:
    return lambda content: content["coefficients"].update(values)


def seconds(model: ProfileCost, run: StepRun) -> float:
    return float(model.price(run).durations_s[0])


def parts(model: ProfileCost, run: StepRun) -> dict[str, float]:
    return {name: column(part)[0] for name, part in model.price(run).parts.items()}


def test_parts_of_a_decode_step_by_hand(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    """Three decodes fill a graph of four tokens: Llama-3.1-8B's shape, by hand."""
    found = parts(load(), step((99, 1), (199, 1), (299, 1)))
    layer = 4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336
    weights = 32 * layer * 2 / BANDWIDTH / 0.8
    products = 4 * 32 * layer * 2 / FLOPS / 0.75
    kv = 131072 / BANDWIDTH / 0.9
    surcharge = 1 + 0.3 * (1 - 600 / (3 * 300))
    head = 4096 * 128256 * 2 / BANDWIDTH / 0.8
    row = (4096 * 2 + 128256 * 12) / BANDWIDTH / 0.8
    assert found == pytest.approx(
        {
            "schedule_s": 1e-4 + 3e-5,
            "inputs_s": 1e-3 + 6e-5,
            "linear_s": blend(weights, products, 0.2),
            "attention_decode_s": kv * (600 * surcharge + 4 * 250),
            "attention_prefill_s": 0.0,
            "lm_head_s": head + 3 * row,
            "gaps_s": 32 * 3e-5,
            "launch_s": 0.0,
            "update_s": 3e-5 + 1.5e-5,
        },
        rel=1e-9,
    )


def test_parts_of_a_large_prefill_by_hand(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    found = parts(load(), step((1000, 3000)))
    layer = 4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336
    weights, products = 2 * 32 * layer / BANDWIDTH / 0.8, 3000 * 64 * layer / FLOPS / 0.75
    row = 10 * 4096 + 2 * 4096 + 2048 + 2 * 4096 + 6 * 14336
    activations = 2000 * 32 * row * 2 / BANDWIDTH / 0.8
    assert found["linear_s"] == pytest.approx(blend(weights, products, 0.2) + activations)
    pairs = 3000 * 1000 + 3000 * 3001 // 2
    attention = 4 * 32 * 4096 * pairs / FLOPS / 0.6 + 131072 * 4000 / BANDWIDTH / 0.9
    assert found["attention_prefill_s"] == pytest.approx(32 * 5e-5 + attention)
    assert found["launch_s"] < 0.02 * found["linear_s"], "the GPU is slower than the launches"


DEALT = {
    "merge_layer_s": 1e-5,
    "mixed_layer_s": 2e-6,
    "inputs_mixed_s": 2e-4,
    "context_layer_s": 1e-8,
    "round_layer_s": 3e-7,
    "overlap_blend": 0.4,
}


def test_decodes_whose_chunks_are_known_by_hand(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    """In tiles of 64 tokens they have 2, 4 and 5, each a chunk; 66 chunks run at a time."""
    plan = load_profile("h200-llama-3.1-8b-simserve").attention_plan
    assert plan is not None
    model = load(coefficient(**DEALT), attention_plan=plan.model_dump())
    found = parts(model, step((96, 1), (199, 1), (299, 1)))
    kv, idle = 131072 / BANDWIDTH / 0.9, 66 * 64 - (97 + 200 + 300)
    assert found["attention_decode_s"] == pytest.approx(
        kv * (97 + 200 + 300 + 0.3 * idle + 11 * 250) + 32 * 1e-5
    )
    assert found["attention_prefill_s"] == 0.0
    assert found["inputs_s"] == pytest.approx(1e-3 + 6e-5)


def test_kv_that_others_read_too_takes_a_share_less(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    """Not all that is shared need be in the step: as much as it reads counts at most."""
    plan = load_profile("h200-llama-3.1-8b-simserve").attention_plan
    assert plan is not None
    saving = coefficient(**DEALT, shared_kv_saved=0.4)
    model = load(saving, attention_plan=plan.model_dump())

    def read_s(run: StepRun, shared: int) -> float:
        mine = replace(run.plan, num_shared_kv_tokens=shared)
        return float(parts(model, StepRun(mine))["attention_decode_s"])

    token_s = 131072 / BANDWIDTH / 0.9
    decodes = step((96, 1), (199, 1), (299, 1))
    alone, shared, all_of_it = (read_s(decodes, n) for n in (0, 192, 10_000))
    assert alone - shared == pytest.approx(token_s * 0.4 * 192)
    assert alone - all_of_it == pytest.approx(token_s * 0.4 * 597)
    mixed = step((999, 1), (0, 512))
    busiest_s = 32 * (1e-8 * 1000 + 3e-7 * 32)
    left = 1 - 0.4 * 320 / 1000
    from_memory_s = 131072 / BANDWIDTH / 0.6 * 1000 * left
    assert read_s(mixed, 320) == pytest.approx(blend(from_memory_s, busiest_s * left, 0.5))


def test_a_decode_beside_tiles_that_are_known_by_hand(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    """A chunk of 512 tokens has 32 tiles for 33 places, each of which the decode takes for a 33rd
    of its time on average; it reads 32 keys at a time."""
    plan = load_profile("h200-llama-3.1-8b-simserve").attention_plan
    assert plan is not None
    model = load(coefficient(**DEALT), attention_plan=plan.model_dump())
    found = parts(model, step((999, 1), (0, 512)))
    read_s, busiest_s = 131072 / BANDWIDTH / 0.6 * 1000, 32 * (1e-8 * 1000 + 3e-7 * 32)
    tiles_s = 4 * 32 * 4096 * (33 * 16 * 512) / FLOPS / 0.6
    decode_s = blend(read_s, busiest_s, 0.5)
    taken_s = 32 * (1e-8 * 1000 + 3e-7 * 1000 / 32) / 33
    both_s = blend(decode_s, taken_s + 32 * 2e-6 + tiles_s, 0.4)
    assert found["attention_decode_s"] == pytest.approx(decode_s)
    assert found["attention_prefill_s"] == pytest.approx(both_s - decode_s)
    assert found["inputs_s"] == pytest.approx(1e-3 + 4e-5 + 2e-4)


def test_small_batches_without_a_graph_wait_for_their_launches(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load()
    eager, piecewise = parts(model, step((0, 600))), parts(model, step((0, 200)))
    gpu = sum(eager[name] for name in ("linear_s", "attention_prefill_s", "gaps_s", "launch_s"))
    assert gpu > 3e-3 + 32 * 4e-4
    assert piecewise["launch_s"] < eager["launch_s"]
    assert parts(model, step(*[(9, 1)] * 200))["launch_s"] == 0


def test_steps_pad_to_graph_sizes(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load()
    linear = [parts(model, step(*[(9, 1)] * n))["linear_s"] for n in (9, 15, 16, 17)]
    assert linear[0] == linear[1] == linear[2] < linear[3]
    eager = [parts(model, step((0, n)))["linear_s"] for n in (513, 514)]
    assert eager[0] < eager[1]


def test_sizes_with_poor_kernels_take_longer_for_the_models_that_were_measured(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    """A graph of 16 tokens, and one of 512."""
    plain, sized = load(), load(size_factors={16: 1.5, 512: 0.9})
    for run, factor in (
        (step(*[(9, 1)] * 9), 1.5),
        (step((0, 16)), 1.5),
        (step(*[(9, 1)] * 17), 1.0),
        (step((0, 505)), 0.9),
        (step((0, 512)), 0.9),
        (step((0, 513)), 1.0),
    ):
        expected, found = parts(plain, run), parts(sized, run)
        assert found["linear_s"] == pytest.approx(factor * expected["linear_s"])
        for name in ("attention_decode_s", "lm_head_s", "gaps_s", "inputs_s"):
            assert found[name] == expected[name]
    other = {"model": "qwen3-8b"}
    run = step(*[(9, 1)] * 9)
    assert seconds(load(size_factors={16: 1.5}, options=other), run) == seconds(
        load(options=other), run
    )


def test_decodes_may_have_size_factors_of_their_own(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    plain, sized = load(), load(size_factors={16: 1.5}, decode_size_factors={16: 1.1, 32: 1.2})
    for run, factor in (
        (step((0, 16)), 1.5),
        (step((9, 1), (0, 12)), 1.5),
        (step(*[(9, 1)] * 16), 1.1),
        (step((0, 32)), 1.0),
        (step(*[(9, 1)] * 32), 1.2),
    ):
        expected = factor * parts(plain, run)["linear_s"]
        assert parts(sized, run)["linear_s"] == pytest.approx(expected)


def test_a_new_block_table_costs_its_request_and_its_tokens(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    run = step((1000, 1), (160, 600))
    model = load()
    for kind, extra in ((Kind.NEW, 2e-5 + 76e-6), (Kind.RESUMED, 2e-5 + 76e-6), (Kind.GHOST, 0)):
        marked = StepRun(replace(run.plan, kinds={"1": kind}))
        assert seconds(model, marked) - seconds(model, run) == pytest.approx(extra, abs=1e-12)


def test_the_loop_takes_time_between_steps(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load(options={"host_scale": 2.0})
    request = TraceRequest(request_id="a", arrival_s=0.0, prompt=(("p", 1000),), output_len=1)
    assert model.after_step_s(step(*[(9, 1)] * 5).plan) == pytest.approx(2 * 15e-6)
    assert model.take_in_s(request, first=True) == pytest.approx(2 * 5e-4)
    assert model.take_in_s(request, first=False) == pytest.approx(2 * 3e-4)


def test_a_slower_host_takes_longer_and_the_gpu_as_long(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    fast, slow = (
        parts(load(options={"host_scale": scale}), step((999, 1), (0, 100))) for scale in (1, 3)
    )
    for name in PARTS:
        if name in ("schedule_s", "inputs_s", "update_s"):
            assert slow[name] == pytest.approx(3 * fast[name])
        elif name == "launch_s":
            assert slow[name] > fast[name]
        else:
            assert slow[name] == fast[name]


def test_host_time_that_overlaps_shows_only_where_it_is_longer(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    run = step(*[(99, 1)] * 8)
    adds = parts(load(), run)
    host = sum(adds[name] for name in ("schedule_s", "inputs_s", "update_s"))
    gpu = sum(adds.values()) - host
    assert gpu > host
    hidden = load(options={"host": "overlaps"})
    assert seconds(hidden, run) == pytest.approx(gpu)
    slow = load(options={"host": "overlaps", "host_scale": 50.0})
    assert seconds(slow, run) == pytest.approx(50 * host)
    assert hidden.remarks == (
        "profile 'synthetic': measured with host time that adds, priced as if it overlaps",
    )


@given(a=st.floats(1e-6, 1.0), b=st.floats(1e-6, 1.0), width=st.floats(0, 2))
def test_a_blend_is_at_least_the_larger_and_increases(a: float, b: float, width: float) -> None:
    value = blend(a, b, width)
    assert value * (1 + 1e-12) >= max(a, b)
    assert blend(a * 1.01, b, width) * (1 + 1e-12) >= value
    assert blend(a, b, 0.0) == pytest.approx(max(a, b), rel=1e-12)


@pytest.mark.parametrize("profile", ["h200-llama-3.1-8b-vllm", "h200-llama-3.1-8b-simserve"])
@given(
    name=st.sampled_from(model_names()),
    requests=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 700)), min_size=1, max_size=4),
)
@settings(max_examples=60)
def test_no_step_is_faster_than_its_flops_or_its_bytes(
    profile: str, step: Callable[..., StepRun], name: str, requests: list[tuple[int, int]]
) -> None:
    m, gpu = load_model(name), load_gpu("h200")
    model = ProfileCost(m, gpu, name=profile)
    took = seconds(model, step(*requests)) * (1 + 1e-12)
    width = m.num_attention_heads * m.head_dim
    projections = m.hidden_size * (2 * width + 2 * m.num_key_value_heads * m.head_dim)
    mlp = m.num_experts_per_tok * 3 * m.hidden_size * m.intermediate_size
    window = m.sliding_window or 10**9
    tokens = [start + i for start, n in requests for i in range(n)]
    pairs = sum(min(position + 1, window) for position in tokens)
    layers, head = m.num_hidden_layers, m.hidden_size * m.vocab_size
    flops = layers * (2 * (projections + mlp) * len(tokens) + 4 * width * pairs)
    kv = sum(min(start + n, window) for start, n in requests)
    kv_elements = kv * 2 * layers * m.num_key_value_heads * m.head_dim
    num_bytes = 2 * (layers * (projections + mlp) + head + kv_elements)
    assert took >= (flops + 2 * head * len(requests)) / gpu.flops_per_s["bfloat16"]
    assert took >= num_bytes / gpu.bandwidth_bytes_per_s


def test_attention_flops_of_a_prompt_are_equal_for_every_chunking(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    """What chunks cost beyond that is reading the earlier ones' KV, and a constant a chunk."""
    model = load(lambda c: c["coefficients"].update(mixed_layer_s=0.0))
    read_s = 131072 / BANDWIDTH / 0.9

    def attention(chunks: list[int]) -> float:
        total, start = 0.0, 0
        for n in chunks:
            total += parts(model, step((start, n)))["attention_prefill_s"]
            start += n
            total -= read_s * start
        return total

    whole = attention([4000])
    for chunks in ([2000, 2000], [3, 3997], [512] * 7 + [416], [100] * 40):
        assert attention(chunks) == pytest.approx(whole, rel=1e-9)


def test_steps_out_of_domain_are_counted_one_by_one_and_named(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load()
    assert model.remarks == ()
    model.price(step((499_996, 1), count=10))
    assert model.out_of_domain_steps == 6
    model.price(step(*[(1, 1)] * 257, count=5))
    assert model.out_of_domain_steps == 11
    assert model.remarks == (
        "profile 'synthetic': 11 steps lie outside what was measured and are extrapolated: "
        "decode_kv_tokens = 500006 (measured: 0 to 500000), num_reqs = 257 (measured: 1 to 256)",
    )


def test_of_a_run_that_was_cut_short_only_the_steps_that_were_taken_count(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    def at(number: int, run: StepRun) -> StepRun:
        return StepRun(replace(run.plan, step=number), run.count)

    model = load()
    model.price(at(5, step((499_998, 1), count=10)))  # all but the first two lie outside
    model.price(at(9, step((7, 1))))
    assert model.out_of_domain_steps == 2
    assert "decode_kv_tokens = 500002 (" in model.remarks[0]
    model.price(at(10, step((499_998, 1), count=10)))
    assert model.out_of_domain_steps == 2 + 8


def test_extrapolation_can_be_forbidden(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load(out_of_domain="error")
    model.price(step((0, 4096)))
    message = "profile 'synthetic': num_tokens = 4097 is outside the measured 1 to 4096"
    with pytest.raises(OutOfDomainError, match=message):
        model.price(step((0, 4097)))
    with pytest.raises(OutOfDomainError, match="decode_kv_tokens = 500009 is outside"):
        model.price(step((499_999, 1), count=10))


def test_another_model_is_priced_by_its_shape_and_said_so(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    run = step(*[(999, 1)] * 4)
    large, small = (load(options={"model": name}) for name in ("llama-3.1-70b", "qwen3-0.6b"))
    assert seconds(large, run) > 5 * seconds(load(), run) > 5 * seconds(small, run)
    assert small.remarks == (
        "profile 'synthetic': model 'qwen3-0.6b' was not measured; it is priced by its shape "
        "from llama-3.1-8b",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (coefficient(linear_flop=0.5), r"'linear_flop' is not known \(did you mean 'linear_flops'"),
        (coefficient(linear_flops=1.01), "'linear_flops' is 1.01, not from 0.01 to 1"),
        (coefficient(inputs_step_s=-1e-9), "'inputs_step_s' is -1e-09, not from 0 to 1"),
        (coefficient(launch_blend=2.1), "'launch_blend' is 2.1, not from 0 to 2"),
        (coefficient(inputs_step_s=float("nan")), r"coefficients\.inputs_step_s: .*finite"),
        (lambda c: c["coefficients"].pop("kv_bandwidth"), "coefficients lack kv_bandwidth"),
        (lambda c: c.update(size_factors={"16": 0.79}), "of 16 tokens is 0.79, not from 0.8"),
        (
            coefficient(merge_layer_s=1e-6),
            "merge_layer_s. is of an attention_plan, and there is none",
        ),
        (lambda c: c.update(decode_size_factors={"8": 2.1}), "8 tokens is 2.1, not .* to 2"),
        (lambda c: c.update(size_factors={"17": 1.0}), "17 tokens: no graph is of this size"),
        (lambda c: c["domain"].update(tokens=[0, 1]), "count 'tokens' is not known"),
        (lambda c: c["domain"].update(num_reqs=[2, 1]), "domain of 'num_reqs' is empty: 2"),
        (lambda c: c["residuals"].update(decode=[1, 1]), "regime 'decode' is not known"),
        (lambda c: c["graphs"].update(sizes=[2, 1]), r"graphs: sizes must be positive and incr"),
        (lambda c: c.update(schema_version=2), "schema_version: Input should be 1"),
        (lambda c: c.pop("measured_on"), "measured_on: Field required"),
        (lambda c: c.update(measured=1), r"not known \(did you mean 'measured_on'\?\)"),
        (lambda c: c.update(gpu="h100"), "measured on gpu 'h100', the configuration has 'h200'"),
    ],
)
def test_what_a_profile_may_not_say(
    load: Callable[..., ProfileCost], change: Change, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(change)


def test_no_file_is_fitted_and_held_out(load: Callable[..., ProfileCost]) -> None:
    def log(name: str) -> dict[str, Any]:
        return {"name": name, "sha256": "ab", "num_steps": 1, "host_scale": 1.0}

    with pytest.raises(ConfigError, match="a file is both fitted and held out: sha256 ab"):
        load(fitted=[log("a")], held_out=[log("b")])


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for content, message in (
        ("{", r"bad\.json:1:1: not JSON"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ("[]", "bad.json"),
        ("\ud800", "cannot read this profile"),
    ):
        bad.write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(ConfigError, match=message):
            load_profile(path=bad)
    with pytest.raises(ConfigError, match="cannot read this profile"):
        load_profile(path="missing.json", base_dir=tmp_path)
    with pytest.raises(ConfigError, match="either name or path"):
        load_profile()
    with pytest.raises(UnknownNameError, match="no profile is called 'x'"):
        load_profile("x")


@pytest.mark.parametrize("name", profile_names())
def test_profiles_that_ship_are_honest_about_their_split(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.model in profile.measured_models
    assert profile.fitted
    assert profile.held_out
    assert not {log.name for log in profile.fitted} & {log.name for log in profile.held_out}
    assert set(profile.errors) == {"blind", "host_known"}
    assert (
        sum(log.num_steps for log in profile.held_out) == profile.errors["blind"]["all"].num_steps
    )
    assert set(profile.coefficients) == set(COEFFICIENTS)


def test_noise_scatters_steps_by_their_number_alone(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load()
    noise = ResidualNoise(model, seed=7)
    run = step(*[(99, 1)] * 4, count=9000)
    at_once = np.array(column(noise.price(run).durations_s, 9000))
    factors = at_once / column(model.price(run).durations_s, 9000)
    assert factors.min() >= 0.5
    assert factors.max() <= 1.5
    assert factors.mean() == pytest.approx(1.0, abs=0.01)
    assert np.quantile(factors, 0.25) == pytest.approx(0.75, abs=0.02)
    for k in (0, 1, 4095, 4096, 8999):
        plan = replace(run.plan, step=k, starts=[99 + k] * 4)
        alone = ResidualNoise(model, seed=7).price(StepRun(plan))
        assert alone.durations_s[0] == at_once[k]
        total = sum(column(part)[0] for part in alone.parts.values())
        assert total == pytest.approx(alone.durations_s[0])
    other = column(ResidualNoise(model, seed=8).price(run).durations_s, 9000)
    assert np.mean(at_once != other) > 0.99


def test_a_noisy_host_keeps_its_speed_for_some_steps(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load(
        residuals={"mixed, up to 512 tokens": [1, 1]},
        host_residuals=[0.5, 1.5],
        host_residual_steps=10,
    )
    run = step(*[(99, 1)] * 4, count=1000)
    noisy, plain = ResidualNoise(model, seed=3).price(run), model.price(run)
    factors = (noisy.parts["inputs_s"] / plain.parts["inputs_s"]).reshape(100, 10)
    assert np.ptp(factors, axis=1).max() == 0
    assert np.ptp(factors) > 0.9
    assert factors.mean() == pytest.approx(1.0, abs=0.1)
    assert column(noisy.parts["linear_s"], 1000) == column(plain.parts["linear_s"], 1000)
    alone = StepRun(replace(run.plan, step=777, starts=[99 + 777] * 4))
    price = ResidualNoise(model, seed=3).price(alone)
    assert price.durations_s[0] == noisy.durations_s[777]


def test_noise_is_drawn_by_regime(
    load: Callable[..., ProfileCost], step: Callable[..., StepRun]
) -> None:
    model = load()
    noise = ResidualNoise(model, seed=0)
    many = step(*[(99, 1)] * 64, count=500)
    factors = np.array(noise.price(many).durations_s) / model.price(many).durations_s
    assert 0.9 <= factors.min() < 0.92
    prefill = step((0, 700))
    assert noise.price(prefill).durations_s == model.price(prefill).durations_s
    with pytest.raises(ConfigError, match="carries no residuals"):
        ResidualNoise(load(residuals={}), seed=0)
