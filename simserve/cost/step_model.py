"""Step time of a real engine on one GPU: host, kernels and launches, with what is to be measured.

Data-sheet times of a model's shape (bytes over the bandwidth, FLOPs over the peak) are divided by
measured efficiencies, none above 1; so no part is priced below its FLOPs or bytes. What has no
data-sheet time (host, kernel gaps, launches) is measured in seconds. All operations are +, -, *, /
and sqrt, which round alike for numbers and arrays: a run costs bit for bit what its steps cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from simserve.cost.dealing import Dealt
from simserve.cost.step_work import StepWork
from simserve.errors import ConfigError
from simserve.shapes import (
    attention_weights,
    dtype_bytes,
    expert_weights,
    head_weights,
    kv_elements_per_token,
    matrix_dtype,
    router_weights,
)
from simserve.types import GPU, ModelShape

__all__ = [
    "PARTS",
    "Path",
    "Rates",
    "Sheet",
    "blend",
    "larger",
    "rates",
    "sheet",
    "step_parts",
]

Number = Any
"""A float for a single step, a float64 array for several: the same operations serve both."""


class Path(IntEnum):
    """How the kernels of a step are launched."""

    FULL = 0
    """One CUDA graph of the whole model."""
    PIECEWISE = 1
    """CUDA graphs between the attention calls."""
    EAGER = 2
    """Kernel by kernel."""


PARTS = (
    "schedule_s",
    "inputs_s",
    "linear_s",
    "attention_decode_s",
    "attention_prefill_s",
    "lm_head_s",
    "gaps_s",
    "launch_s",
    "update_s",
)
"""Names of the parts, in the order in which they are added up."""


class Sheet(NamedTuple):
    """Data-sheet times of a model's shape on a GPU (s)."""

    num_layers: int
    weights_s: float
    """To read the matrices of all layers once."""
    token_flops_s: float
    """Matrix products of one token, all layers."""
    token_bytes_s: float
    """Activations of one token, all layers."""
    kv_token_s: float
    """To read the KV of one token, all layers."""
    pair_s: float
    """Attention of one query-key pair, all layers."""
    head_weights_s: float
    head_row_flops_s: float
    head_row_bytes_s: float
    """Logits of one row: written, cast to float32 and read by the sampler."""


def sheet(model: ModelShape, gpu: GPU, kv_dtype: str) -> Sheet:
    """Data-sheet times of a dense model; all its experts' weights count as read.

    Raises:
        ConfigError: the GPU has no figure for the model's dtype.
    """
    dtype, width = matrix_dtype(model.dtype), dtype_bytes(model.dtype)
    if dtype not in gpu.flops_per_s:
        raise ConfigError(
            f"GPU '{gpu.name}' has no {dtype} matrix units; it has {', '.join(gpu.flops_per_s)}"
        )
    peak, bandwidth = gpu.flops_per_s[dtype], gpu.bandwidth_bytes_per_s
    layers, hidden = model.num_hidden_layers, model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key_value = 2 * model.num_key_value_heads * model.head_dim
    fixed, expert = attention_weights(model) + router_weights(model), expert_weights(model)
    active, experts = model.num_experts_per_tok, model.num_experts
    # Rows in and out of the matrices, two norms with residual, and the gated product.
    row = 10 * hidden + 2 * query + key_value + active * (2 * hidden + 6 * model.intermediate_size)
    return Sheet(
        num_layers=layers,
        weights_s=layers * (fixed + experts * expert) * width / bandwidth,
        token_flops_s=2 * layers * (fixed + active * expert) / peak,
        token_bytes_s=layers * row * width / bandwidth,
        kv_token_s=kv_elements_per_token(model) * dtype_bytes(kv_dtype) / bandwidth,
        pair_s=4 * layers * query / peak,
        head_weights_s=head_weights(model) * width / bandwidth,
        head_row_flops_s=2 * head_weights(model) / peak,
        head_row_bytes_s=(hidden * width + model.vocab_size * (2 * width + 8)) / bandwidth,
    )


class Rates(NamedTuple):
    """Seconds per unit of work of one model on one GPU: a sheet over measured efficiencies."""

    schedule_step_s: float
    schedule_request_s: float
    schedule_new_request_s: float
    schedule_new_token_s: float
    inputs_step_s: float
    inputs_request_s: float
    inputs_mixed_s: float
    update_step_s: float
    update_request_s: float
    weights_s: float
    token_products_s: float
    linear_blend: float
    cached_tokens: float
    token_activations_s: float
    kv_token_s: float
    kv_imbalance: float
    shared_kv_saved: float
    decode_s: float
    mixed_kv_token_s: float
    mixed_s: float
    merge_s: float
    context_s: float
    round_s: float
    context_blend: float
    overlap_blend: float
    pair_s: float
    head_weights_s: float
    row_products_s: float
    row_s: float
    gaps_s: float
    launch_piecewise_s: float
    launch_eager_s: float
    launch_blend: float


def rates(c: Mapping[str, float], s: Sheet) -> Rates:
    """What every one of `COEFFICIENTS` makes of a model's data-sheet times."""
    bandwidth, flops = c["linear_bandwidth"], c["linear_flops"]
    kv_token_s = s.kv_token_s / c["kv_bandwidth"]
    return Rates(
        schedule_step_s=c["schedule_step_s"],
        schedule_request_s=c["schedule_request_s"],
        schedule_new_request_s=c["schedule_new_request_s"],
        schedule_new_token_s=c["schedule_new_token_s"],
        inputs_step_s=c["inputs_step_s"],
        inputs_request_s=c["inputs_request_s"],
        inputs_mixed_s=c["inputs_mixed_s"],
        update_step_s=c["update_step_s"],
        update_request_s=c["update_request_s"],
        weights_s=s.weights_s / bandwidth,
        token_products_s=s.token_flops_s / flops,
        linear_blend=c["linear_blend"],
        cached_tokens=c["cached_tokens"],
        token_activations_s=s.token_bytes_s / bandwidth,
        kv_token_s=kv_token_s,
        kv_imbalance=c["kv_imbalance"],
        shared_kv_saved=c["shared_kv_saved"],
        decode_s=kv_token_s * c["decode_tokens"],
        mixed_kv_token_s=s.kv_token_s / c["mixed_kv_bandwidth"],
        mixed_s=s.num_layers * c["mixed_layer_s"],
        merge_s=s.num_layers * c["merge_layer_s"],
        context_s=s.num_layers * c["context_layer_s"],
        round_s=s.num_layers * c["round_layer_s"],
        context_blend=c["context_blend"],
        overlap_blend=c["overlap_blend"],
        pair_s=s.pair_s / c["prefill_flops"],
        head_weights_s=s.head_weights_s / bandwidth,
        row_products_s=s.head_row_flops_s / flops,
        row_s=s.head_row_bytes_s / bandwidth,
        gaps_s=s.num_layers * c["kernel_gap_layer_s"],
        launch_piecewise_s=c["launch_step_s"],
        launch_eager_s=c["launch_step_s"] + s.num_layers * c["launch_eager_layer_s"],
        launch_blend=c["launch_blend"],
    )


def step_parts(
    r: Rates, work: StepWork, path: Path, host_scale: Number = 1.0
) -> tuple[Number, ...]:
    """Seconds of `PARTS` for steps of one kernel path, decodes alone or all with prefills.

    Args:
        r: the model's rates.
        work: numbers of one step, or arrays over several.
        path: how their kernels are launched.
        host_scale: factor on all host times; a number, or one a step.
    """
    num_reqs, rows = work.num_reqs, work.num_logits_rows
    schedule = r.schedule_step_s + r.schedule_request_s * num_reqs
    schedule = schedule + r.schedule_new_request_s * work.num_new
    schedule = schedule + r.schedule_new_token_s * work.num_table_tokens
    inputs = r.inputs_step_s + r.inputs_request_s * num_reqs
    update = r.update_step_s + r.update_request_s * num_reqs
    linear = work.size_factor * _linear(r, work.num_padded_tokens)
    decode = _attention_decode(r, work)
    prefill: Number = 0.0
    if work.num_prefills is not None:
        inputs = inputs + r.inputs_mixed_s
        prefill = _attention_prefill(r, work, decode)
    # Logits are written, cast and read by the sampler after the head's one product.
    head = larger(r.row_products_s * rows, r.head_weights_s) + r.row_s * rows
    launch: Number = 0.0
    if path is not Path.FULL:
        gpu = linear + decode + prefill + r.gaps_s
        host = host_scale * (r.launch_eager_s if path is Path.EAGER else r.launch_piecewise_s)
        launch = larger(blend(gpu, host, r.launch_blend) - gpu, 0.0)
    return (
        host_scale * schedule,
        host_scale * inputs,
        linear,
        decode,
        prefill,
        head,
        r.gaps_s,
        launch,
        host_scale * update,
    )


def _linear(r: Rates, tokens: Number) -> Number:
    """Weights are read while their products are computed; activations beyond L2 come on top."""
    products = blend(r.weights_s, r.token_products_s * tokens, r.linear_blend)
    return products + r.token_activations_s * larger(tokens - r.cached_tokens, 0.0)


def _attention_decode(r: Rates, work: StepWork) -> Number:
    """Time to read KV, and more if contexts are unlike.

    Work is dealt out by sequence, so the longest one is waited for. With n contexts of sum S and
    maximum M the surcharge is S (1 - S / (n M)): 0 for equal ones, and increasing in each context.
    Decodes alone split their contexts to fill the GPU, which costs each something. Beside prefills
    they are not split: what one costs at least hides behind the prefills, and KV comes slower.
    """
    if work.dealt is not None:
        return _dealt_decode(r, work, work.dealt)
    evenness = work.decode_kv_tokens / work.decode_kv_bound
    unlike = 1.0 + r.kv_imbalance * (1.0 - evenness)
    tokens = work.decode_kv_tokens * unlike
    if work.num_prefills is not None:
        return r.mixed_kv_token_s * tokens
    return r.kv_token_s * tokens + r.decode_s * work.num_padded_tokens


def _dealt_decode(r: Rates, work: StepWork, dealt: Dealt) -> Number:
    """The same where it is known what the GPU's parts read. Few programs do not fill the memory's
    bandwidth, so it counts in part how long some are idle; and what one part reads alone.
    """
    if work.num_prefills is None:
        read = _from_memory(r, work, work.decode_kv_tokens)
        tokens = read + r.kv_imbalance * dealt.idle_kv_tokens
        return r.kv_token_s * tokens + r.decode_s * dealt.num_chunks + r.merge_s
    tokens = _from_memory(r, work, dealt.whole_kv_tokens)
    busiest_s = _one_by_one(r, work, dealt.busiest_kv_tokens, dealt.busiest_rounds)
    return blend(r.mixed_kv_token_s * tokens, busiest_s, r.context_blend)


def _one_by_one(r: Rates, work: StepWork, tokens: Number, rounds: Number) -> Number:
    """What a part of the GPU takes to read KV, round after round; what the cache has sooner."""
    assert work.dealt is not None
    whole = larger(work.dealt.whole_kv_tokens, 1)
    return (r.context_s * tokens + r.round_s * rounds) * (_from_memory(r, work, whole) / whole)


def _from_memory(r: Rates, work: StepWork, tokens: Number) -> Number:
    """How many tokens take as long from memory as these, of which the cache has some from others.

    Not all that is shared need be among them: a request may share blocks and not be in the step.
    """
    saved = r.shared_kv_saved
    return larger(tokens - saved * work.shared_kv_tokens, (1.0 - saved) * tokens)


def _attention_prefill(r: Rates, work: StepWork, decode: Number) -> Number:
    """Time to read KV and multiply, and what is waited for the longest context beyond that.

    Where nothing splits contexts, one that is longer than the others keeps its part of the GPU
    busy alone. If it begins at once the longer of the two times counts, if it begins last their
    sum: a blend of width 0 to 2.
    """
    if work.dealt is not None:
        # Two launches: tiles begin when what is not cut has left them places.
        taken_s = _one_by_one(r, work, work.dealt.taken_kv_tokens, work.dealt.taken_rounds)
        waited_s = decode - larger(decode - taken_s, 0.0)
        tiles = waited_s + (r.mixed_s + r.pair_s * work.dealt.bound_pairs)
        return blend(decode, tiles, r.overlap_blend) - decode
    prefill = r.kv_token_s * work.prefill_kv_tokens + r.pair_s * work.prefill_pairs
    longest_s = r.context_s * work.longest_kv_tokens
    return r.mixed_s + (blend(decode + prefill, longest_s, r.context_blend) - decode)


def blend(a: Number, b: Number, width: Number) -> Number:
    """The larger of two times, rounded off where they are near: a (1 + width/2) where equal.

    Increasing in both for a width of 0 (no rounding) to 2, and never below the larger.
    """
    difference = a - b
    squares = difference * difference + (width * width) * (a * b)
    return 0.5 * (a + b + (sqrt(squares) if isinstance(squares, float) else np.sqrt(squares)))


def larger(a: Number, b: Number) -> Number:
    """The larger of two numbers, or of two by two."""
    both_numbers = isinstance(a, float | int) and isinstance(b, float | int)
    return max(a, b) if both_numbers else np.maximum(a, b)
