"""The decoder in itself: chunks, wanted rows, ops on kernels, replay of a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from simserve.executor.real.decoder_shape import DecoderShape, decoder_shape  # noqa: E402
from simserve.executor.real.model import Decoder  # noqa: E402
from simserve.executor.real.weights import load_decoder  # noqa: E402
from simserve.types import ModelShape  # noqa: E402
from tests.executor.decoders import FAMILIES, TINY, ContiguousAttention, tiny_config  # noqa: E402


def shape_of(family: str, **sizes: Any) -> DecoderShape:
    config = tiny_config(family, **sizes)
    fields = {k: config[k] for k in TINY if k != "rms_norm_eps"}
    fields["tie_word_embeddings"] = config["tie_word_embeddings"]
    return decoder_shape(ModelShape(name="tiny", **fields), config, "config.json")


def tiny(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    return load_decoder(shape_of(family), dtype=dtype, **{"device": "cpu", **options})


def prompt(num_tokens: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions, in the integers that a batch has."""
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    return (positions * 31 + 7) % TINY["vocab_size"], positions


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_give_the_logits_of_the_whole(family: str) -> None:
    decoder = tiny(family)
    token_ids, positions = prompt(23)
    whole = decoder.forward(token_ids, positions, ContiguousAttention())
    attend = ContiguousAttention()
    parts = [
        decoder.forward(ids, places, attend)
        for ids, places in zip(token_ids.split(9), positions.split(9), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-13)


def test_only_the_wanted_rows_have_logits() -> None:
    decoder = tiny("qwen3")
    token_ids, positions = prompt(11)
    whole = decoder.forward(token_ids, positions, ContiguousAttention())
    rows = torch.tensor([10, 3], dtype=torch.int32)
    some = decoder.forward(token_ids, positions, ContiguousAttention(), rows)
    torch.testing.assert_close(some, whole[[10, 3]], rtol=1e-12, atol=1e-13)


def test_a_position_is_not_its_place_in_the_batch() -> None:
    decoder = tiny("llama")
    token_ids, positions = prompt(11)
    out = decoder.forward(token_ids, positions, ContiguousAttention())
    moved = decoder.forward(token_ids, positions + 40, ContiguousAttention())
    # Rotary attention sees distances alone; the table rounds its angles to float32.
    torch.testing.assert_close(moved, out, rtol=1e-4, atol=1e-6)
    stretched = decoder.forward(token_ids, positions * 3, ContiguousAttention())
    assert not torch.allclose(stretched, out, rtol=1e-2)


def test_positions_reach_as_far_as_asked() -> None:
    assert len(tiny("llama").table) == TINY["max_position_embeddings"]
    assert len(tiny("llama", max_position=1000).table) == 1000


def test_memory_of_the_parameters() -> None:
    untied, tied = shape_of("llama"), shape_of("llama")
    tied = replace(tied, model=replace(tied.model, tie_word_embeddings=True))
    sizes = [
        load_decoder(shape, dtype=torch.bfloat16, device="cpu").num_bytes
        for shape in (untied, tied)
    ]
    assert sizes[0] - sizes[1] == 2 * TINY["vocab_size"] * TINY["hidden_size"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_plain_torch_does(family: str) -> None:
    token_ids, positions = prompt(33, "cuda")
    out, expected = (
        tiny(family, torch.float32, device="cuda", ops=ops).forward(
            token_ids, positions, ContiguousAttention()
        )
        for ops in ("triton", "torch")
    )
    assert float((out - expected).norm() / expected.norm()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["triton", "torch"])
def test_a_captured_forward_replays_with_other_tokens(ops: str) -> None:
    decoder = tiny("qwen3", torch.float32, device="cuda", ops=ops)

    def values_alone(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1) + q * k.mean()

    token_ids, positions = prompt(8, "cuda")
    rows = torch.tensor([7, 2], device="cuda")
    decoder.forward(token_ids, positions, values_alone, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decoder.forward(token_ids, positions, values_alone, rows)
    token_ids.copy_(token_ids.flip(0))
    positions.add_(5)
    graph.replay()
    expected = decoder.forward(token_ids, positions, values_alone, rows)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-7)
