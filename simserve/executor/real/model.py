"""A Llama-family decoder in plain torch: few large matrix products, and ops between them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F

from simserve.executor.real.decoder_shape import DecoderShape
from simserve.executor.real.ops import Ops

__all__ = ["Attend", "Decoder", "Layer"]


class Attend(Protocol):
    """Attention over everything before a token: the KV cache is the caller's."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Keep the new keys and values, and return each query's softmax-weighted values.

        Args:
            layer: from 0.
            q: `[num_tokens, num_attention_heads, head_dim]`, rotated, not scaled.
            k: `[num_tokens, num_key_value_heads, head_dim]`, rotated.
            v: as k. All three may be strided views; their last dimension is contiguous.

        Returns:
            As q, contiguous.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Parameters of one layer; matrices are `[outputs, inputs]`."""

    input_layernorm: torch.Tensor
    qkv_proj: torch.Tensor
    """Rows of the queries, then of the keys, then of the values."""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: torch.Tensor
    o_bias: torch.Tensor | None
    post_attention_layernorm: torch.Tensor
    gate_up_proj: torch.Tensor
    """Rows of the gate, then of the up projection."""
    gate_up_bias: torch.Tensor | None
    down_proj: torch.Tensor
    down_bias: torch.Tensor | None


class Decoder:
    """The decoder: token ids and positions in, logits out; it holds no state but its parameters.

    `forward` launches on the current stream, never waits for the device and allocates from torch's
    pool alone, so it may be captured in a CUDA graph.

    Args:
        shape: what to compute.
        parameters: by the names of `decoder_parameters`, all of one dtype on one device.
        table: that of `rope_table`, on the same device; its rows limit the positions.
        ops: what computes the steps between the matrix products.
    """

    def __init__(
        self,
        shape: DecoderShape,
        parameters: Mapping[str, torch.Tensor],
        table: torch.Tensor,
        ops: Ops,
    ) -> None:
        self.shape = shape
        self.ops = ops
        self.table = table
        self.embed = parameters["embed"]
        self.norm = parameters["norm"]
        self.head_weight = parameters.get("head", self.embed)
        self.layers = [
            Layer(**{f.name: parameters.get(f"layers.{i}.{f.name}") for f in fields(Layer)})
            for i in range(shape.model.num_hidden_layers)
        ]
        self.dtype: torch.dtype = self.embed.dtype
        self.device: torch.device = self.embed.device
        self.num_bytes = sum(p.numel() * p.element_size() for p in (*parameters.values(), table))
        """Memory of the parameters and the rotary table."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits `[R, vocab_size]` of the wanted tokens, in the parameters' dtype.

        Args:
            token_ids: `[num_tokens]`, int32 or int64.
            positions: `[num_tokens]`, int32 or int64, below the table's rows.
            attend: called once a layer, in order.
            logits_rows: `[R]`, int32 or int64, indices of the wanted tokens; None: all, in order.
        """
        return self.head(self.hidden(token_ids, positions, attend, logits_rows))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `[R, hidden_size]`: the wanted tokens after the last norm. See `forward`."""
        residual = F.embedding(token_ids, self.embed)
        x = residual
        for i, layer in enumerate(self.layers):
            x = self._norm(x, residual, layer.input_layernorm)
            q, k, v = self._queries_keys_values(layer, x, positions)
            x = F.linear(attend(i, q, k, v).flatten(1), layer.o_proj, layer.o_bias)
            x = self._norm(x, residual, layer.post_attention_layernorm)
            x = self.ops.silu_mul(F.linear(x, layer.gate_up_proj, layer.gate_up_bias))
            x = F.linear(x, layer.down_proj, layer.down_bias)
        if logits_rows is not None:
            x, residual = x.index_select(0, logits_rows), residual.index_select(0, logits_rows)
        return self._norm(x, residual, self.norm)

    def first_layer(self) -> Decoder:
        """The decoder as if it had one layer, which launches every kernel that the others do."""
        one = copy(self)
        one.layers = self.layers[:1]
        return one

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of what `hidden` returned."""
        return F.linear(hidden, self.head_weight)

    def _norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of residual += x; the embedding is itself the first residual."""
        if x is residual:
            return self.ops.rms_norm(x, weight, self.shape.rms_norm_eps)
        return self.ops.add_rms_norm(x, residual, weight, self.shape.rms_norm_eps)

    def _queries_keys_values(
        self, layer: Layer, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values: `[num_tokens, heads, head_dim]` each."""
        model, eps = self.shape.model, self.shape.rms_norm_eps
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        fused = F.linear(x, layer.qkv_proj, layer.qkv_bias).unflatten(1, (-1, model.head_dim))
        q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.ops.rms_norm(q, layer.q_norm, eps), self.ops.rms_norm(k, layer.k_norm, eps)
        return *self.ops.rope(q, k, positions, self.table), v
