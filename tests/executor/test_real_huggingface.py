"""The decoder's logits are those of Hugging Face's models with the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors", reason="weights from files need '.[test-torch]'")
if find_spec("transformers") is None:  # slow to import: left to the worker that needs it
    pytest.skip("the models need '.[test-torch]'", allow_module_level=True)

from simserve.config.presets import load_decoder_shape  # noqa: E402
from simserve.executor.real.batch import build_batch  # noqa: E402
from simserve.executor.real.rotary import inverse_frequencies  # noqa: E402
from simserve.executor.real.weights import load_decoder  # noqa: E402
from tests.executor.decoders import FAMILIES, TINY, ContiguousAttention, tiny_config  # noqa: E402
from tests.executor.served import Schedule, open_machine  # noqa: E402

NUM_TOKENS = 60


def save_model(folder: Path, config: dict[str, Any], std: float = 0.08) -> None:
    """A model of transformers, every parameter drawn at random, and its config.json."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder)


def load_model(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.to(device).eval()


def random_prompt(device: str) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], (NUM_TOKENS,)).to(device)


def hugging_face_logits(
    folder: Path, token_ids: torch.Tensor, weights: torch.dtype, computed: torch.dtype
) -> torch.Tensor:
    """Logits of the saved model, its weights rounded to one dtype, computed in another."""
    rounded = load_model(folder, weights).state_dict()
    model = load_model(folder, computed, str(token_ids.device))
    model.load_state_dict(rounded)
    with torch.no_grad():
        logits: torch.Tensor = model(token_ids[None]).logits[0]
    return logits


def our_logits(folder: Path, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shape = load_decoder_shape({"config": str(folder)})
    decoder = load_decoder(shape, weights=folder, dtype=dtype, device=token_ids.device)
    positions = torch.arange(NUM_TOKENS, device=token_ids.device)
    attend = ContiguousAttention(shape.model.sliding_window)
    return decoder.forward(token_ids, positions, attend)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float32(family: str, device: str, tmp_path: Path) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    save_model(tmp_path, tiny_config(family))
    token_ids = random_prompt(device)
    expected = hugging_face_logits(tmp_path, token_ids, torch.float32, torch.float32)
    assert relative_error(our_logits(tmp_path, token_ids, torch.float32), expected) <= 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bfloat16(family: str, device: str, tmp_path: Path) -> None:
    """Held against the same weights in float32, which transformers' own bfloat16 misses as well."""
    save_model(tmp_path, tiny_config(family, num_hidden_layers=2), std=0.04)
    token_ids = random_prompt(device)
    exact, theirs = (
        hugging_face_logits(tmp_path, token_ids, torch.bfloat16, computed)
        for computed in (torch.float32, torch.bfloat16)
    )
    error = relative_error(our_logits(tmp_path, token_ids, torch.bfloat16), exact)
    assert error <= 1e-2
    assert error <= 1.2 * relative_error(theirs, exact)


def paged_logits(folder: Path, token_ids: torch.Tensor, dtype: str) -> torch.Tensor:
    """Logits of all tokens: most of them computed in a prefill, the last in decodes."""
    schedule = Schedule(max_num_batched_tokens=NUM_TOKENS, max_num_seqs=2)
    shape = load_decoder_shape({"config": str(folder)})
    machine = open_machine(shape, schedule, device="cuda", dtype=dtype, weights=folder)
    blocks = [5, 2, 9, 4]
    machine.rows.admit({"one": blocks}, [token_ids.cpu().numpy().astype(np.int32)])
    machine.rows.send()
    row, parts = machine.rows.of["one"], []
    for start, count in [(0, NUM_TOKENS - 3), *((NUM_TOKENS - i, 1) for i in (3, 2, 1))]:
        inputs, batch = machine.runner._send(build_batch([row], [start], [count], [count]))
        parts.append(machine.forward.logits(inputs, batch, None))
    return torch.cat(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_over_the_paged_cache(family: str, tmp_path: Path) -> None:
    """The whole of it: Triton kernels, block table, slots."""
    save_model(tmp_path, tiny_config(family, num_hidden_layers=2, head_dim=64), std=0.04)
    token_ids = random_prompt("cuda")
    for name, limit in (("float32", 1e-5), ("bfloat16", 1e-2)):
        weights = getattr(torch, name)
        expected = hugging_face_logits(tmp_path, token_ids, weights, torch.float32)
        assert relative_error(paged_logits(tmp_path, token_ids, name), expected) <= limit


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotary_frequencies(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, tiny_config(family))
    model = load_model(tmp_path, torch.float32)
    ours = inverse_frequencies(load_decoder_shape({"config": str(tmp_path)}))
    torch.testing.assert_close(ours, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_weights_in_shards(tmp_path: Path) -> None:
    save_model(tmp_path / "whole", tiny_config("llama"))
    load_model(tmp_path / "whole", torch.float32).save_pretrained(
        tmp_path / "shards", max_shard_size="40KB"
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shape = load_decoder_shape({"config": str(tmp_path / "whole")})
    whole, shards = (
        load_decoder(shape, weights=tmp_path / part, dtype=torch.float32, device="cpu")
        for part in ("whole", "shards")
    )
    assert torch.equal(whole.layers[2].qkv_proj, shards.layers[2].qkv_proj)
    assert torch.equal(whole.head_weight, shards.head_weight)
