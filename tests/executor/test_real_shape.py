"""What a decoder computes, as read from presets and config.json files; torch is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simserve.config.presets import load_decoder_shape, load_model, model_names
from simserve.errors import ConfigError
from simserve.executor.real.decoder_shape import DecoderShape, Llama3Scaling
from tests.executor.decoders import tiny_config


def read(folder: Path, family: str = "llama", **changes: Any) -> DecoderShape:
    """The shape of a tiny config.json with some fields changed; ... removes one."""
    config = {k: v for k, v in tiny_config(family, **changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return load_decoder_shape({"config": "config.json"}, folder)


@pytest.mark.parametrize("name", model_names())
def test_every_dense_preset_can_be_run(name: str) -> None:
    model = load_model(name)
    if model.num_experts > 1:
        with pytest.raises(ConfigError, match=f"{name} is a mixture of experts; the real executor"):
            load_decoder_shape(name)
        return
    shape = load_decoder_shape(name)
    assert shape.model == model
    assert shape.rms_norm_eps == (1e-6 if name.startswith("qwen") else 1e-5)
    assert (shape.rope_scaling is not None) == name.startswith("llama-3.")
    assert shape.qk_norm == name.startswith("qwen3")
    assert shape.qkv_bias == name.startswith("qwen2")
    assert not shape.o_bias
    assert not shape.mlp_bias


def test_presets_of_llama_3() -> None:
    assert load_decoder_shape("llama-3.1-70b").rope_scaling == Llama3Scaling(8, 1, 4, 8192)
    assert load_decoder_shape("llama-3.2-1b").rope_scaling == Llama3Scaling(32, 1, 4, 8192)
    assert load_decoder_shape("llama-3-8b").rope_theta == 500_000


def test_older_and_newer_files_say_the_same(tmp_path: Path) -> None:
    older = read(tmp_path)
    scaling = tiny_config("llama")["rope_scaling"]
    rope = {"rope_parameters": {"rope_theta": 500.0, **scaling}}
    newer = read(tmp_path, rope_theta=..., rope_scaling=..., **rope)
    assert older.rope_scaling is not None
    assert older == newer
    scaling["type"] = scaling.pop("rope_type")
    assert read(tmp_path, rope_scaling=scaling) == older


def test_absent_fields_have_the_defaults_of_hugging_face(tmp_path: Path) -> None:
    shape = read(tmp_path, rope_theta=..., rope_scaling=None, rms_norm_eps=..., head_dim=...)
    assert (shape.rope_theta, shape.rope_scaling, shape.rms_norm_eps) == (10_000, None, 1e-6)
    assert shape.model.head_dim == 8  # 48 hidden, 6 heads


def test_biases_by_family(tmp_path: Path) -> None:
    flags = {"attention_bias": True, "mlp_bias": True}
    found = {}
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        shape = read(tmp_path, family, **flags)
        found[family] = (shape.qkv_bias, shape.o_bias, shape.mlp_bias)
    assert found == {
        "llama": (True, True, True),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (True, True, False),
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma3"}, "model_type: 'gemma3' is not supported; the real executor runs"),
        ({"model_type": ...}, "model_type: None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; only silu is"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling: rope_type 'yarn' is not supported; 'default' and 'llama3' are",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor: this field is missing"),
        ({"rope_scaling": "llama3"}, "rope_scaling: must be an object, not 'llama3'"),
        ({"rope_theta": -1}, "rope_theta: must be a positive number, not -1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: must be a positive number, not '1e-5'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only whole heads are rotated"),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window: layers with and without a sliding window are not supported",
        ),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, "num_experts: .* dense models only"),
    ],
)
def test_what_is_not_computed_is_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: {sentence}"):
        read(tmp_path, **changes)
