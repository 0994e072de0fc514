"""Step times from a model's shape and a GPU's data sheet: FLOPs, bytes, launches and the host.

Each part of the work takes the longer of its FLOPs and its bytes, each at a stated fraction of
the data sheet's peak; parts follow one another. No efficiency is above 1, so a step is never
priced below its FLOPs over the peak, nor below its bytes over the bandwidth.
Method: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from simserve.cost.checks import check_fractions, check_not_negative
from simserve.cost.features import Features, extract
from simserve.errors import ConfigError
from simserve.protocols import Price
from simserve.shapes import (
    attention_weights,
    dtype_bytes,
    expert_weights,
    head_weights,
    kv_elements_per_token,
    matrix_dtype,
    resolve_kv_dtype,
    router_weights,
)
from simserve.types import GPU, ModelShape, StepRun

__all__ = ["PARTS", "RooflineCost"]

PARTS = (
    "linear_s",
    "attention_decode_s",
    "attention_prefill_s",
    "lm_head_s",
    "launch_s",
    "host_s",
)
"""Names of the parts, which add up to the duration."""


class RooflineCost:
    """Prices a step as the sum of `PARTS`; docs/cost-models.md has every formula.

    Args:
        model: the model's shape; weights are held in its dtype.
        gpu: the GPU's data sheet.
        kv_cache_dtype: dtype of the KV cache; `auto` is the model's.
        linear_flops_efficiency: fraction of the peak that matrix multiplications reach.
        attention_flops_efficiency: fraction of the peak that prefill attention reaches.
        linear_bandwidth_efficiency: fraction of the bandwidth at which weights are read.
        attention_bandwidth_efficiency: fraction of the bandwidth at which KV is read.
        layer_launch_s: gaps between the kernels of one layer.
        host_step_s: host time of a step that the GPU waits for.
        host_request_s: host time per request of the step.

    Raises:
        ConfigError: a parameter is out of range, or the GPU has no figure for the model's dtype.
    """

    def __init__(
        self,
        model: ModelShape,
        gpu: GPU,
        *,
        kv_cache_dtype: str = "auto",
        linear_flops_efficiency: float = 0.65,
        attention_flops_efficiency: float = 0.55,
        linear_bandwidth_efficiency: float = 0.9,
        attention_bandwidth_efficiency: float = 0.8,
        layer_launch_s: float = 10e-6,
        host_step_s: float = 2e-3,
        host_request_s: float = 20e-6,
    ) -> None:
        check_fractions(
            "roofline",
            {
                "linear_flops_efficiency": linear_flops_efficiency,
                "attention_flops_efficiency": attention_flops_efficiency,
                "linear_bandwidth_efficiency": linear_bandwidth_efficiency,
                "attention_bandwidth_efficiency": attention_bandwidth_efficiency,
            },
        )
        overheads = {
            "layer_launch_s": layer_launch_s,
            "host_step_s": host_step_s,
            "host_request_s": host_request_s,
        }
        check_not_negative("roofline", overheads)
        peak = _peak_flops(model, gpu)
        bandwidth = gpu.bandwidth_bytes_per_s
        self._window = model.sliding_window
        self._num_experts = model.num_experts
        self._num_active_experts = model.num_experts_per_tok
        self._set_linear(
            model, peak * linear_flops_efficiency, bandwidth * linear_bandwidth_efficiency
        )
        self._set_attention(
            model,
            peak * attention_flops_efficiency,
            bandwidth * attention_bandwidth_efficiency,
            dtype_bytes(resolve_kv_dtype(model, kv_cache_dtype)),
        )
        self._launch_s = model.num_hidden_layers * layer_launch_s
        self._host_step_s, self._host_request_s = host_step_s, host_request_s
        self._alike = cache(self._alike_decodes)

    def price(self, run: StepRun) -> Price:
        """Durations and parts of the steps of a run; a step without tokens costs 0."""
        plan, num_reqs = run.plan, len(run.plan.num_tokens)
        alone = 0 < num_reqs == plan.num_tokens.count(1)
        if alone and self._window is None and not plan.draft_tokens:
            return self._price_decodes(num_reqs, num_reqs + sum(plan.starts), run.count)
        features = extract(run, self._window)
        if features.num_tokens == 0:
            return Price([0.0] * run.count, dict.fromkeys(PARTS, 0.0))
        if run.count == 1:
            total, parts = self._columns(features, max)
            return Price([total], parts)
        total, parts = self._columns(features, np.maximum)
        return Price(total.tolist(), parts)

    def _price_decodes(self, num_reqs: int, kv_tokens: int, count: int) -> Price:
        """Steps in which all decode differ in what they attend to, each by a token more.

        `kv_tokens` is what they attend to in the first of them.
        """
        alike, rest = self._alike(num_reqs)
        pair_s, kv_s, queries_s = self._pair_s, self._kv_s, self._query_s * num_reqs
        # Runs are short: a list is made faster than an array.
        decode = [
            max(pair_s * kv, kv_s * kv + queries_s)
            for kv in range(kv_tokens, kv_tokens + num_reqs * count, num_reqs)
        ]
        parts = alike.copy()
        if count == 1:
            parts["attention_decode_s"] = decode[0]
            return Price([decode[0] + rest], parts)
        parts["attention_decode_s"] = np.array(decode)
        return Price([seconds + rest for seconds in decode], parts)

    def _alike_decodes(self, num_reqs: int) -> tuple[dict[str, Any], float]:
        """The parts of steps of so many decodes, and the sum of those in which they are alike."""
        n = num_reqs
        _, parts = self._columns(Features(n, n, n, n, 0, 0, 0, 0, n, n, 0), max)
        rest = parts["linear_s"] + parts["lm_head_s"] + parts["launch_s"] + parts["host_s"]
        return parts, rest

    def _columns(
        self, f: Features, longer: Callable[[Any, Any], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The duration and the parts, by the same operations for numbers and for arrays."""
        tokens, reqs, decodes, decode_kv, prefills, prefill_tokens, pairs, prefill_kv, rows, *_ = f
        experts = min(self._num_experts, self._num_active_experts * tokens)
        linear = max(
            self._linear_flops_s * tokens,
            self._dense_s + self._expert_s * experts + self._activation_s * tokens,
        )
        decode = longer(
            self._pair_s * decode_kv,
            self._kv_s * decode_kv + self._query_s * decodes,
        )
        prefill: Any = 0.0
        if prefills:
            prefill = longer(
                self._pair_s * pairs,
                self._kv_s * prefill_kv + self._query_s * prefill_tokens,
            )
        head = max(self._row_flops_s * rows, self._head_s + self._row_s * rows)
        host = self._host_step_s + self._host_request_s * reqs
        # What may be an array comes last: adding numbers to it one by one would cost more.
        total = decode + (linear + head + self._launch_s + host)
        if prefills:
            total = total + prefill
        return total, {
            "linear_s": linear,
            "attention_decode_s": decode,
            "attention_prefill_s": prefill,
            "lm_head_s": head,
            "launch_s": self._launch_s,
            "host_s": host,
        }

    def _set_linear(self, model: ModelShape, flops_per_s: float, bytes_per_s: float) -> None:
        """Seconds per token, per expert and per step of the matrices of all layers and the head."""
        layers, hidden, width = model.num_hidden_layers, model.hidden_size, dtype_bytes(model.dtype)
        dense = attention_weights(model) + router_weights(model)
        expert = expert_weights(model)
        per_token = dense + model.num_experts_per_tok * expert
        self._linear_flops_s = 2 * layers * per_token / flops_per_s
        self._dense_s = layers * dense * width / bytes_per_s
        self._expert_s = layers * expert * width / bytes_per_s
        self._activation_s = width * _activation_elements(model) / bytes_per_s
        # Logits are written in the model's dtype, then cast to float32 and read by the sampler.
        row_bytes = width * hidden + model.vocab_size * (2 * width + 2 * 4)
        self._row_flops_s = 2 * head_weights(model) / flops_per_s
        self._head_s = head_weights(model) * width / bytes_per_s
        self._row_s = row_bytes / bytes_per_s

    def _set_attention(
        self, model: ModelShape, flops_per_s: float, bytes_per_s: float, kv_width: int
    ) -> None:
        """Seconds per query-key pair, per KV token read and per query, over all layers."""
        query = model.num_hidden_layers * model.num_attention_heads * model.head_dim
        kv_bytes = kv_elements_per_token(model) * kv_width
        # Per pair: a multiply and an add for the score, and the same for the weighted value.
        self._pair_s = 4 * query / flops_per_s
        self._kv_s = kv_bytes / bytes_per_s
        # Per query: it is read, its output is written, and the token's own K and V are written.
        self._query_s = (2 * query * dtype_bytes(model.dtype) + kv_bytes) / bytes_per_s


def _peak_flops(model: ModelShape, gpu: GPU) -> float:
    """The GPU's dense FLOP/s in the model's dtype."""
    dtype = matrix_dtype(model.dtype)
    if dtype not in gpu.flops_per_s:
        raise ConfigError(
            f"GPU '{gpu.name}' has no {dtype} matrix units; it has {', '.join(gpu.flops_per_s)}"
        )
    return gpu.flops_per_s[dtype]


def _activation_elements(model: ModelShape) -> int:
    """Elements that one token reads and writes outside attention, over the whole model.

    Per layer: projections (in and out), two norms with residual add (four rows each), and per
    active expert the gated MLP (input, output, gate and up written and read, product written and
    read); once: the embedding row.
    """
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key_value = 2 * model.num_key_value_heads * model.head_dim
    projections = hidden + (query + key_value) + query + hidden
    mlp = model.num_experts_per_tok * (2 * hidden + 6 * model.intermediate_size)
    return model.num_hidden_layers * (projections + mlp + 8 * hidden) + 2 * hidden
