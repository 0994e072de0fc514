"""Random weights are a function of the seed; checkpoints that do not fit say all that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simserve.errors import CapacityError, ConfigError  # noqa: E402
from simserve.executor.real.decoder_shape import DecoderShape  # noqa: E402
from simserve.executor.real.memory import free_host_bytes  # noqa: E402
from simserve.executor.real.model import Decoder  # noqa: E402
from simserve.executor.real.parameters import decoder_parameters  # noqa: E402
from simserve.executor.real.weights import load_decoder, torch_dtype  # noqa: E402
from simserve.types import ModelShape  # noqa: E402


def shape(**sizes: Any) -> DecoderShape:
    tiny = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 500,
        "max_position_embeddings": 32,
    }
    model = ModelShape(name="tiny", **{**tiny, **sizes})
    return DecoderShape(model=model, rms_norm_eps=1e-5, rope_theta=1e4, qkv_bias=True)


def load(**options: Any) -> Decoder:
    defaults = {"shape": shape(), "dtype": torch.float32, "device": "cpu"}
    return load_decoder(**{**defaults, **options})


def test_a_seed_gives_the_same_weights_again_and_another_seed_others() -> None:
    first, again, other = load(seed=3), load(seed=3), load(seed=4)
    assert torch.equal(first.layers[1].gate_up_proj, again.layers[1].gate_up_proj)
    assert not torch.equal(first.layers[1].gate_up_proj, other.layers[1].gate_up_proj)
    assert not torch.equal(first.layers[0].gate_up_proj, first.layers[1].gate_up_proj)
    assert torch.equal(first.embed.bfloat16(), load(seed=3, dtype=torch.bfloat16).embed)


def test_random_weights_are_of_a_sane_size() -> None:
    decoder = load()
    assert torch.equal(decoder.norm, torch.ones(64))
    assert torch.equal(decoder.layers[0].post_attention_layernorm, torch.ones(64))
    for weights in (decoder.embed, decoder.head_weight):
        assert abs(float(weights.mean())) < 0.0004  # 3.5 standard errors of 32,000 draws
        assert float(weights.std()) == pytest.approx(0.02, rel=0.02)
    pair = torch.stack((decoder.embed.flatten(), decoder.head_weight.flatten()))
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02


@pytest.mark.gpu
def test_random_weights_are_the_same_on_every_device() -> None:
    here, there = load(), load(device="cuda")
    assert torch.equal(here.layers[1].qkv_proj, there.layers[1].qkv_proj.cpu())
    assert torch.equal(here.embed, there.embed.cpu())


def test_dtypes_by_name() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ConfigError, match=r"'float61' is .* \(did you mean 'float64'\?\); there"):
        torch_dtype("float61")


def test_weights_that_no_memory_holds() -> None:
    with pytest.raises(CapacityError, match=r"tiny take \d+\.\d GiB, more than cpu has free"):
        load(shape=shape(vocab_size=2**40))


@pytest.mark.parametrize("free_gib", [0.0, 1.0])
def test_weights_are_compared_with_the_memory_there_is(
    monkeypatch: pytest.MonkeyPatch, free_gib: float
) -> None:
    """An operating system promises more than it has, and ends the process that writes to it."""
    free = int(free_gib * 2**30)
    monkeypatch.setattr("simserve.executor.real.weights.free_host_bytes", lambda: free)
    if free_gib:
        load()
        return
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated all the same"))
    with pytest.raises(CapacityError) as error:
        load(shape=shape(vocab_size=2_000_000))
    assert str(error.value) == (
        "the weights of tiny take 1.0 GiB, more than cpu has free (0.0 GiB); "
        "end what else uses its memory, or take a smaller model"
    )


def test_free_memory_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_host_bytes()
    assert free is None or 2**20 < free < 2**50
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "MemFree: 1 kB\nMemAvailable: 7 kB\n")
    assert free_host_bytes() == 7 * 1024
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    assert free_host_bytes() is None


def checkpoint(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A checkpoint of the tiny shape, after `change` has had its way with the tensors."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    sources = [s for parameter in decoder_parameters(shape()) for s in parameter.sources]
    tensors = {source.name: torch.full(source.size, 0.5) for source in sources}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_rows_of_a_fused_matrix_are_its_sources(tmp_path: Path) -> None:
    key = torch.randn(32, 64)
    name = "model.layers.1.self_attn.k_proj.weight"
    layer = load(weights=checkpoint(tmp_path, lambda t: t.update({name: key}))).layers[1]
    assert torch.equal(layer.qkv_proj[64:96], key)
    assert bool((layer.qkv_proj[:64] == 0.5).all())
    assert bool((layer.qkv_proj[96:] == 0.5).all())


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"], tensors["model.layers.0.self_attn.q_proj.bias"]
        tensors["model.norm.weight"] = torch.ones(65)
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    with pytest.raises(ConfigError) as error:
        load(weights=checkpoint(tmp_path, spoil))
    assert str(error.value).endswith(
        f"{tmp_path}: these weights do not fit the model's config: "
        "model.layers.0.self_attn.q_proj.bias is missing; lm_head.weight is missing; "
        "model.norm.weight is [65], not [64]; "
        "model.layers.0.self_attn.o_proj.bias is not a part of this model"
    )


def test_only_floating_point_weights_are_taken(tmp_path: Path) -> None:
    norm, head = "model.norm.weight", "lm_head.weight"
    more = {norm: torch.ones(64, dtype=torch.int32), head: torch.ones(500, 64).bfloat16()}
    with pytest.raises(ConfigError) as error:
        load(weights=checkpoint(tmp_path, lambda tensors: tensors.update(more)))
    assert str(error.value).endswith(
        f"{tmp_path}: these weights do not fit the model's config: "
        f"{norm} in model.safetensors is I32, not one of F64, F32, F16, BF16"
    )


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"; and 18 more$"):
        load(weights=checkpoint(tmp_path, lambda t: (t.clear(), t.update(x=torch.ones(1)))))


def test_a_head_kept_beside_a_tied_embedding_is_ignored(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, lambda tensors: None)
    decoder = load(shape=shape(tie_word_embeddings=True), weights=folder)
    assert decoder.head_weight is decoder.embed


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors here; give a folder"):
        load(weights=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot read these weights: "):
        load(weights=tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json: cannot read the shards' names: KeyError"):
        load(weights=tmp_path)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "absent.safetensors"}}))
    with pytest.raises(ConfigError, match=r"absent\.safetensors: cannot read these weights: "):
        load(weights=tmp_path)
