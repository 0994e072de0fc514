"""Greedy tokens of every request are the same under any schedule: those of a full recompute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from simserve.executor.real.decoder_shape import DecoderShape, decoder_shape  # noqa: E402
from simserve.executor.real.weights import load_decoder  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from simserve.types import ModelShape, TraceRequest  # noqa: E402
from tests.executor.decoders import ContiguousAttention  # noqa: E402
from tests.executor.served import Schedule, open_machine, request, serve  # noqa: E402

SYSTEM = ("system", 20)


def tiny(head_dim: int = 8, sliding_window: int | None = None) -> DecoderShape:
    """Two layers, two query heads a KV head, 53 tokens."""
    model = ModelShape(
        name="tiny",
        num_hidden_layers=2,
        hidden_size=24,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=53,
        max_position_embeddings=128,
        sliding_window=sliding_window,
    )
    return decoder_shape(model, {"model_type": "llama", "rope_theta": 100.0}, "tiny")


@cache
def recomputed(shape: DecoderShape, one: TraceRequest, seed: int = 0) -> list[int]:
    """Greedy tokens of a request alone, everything computed again for each of them."""
    decoder = load_decoder(shape, seed=seed, dtype=torch.float64, device="cpu")
    sharpen(decoder)
    ids = tokens(one.prompt, shape.model.vocab_size).tolist()
    for _ in range(one.output_len):
        attention = ContiguousAttention(shape.model.sliding_window)
        last = torch.tensor([len(ids) - 1])
        logits = decoder.forward(
            torch.tensor(ids), torch.arange(len(ids)), attention, logits_rows=last
        )
        ids.append(int(logits.argmax()))
    return ids[one.prompt_len :]


def sharpen(decoder: Any) -> None:
    """Make attention matter: random weights of the usual size hardly look at what came before."""
    for layer in decoder.layers:
        for matrix in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
            matrix.mul_(20.0)


def check(shape: DecoderShape, schedule: Schedule, requests: Sequence[TraceRequest]) -> Any:
    machine = open_machine(shape, schedule)
    sharpen(machine.decoder)
    got, data = serve(machine, schedule, requests)
    assert got == {one.request_id: recomputed(shape, one) for one in requests}
    return data


schedules = st.builds(
    Schedule,
    max_num_batched_tokens=st.integers(4, 64),
    max_num_seqs=st.integers(1, 4),
    threshold=st.sampled_from([0, 0, 1, 3, 7]),
    caching=st.booleans(),
    block_size=st.sampled_from([1, 2, 3, 5, 8, 16]),
    mixed=st.sampled_from(["varlen", "split"]),
    kv_layout=st.sampled_from(["nhd", "packed"]),
    policy=st.sampled_from(["fcfs", "priority"]),
    plans_ahead=st.booleans(),
)


@st.composite
def workloads(draw: Any) -> list[TraceRequest]:
    """Up to five requests, some of which share a prefix; all at once or a little apart.

    No two have one priority: with policy priority they may preempt each other for ever.
    """
    requests = []
    for i in range(draw(st.integers(1, 5))):
        own = (f"own{draw(st.integers(0, 2))}", draw(st.integers(1, 16)))
        prompt = (SYSTEM, own) if draw(st.booleans()) else (own,)
        arrival_s = draw(st.sampled_from([0.0, 0.001, 0.01]))
        output_len, priority = draw(st.integers(1, 10)), 5 * draw(st.integers(0, 2)) + i
        requests.append(request(f"r{i}", arrival_s, prompt, output_len, priority=priority))
    return sorted(requests, key=lambda one: one.arrival_s)


@settings(max_examples=15)
@given(schedule=schedules, requests=workloads(), spare_blocks=st.integers(0, 8))
def test_tokens_do_not_depend_on_the_schedule(
    schedule: Schedule, requests: list[TraceRequest], spare_blocks: int
) -> None:
    longest = max(one.prompt_len + one.output_len for one in requests)
    num_gpu_blocks = -(-longest // schedule.block_size) + 1 + spare_blocks
    budget = max(schedule.max_num_batched_tokens, schedule.max_num_seqs)
    schedule = Schedule(
        **{
            **vars(schedule),
            "num_gpu_blocks": num_gpu_blocks,
            "max_num_batched_tokens": budget,
        }
    )
    check(tiny(), schedule, requests)


REQUESTS = [
    request("a", 0.0, (SYSTEM, ("x", 9)), 12),
    request("b", 0.0, (SYSTEM, ("y", 5)), 12),
    request("c", 0.0, 30, 10),
    request("d", 0.0, (SYSTEM, ("x", 9)), 3),
    request("e", 0.0, 7, 14),
]


def test_chunks_that_mix_with_decodes() -> None:
    schedule = Schedule(max_num_batched_tokens=9, mixed="split", block_size=3)
    data = check(tiny(), schedule, REQUESTS)
    mixed = (data.steps.num_decode_tokens > 0) & (
        data.steps.num_tokens > data.steps.num_decode_tokens
    )
    assert mixed.sum() > 5


def test_decodes_behind_a_prefill_are_moved_to_the_front() -> None:
    check(tiny(), Schedule(threshold=3, mixed="split"), [REQUESTS[2], *REQUESTS[:2], REQUESTS[4]])


def test_prefix_hits() -> None:
    data = check(tiny(), Schedule(max_num_seqs=2, block_size=4), REQUESTS)
    assert data.steps.prefix_cache_hits.sum() >= 16


def test_preemption_with_a_tiny_pool() -> None:
    data = check(tiny(), Schedule(block_size=2, num_gpu_blocks=22), REQUESTS)
    assert data.requests.num_preemptions.sum() > 0


def test_preemption_by_priority() -> None:
    """Others run in a preempted request's place; some plans preempt and run nothing."""
    requests = [
        request(f"r{i}", 0.0, 11 + 3 * i, 8, priority=priority)
        for i, priority in enumerate([3, 0, 2, 1, 0])
    ]
    schedule = Schedule(
        policy="priority", block_size=1, num_gpu_blocks=34, max_num_batched_tokens=8, caching=False
    )
    data = check(tiny(), schedule, requests)
    assert data.requests.num_preemptions.sum() > 3
    assert (data.steps.num_tokens == 0).any()


def test_sliding_window() -> None:
    check(tiny(sliding_window=6), Schedule(block_size=4, max_num_batched_tokens=10), REQUESTS)


def test_dictated_tokens_are_fed() -> None:
    shape = tiny()
    machine = open_machine(shape, Schedule(), replays=True)
    got, _ = serve(machine, Schedule(), REQUESTS[:2])
    for one in REQUESTS[:2]:
        assert got[one.request_id] == tokens(one.output_parts, 53).tolist()
