"""Counts that follow from a model's shape alone: parameters, KV elements, bytes per element."""

from __future__ import annotations

from simserve.errors import ConfigError, did_you_mean
from simserve.types import ModelShape

__all__ = [
    "attention_weights",
    "dtype_bytes",
    "expert_weights",
    "head_weights",
    "kv_elements_per_token",
    "matrix_dtype",
    "num_parameters",
    "resolve_kv_dtype",
    "router_weights",
]

_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ConfigError: the dtype is not known.
    """
    try:
        return _BYTES[dtype]
    except KeyError:
        raise ConfigError(
            f"dtype '{dtype}' is not known{did_you_mean(dtype, _BYTES)}; "
            f"there are {', '.join(_BYTES)}"
        ) from None


def matrix_dtype(dtype: str) -> str:
    """The name under which a GPU preset gives the FLOP/s of a dtype."""
    return "float8" if dtype_bytes(dtype) == 1 else dtype


def resolve_kv_dtype(model: ModelShape, kv_cache_dtype: str) -> str:
    """The dtype of the KV cache: `auto` is the model's own."""
    return model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def attention_weights(model: ModelShape) -> int:
    """Elements of the query, key, value and output projections of one layer, without biases."""
    query = model.num_attention_heads * model.head_dim
    key_value = 2 * model.num_key_value_heads * model.head_dim
    return model.hidden_size * (query + key_value) + query * model.hidden_size


def expert_weights(model: ModelShape) -> int:
    """Elements of one gated MLP (gate, up, down): the only one of a layer, or one expert."""
    return 3 * model.hidden_size * model.intermediate_size


def router_weights(model: ModelShape) -> int:
    """Elements of a layer's expert router; 0 for a dense model."""
    return model.hidden_size * model.num_experts if model.num_experts > 1 else 0


def head_weights(model: ModelShape) -> int:
    """Elements of the output head (and of the embedding)."""
    return model.hidden_size * model.vocab_size


def num_parameters(model: ModelShape) -> int:
    """All parameters: matrices, embedding, head, and the norms (two a layer and one at the end).

    Biases and per-head norms, which some models have, are left out (below 0.01 %).
    """
    layer = attention_weights(model) + router_weights(model)
    layer += model.num_experts * expert_weights(model) + 2 * model.hidden_size
    heads = head_weights(model) * (1 if model.tie_word_embeddings else 2)
    return model.num_hidden_layers * layer + heads + model.hidden_size


def kv_elements_per_token(model: ModelShape) -> int:
    """Elements of K and V that one token has, over all layers.

    >>> shape = ModelShape(name="example", num_hidden_layers=32, hidden_size=4096,
    ...     intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    ...     vocab_size=128256, max_position_embeddings=131072)
    >>> kv_elements_per_token(shape) * dtype_bytes("bfloat16") // 1024  # KiB
    128
    """
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
