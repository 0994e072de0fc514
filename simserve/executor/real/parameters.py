"""Which tensors a decoder holds, and which tensors of a checkpoint each is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from simserve.executor.real.decoder_shape import DecoderShape

__all__ = ["Parameter", "Source", "decoder_parameters"]


class Source(NamedTuple):
    """A tensor of a checkpoint, by Hugging Face's name."""

    name: str
    size: tuple[int, ...]


class Parameter(NamedTuple):
    """A tensor of the decoder: its sources, one below the other."""

    name: str
    sources: tuple[Source, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Rows of all sources, columns of one."""
        return (sum(source.size[0] for source in self.sources), *self.sources[0].size[1:])

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each source: views of the decoder's tensor."""
        rows = [source.size[0] for source in self.sources]
        return tuple(tensor.split(rows))


def decoder_parameters(shape: DecoderShape) -> Iterator[Parameter]:
    """Yield `embed`, `layers.<i>.<name>` of each layer, `norm`, and `head` where it is not tied."""
    model = shape.model
    table = (model.vocab_size, model.hidden_size)
    yield Parameter("embed", (Source("model.embed_tokens.weight", table),))
    for i in range(model.num_hidden_layers):
        for name, sources in _layer(shape, f"model.layers.{i}."):
            yield Parameter(f"layers.{i}.{name}", sources)
    yield _norm("norm", "model.", model.hidden_size)
    if not model.tie_word_embeddings:
        yield Parameter("head", (Source("lm_head.weight", table),))


def _layer(shape: DecoderShape, prefix: str) -> Iterator[Parameter]:
    model = shape.model
    hidden, mlp = model.hidden_size, model.intermediate_size
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    attention, dense = prefix + "self_attn.", prefix + "mlp."
    rows = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    yield _norm("input_layernorm", prefix, hidden)
    yield from _linear("qkv", attention, rows, hidden, shape.qkv_bias)
    if shape.qk_norm:
        yield _norm("q_norm", attention, model.head_dim)
        yield _norm("k_norm", attention, model.head_dim)
    yield from _linear("o", attention, {"o_proj": hidden}, query, shape.o_bias)
    yield _norm("post_attention_layernorm", prefix, hidden)
    yield from _linear("gate_up", dense, {"gate_proj": mlp, "up_proj": mlp}, hidden, shape.mlp_bias)
    yield from _linear("down", dense, {"down_proj": hidden}, mlp, shape.mlp_bias)


def _norm(name: str, prefix: str, size: int) -> Parameter:
    return Parameter(name, (Source(f"{prefix}{name}.weight", (size,)),))


def _linear(
    name: str, prefix: str, rows: dict[str, int], columns: int, bias: bool
) -> Iterator[Parameter]:
    weights = (Source(f"{prefix}{part}.weight", (size, columns)) for part, size in rows.items())
    yield Parameter(f"{name}_proj", tuple(weights))
    if bias:
        biases = (Source(f"{prefix}{part}.bias", (size,)) for part, size in rows.items())
        yield Parameter(f"{name}_bias", tuple(biases))
