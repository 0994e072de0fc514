"""Model shapes and GPU data sheets by name, and model shapes from Hugging Face's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simserve.errors import ConfigError, Problem, UnknownNameError, did_you_mean
from simserve.shapes import dtype_bytes
from simserve.types import GPU, ModelShape

if TYPE_CHECKING:
    from simserve.executor.real.decoder_shape import DecoderShape

__all__ = ["gpu_names", "load_decoder_shape", "load_gpu", "load_model", "model_names"]

_DENSE_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_NOT_MODELLED = {
    "kv_lora_rank": "multi-head latent attention has another KV layout",
    "shared_expert_intermediate_size": "shared experts are not modelled",
    "n_shared_experts": "shared experts are not modelled",
    "state_size": "state-space layers are not modelled",
    "linear_num_key_heads": "linear attention is not modelled",
    "quantization_config": "quantised weights are not modelled; without this field all weights "
    "count as of the file's dtype, which may be fp8",
}
_UNGATED_MODELS = ("gpt_neox", "starcoder2", "phi", "nemotron", "persimmon")


def model_names() -> list[str]:
    """Names of the model presets."""
    return _names("models")


def gpu_names() -> list[str]:
    """Names of the GPU presets."""
    return _names("gpus")


def load_gpu(name: str) -> GPU:
    """A GPU preset. Raises UnknownNameError, listing what there is."""
    return GPU(**_preset("gpus", "GPU", name))


def load_model(spec: str | Mapping[str, Any], base_dir: Path | None = None) -> ModelShape:
    """A model's shape: a preset's name, or `{config: path}` of a Hugging Face config.json.

    Args:
        spec: the preset or the path (a file, or a folder that holds config.json).
        base_dir: what a relative path starts from; None: the current folder.

    Raises:
        UnknownNameError: no preset has this name.
        ConfigError: the file cannot be read, lacks a field, or describes what is not modelled.
    """
    return _model(spec, base_dir)[0]


def load_decoder_shape(spec: str | Mapping[str, Any], base_dir: Path | None = None) -> DecoderShape:
    """What the real executor computes for a model given as to `load_model`.

    Raises:
        UnknownNameError: no preset has this name.
        ConfigError: as `load_model`, and for a model that the real executor does not run.
    """
    from simserve.executor.real.decoder_shape import decoder_shape

    return decoder_shape(*_model(spec, base_dir))


def _model(
    spec: str | Mapping[str, Any], base_dir: Path | None
) -> tuple[ModelShape, Mapping[str, Any], str]:
    """The sizes, the keys of a config.json that tell the rest, and what to call their source."""
    if isinstance(spec, str):
        hint = ", or give {config: path/to/config.json}"
        fields = _preset("models", "model", spec, hint)
        decoder = fields.pop("decoder", {})
        return ModelShape(**fields), decoder, f"model preset '{spec}'"
    unknown = [key for key in spec if key != "config"]
    if unknown or not isinstance(spec.get("config"), str):
        raise ConfigError("model: give a preset's name or {config: path/to/config.json}")
    shown = Path(spec["config"])
    if (Path(base_dir or "") / shown).is_dir():
        shown /= "config.json"
    config = _read_json(Path(base_dir or "") / shown, str(shown))
    shape = _from_hugging_face(config, str(shown), shown.parent.name or shown.stem)
    return shape, config, str(shown)


def _names(folder: str) -> list[str]:
    entries = files("simserve.presets").joinpath(folder).iterdir()
    return sorted(e.name.removesuffix(".json") for e in entries if e.name.endswith(".json"))


def _preset(folder: str, what: str, name: str, hint: str = "") -> dict[str, Any]:
    known = _names(folder)
    if name not in known:
        raise UnknownNameError(
            f"no {what} preset is called '{name}'{did_you_mean(name, known)}; "
            f"there are {', '.join(known)}{hint}"
        )
    text = files("simserve.presets").joinpath(folder, f"{name}.json").read_text(encoding="utf-8")
    fields: dict[str, Any] = json.loads(text)
    return fields


def _read_json(file: Path, shown: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        problem = Problem(path="", message=f"not JSON: {error.msg}", file=shown, line=error.lineno)
        raise ConfigError([problem]) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{shown}: cannot read this config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError([Problem(path="", message="not a JSON object", file=shown)])
    if "hidden_size" not in config and isinstance(config.get("text_config"), dict):
        return {**config["text_config"], "dtype": _dtype(config["text_config"]) or _dtype(config)}
    return config


def _dtype(config: Mapping[str, Any]) -> Any:
    """`dtype` (newer files) or `torch_dtype`."""
    return config.get("dtype") or config.get("torch_dtype")


def _from_hugging_face(config: Mapping[str, Any], file: str, name: str) -> ModelShape:
    _refuse_unmodelled(config, file)
    fields = {key: _count(config, key, file) for key in _DENSE_FIELDS}
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    experts = _count(config, _first(config, "num_local_experts", "num_experts"), file, 1)
    if experts > 1 and config.get("moe_intermediate_size") is not None:
        fields["intermediate_size"] = _count(config, "moe_intermediate_size", file)
    active = _count(config, "num_experts_per_tok", file) if experts > 1 else 1
    kv_heads = _count(config, "num_key_value_heads", file, heads)
    if heads % kv_heads:
        raise _problem(file, "num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if active > experts:
        raise _problem(file, "num_experts_per_tok", f"{active} is more than {experts} experts")
    dtype = _dtype(config) or "bfloat16"
    if not isinstance(dtype, str):
        raise _problem(file, "dtype", f"must be a name, not {dtype!r}")
    dtype_bytes(dtype)
    return ModelShape(
        name=name,
        num_key_value_heads=kv_heads,
        head_dim=_count(config, "head_dim", file, hidden // heads),
        tie_word_embeddings=config.get("tie_word_embeddings") is True,
        dtype=dtype,
        num_experts=experts,
        num_experts_per_tok=active,
        sliding_window=_sliding_window(config, file),
        source=file,
        **fields,
    )


def _refuse_unmodelled(config: Mapping[str, Any], file: str) -> None:
    for key, reason in _NOT_MODELLED.items():
        if config.get(key):
            raise _problem(file, key, reason)
    if config.get("model_type") in _UNGATED_MODELS:
        raise _problem(file, "model_type", f"{config['model_type']} has no gated MLP: not modelled")


def _first(config: Mapping[str, Any], *keys: str) -> str:
    """The first of the keys that has a value, else the last."""
    return next((key for key in keys if config.get(key) is not None), keys[-1])


def _count(config: Mapping[str, Any], key: str, file: str, default: int | None = None) -> int:
    """A positive integer field; null is the same as absent."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise _problem(file, key, "this field is missing")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _problem(file, key, f"must be a positive integer, not {value!r}")
    return value


def _sliding_window(config: Mapping[str, Any], file: str) -> int | None:
    """The window if all layers have it. Mixed layers count as full attention, an upper bound."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "sliding_attention" for kind in layer_types):
        return None
    return _count(config, "sliding_window", file)


def _problem(file: str, path: str, message: str) -> ConfigError:
    return ConfigError([Problem(path=path, message=message, file=file)])
