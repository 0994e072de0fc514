from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simserve.config.presets import gpu_names, load_gpu, load_model, model_names
from simserve.errors import ConfigError, UnknownNameError

MIXTRAL: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}


def imported(folder: Path, **changes: Any) -> Any:
    """The shape of Mixtral's config.json with some fields changed; ... removes one."""
    config = {k: v for k, v in {**MIXTRAL, **changes}.items() if v is not ...}
    (folder / "my-model").mkdir(exist_ok=True)
    (folder / "my-model" / "config.json").write_text(json.dumps(config))
    return load_model({"config": "my-model/config.json"}, folder)


@pytest.mark.parametrize("name", model_names())
def test_model_presets_hang_together(name: str) -> None:
    shape = load_model(name)
    assert shape.name == name
    assert shape.source.startswith("config.json of ")
    assert shape.num_attention_heads % shape.num_key_value_heads == 0
    assert shape.head_dim in (64, 128)
    assert shape.num_experts_per_tok <= shape.num_experts


@pytest.mark.parametrize("name", gpu_names())
def test_gpu_presets_hang_together(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    assert "data sheet" in gpu.source or "whitepaper" in gpu.source
    assert gpu.flops_per_s["bfloat16"] == gpu.flops_per_s["float16"] > gpu.flops_per_s["float32"]
    # A unit slip of 1000 in either would leave this range of FLOPs per byte.
    assert 100 < gpu.flops_per_s["bfloat16"] / gpu.bandwidth_bytes_per_s < 500
    assert 20 < gpu.memory_gib < 200


def test_the_asked_for_presets_are_there() -> None:
    assert set(gpu_names()) == {"a100", "h100", "h200", "l40s", "mi300x", "rtx4090"}
    assert load_model("mistral-7b-v0.1").sliding_window == 4096
    assert load_model("llama-3.2-1b").tie_word_embeddings


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"'llama-3\.1-8' \(did you mean 'llama-3\.1-8b'"):
        load_model("llama-3.1-8")
    with pytest.raises(
        UnknownNameError, match=r"'h20' \(did you mean 'h200'\?\); there are a100, "
    ):
        load_gpu("h20")


def test_a_config_json_gives_the_presets_shape(tmp_path: Path) -> None:
    shape, preset = imported(tmp_path), load_model("mixtral-8x7b")
    for field in (
        "num_hidden_layers",
        "intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "dtype",
        "sliding_window",
    ):
        assert getattr(shape, field) == getattr(preset, field), field
    assert (shape.name, shape.source) == ("my-model", "my-model/config.json")
    assert load_model({"config": "my-model"}, tmp_path) == shape
    assert load_model({"config": str(tmp_path / "my-model")}).num_experts == 8


def test_fields_that_may_be_absent(tmp_path: Path) -> None:
    assert imported(tmp_path, num_key_value_heads=None).num_key_value_heads == 32
    assert imported(tmp_path, head_dim=256).head_dim == 256
    assert imported(tmp_path, head_dim=None).head_dim == 128
    assert imported(tmp_path, torch_dtype=..., dtype="float16").dtype == "float16"
    assert imported(tmp_path, torch_dtype=...).dtype == "bfloat16"
    dense = imported(tmp_path, num_local_experts=..., num_experts_per_tok=...)
    assert (dense.num_experts, dense.num_experts_per_tok) == (1, 1)
    qwen = imported(tmp_path, num_local_experts=..., num_experts=128, moe_intermediate_size=768)
    assert (qwen.num_experts, qwen.intermediate_size) == (128, 768)


def test_sliding_windows(tmp_path: Path) -> None:
    full, window = "full_attention", "sliding_attention"
    assert imported(tmp_path, sliding_window=4096).sliding_window == 4096
    assert imported(tmp_path, sliding_window=9, use_sliding_window=False).sliding_window is None
    assert imported(tmp_path, sliding_window=9, layer_types=[window] * 2).sliding_window == 9
    assert imported(tmp_path, sliding_window=9, layer_types=[window, full]).sliding_window is None


def test_the_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    text = {**MIXTRAL, "torch_dtype": None}
    (tmp_path / "c.json").write_text(json.dumps({"text_config": text, "torch_dtype": "float16"}))
    shape = load_model({"config": "c.json"}, tmp_path)
    assert (shape.name, shape.hidden_size, shape.dtype) == ("c", 4096, "float16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "my-model/config.json: hidden_size: this field is missing"),
        ({"intermediate_size": None}, "intermediate_size: this field is missing"),
        ({"num_experts_per_tok": ...}, "num_experts_per_tok: this field is missing"),
        ({"vocab_size": "32000"}, "vocab_size: must be a positive integer, not '32000'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a positive integer, not 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights are not"),
        ({"num_hidden_layers": True}, "num_hidden_layers: must be a positive integer, not True"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide 32 heads"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than 8 experts"),
        ({"torch_dtype": 16}, "dtype: must be a name, not 16"),
        ({"torch_dtype": "bfloat61"}, r"dtype 'bfloat61' is not known \(did you mean 'bfloat16'"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: multi-head latent attention"),
        ({"model_type": "gpt_neox"}, "model_type: gpt_neox has no gated MLP"),
    ],
)
def test_what_cannot_be_imported_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, **changes)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_files_that_are_no_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.json"):
        load_model({"config": "c.json"}, tmp_path)


def test_models_are_named_or_imported_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json: cannot read"):
        load_model({"config": "missing.json"}, tmp_path)
    for spec in ({}, {"config": 3}, {"config": "a", "dtype": "fp8"}):
        with pytest.raises(ConfigError, match="a preset's name or"):
            load_model(spec)
