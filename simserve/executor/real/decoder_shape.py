"""What a Llama-family decoder is beyond its sizes: norms, rotary embedding, biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from simserve.errors import ConfigError, Problem
from simserve.types import ModelShape

__all__ = ["DecoderShape", "Llama3Scaling", "decoder_shape"]

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class Llama3Scaling(NamedTuple):
    """Llama 3.1's stretch of the slow rotary frequencies, named as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """All that decides a decoder's arithmetic; the sizes are in `model`."""

    model: ModelShape
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    qkv_bias: bool = False
    """Biases of the query, key and value projections."""
    o_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Biases of the gate, up and down projections."""
    qk_norm: bool = False
    """RMSNorm of every query and key head, before the rotary embedding."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence; empty: the model names none."""


def decoder_shape(model: ModelShape, config: Mapping[str, Any], file: str) -> DecoderShape:
    """Read the decoder's facts from the keys of a Hugging Face config.json.

    A key that is absent has the default of Hugging Face's classes.

    Args:
        model: the sizes, as read from the same file.
        config: the file's content, or the same keys of a preset.
        file: what errors call it.

    Raises:
        ConfigError: it describes what this decoder does not compute.
    """
    kind = _model_type(model, config, file)
    _refuse_unsupported(config, kind, file)
    theta, scaling = _rope(config, file)
    attention_bias = kind in ("llama", "qwen3") and config.get("attention_bias") is True
    return DecoderShape(
        model=model,
        rms_norm_eps=_number(config, "rms_norm_eps", file, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and config.get("mlp_bias") is True,
        qk_norm=kind == "qwen3",
        eos_token_ids=_eos_token_ids(config, file),
    )


def _model_type(model: ModelShape, config: Mapping[str, Any], file: str) -> str:
    if model.num_experts > 1:
        message = f"{model.name} is a mixture of experts; the real executor runs dense models only"
        raise _problem(file, "num_experts", message)
    kind = config.get("model_type")
    if kind not in _MODEL_TYPES:
        message = f"{kind!r} is not supported; the real executor runs {', '.join(_MODEL_TYPES)}"
        raise _problem(file, "model_type", message)
    return str(kind)


def _refuse_unsupported(config: Mapping[str, Any], kind: str, file: str) -> None:
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise _problem(file, "hidden_act", f"{act!r} is not supported; only silu is")
    if kind.startswith("qwen") and config.get("use_sliding_window") is True:
        message = "layers with and without a sliding window are not supported; set it to false"
        raise _problem(file, "use_sliding_window", message)
    if config.get("partial_rotary_factor", 1) != 1:
        raise _problem(file, "partial_rotary_factor", "only whole heads are rotated: it must be 1")


def _eos_token_ids(config: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """One id, a list of them, or none."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(one) is not int or one < 0 for one in ids):
        raise _problem(file, "eos_token_id", f"must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _rope(config: Mapping[str, Any], file: str) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise _problem(file, key, f"must be an object, not {rope!r}")
    theta = _number({**config, **rope}, "rope_theta", file, 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        message = f"rope_type {kind!r} is not supported; 'default' and 'llama3' are"
        raise _problem(file, key, message)
    fields = (_number(rope, field, file) for field in Llama3Scaling._fields)
    return theta, Llama3Scaling(*fields)


def _number(config: Mapping[str, Any], key: str, file: str, default: float | None = None) -> float:
    """A positive number; null is the same as absent."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _problem(file, key, "this field is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _problem(file, key, f"must be a positive number, not {value!r}")
    return float(value)


def _problem(file: str, path: str, message: str) -> ConfigError:
    return ConfigError([Problem(path=path, message=message, file=file)])
