"""After the warm-up no batch asks for a kernel that is not compiled yet."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():  # before anything imports triton, whose library is decorated then
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from simserve.executor.real import graph_keys  # noqa: E402
from simserve.executor.real.attention import AttentionPath, WithoutRope  # noqa: E402
from simserve.executor.real.batch import EMPTY_BATCH, Batch, build_batch  # noqa: E402
from simserve.executor.real.decoder_shape import DecoderShape  # noqa: E402
from simserve.executor.real.graph_keys import GraphKeys  # noqa: E402
from simserve.executor.real.kernels import triton_kernels  # noqa: E402
from simserve.executor.real.machine import Machine  # noqa: E402
from simserve.executor.real.ops import load_ops  # noqa: E402
from simserve.executor.real.runner import ModelRunner  # noqa: E402
from simserve.executor.real.step_inputs import StepInputs, StepShape  # noqa: E402
from simserve.executor.real.warm_up import Limits, largest_batch, warm_up_batches  # noqa: E402
from tests.executor.launch_keys import recorded_keys  # noqa: E402
from tests.executor.served import Schedule, open_machine  # noqa: E402
from tests.executor.test_real_schedules import tiny  # noqa: E402

NUM_BATCHES = 150


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> DecoderShape:
    """One layer: the others launch the same."""
    small = tiny(head_dim=head_dim)
    model = replace(
        small.model,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
    )
    return replace(small, model=model)


def random_batch(rng: np.random.Generator, limits: Limits, path: AttentionPath) -> Batch:
    """Decodes, drafts, chunks with and without context, few or many of them, in any mixture."""
    num_seqs, budget, longest = limits
    count = int(rng.integers(1, num_seqs + 1)) if rng.random() < 0.8 else 1
    most = rng.choice([1, path.decode_threshold, 20, 40, 80, budget])
    share = rng.random()
    num_tokens = np.where(rng.random(count) < share, 1, rng.integers(1, most + 1, count))
    num_tokens = num_tokens[np.cumsum(num_tokens) <= min(budget, longest)]
    if not len(num_tokens):
        num_tokens = np.array([budget])
    reach = int(longest ** rng.random())
    starts = np.minimum(rng.integers(0, reach, len(num_tokens)), longest - num_tokens)
    logits = np.where(rng.random(len(num_tokens)) < rng.choice([0.5, 1.0]), 1, 0)
    if rng.random() < 0.2:
        num_tokens[:] = rng.integers(1, path.decode_threshold + 1)
        starts, logits = np.minimum(starts, longest - num_tokens), num_tokens
    rows = rng.permutation(num_seqs)[: len(num_tokens)]
    first = path.decode_threshold if path.reorders else 0
    return build_batch(rows, starts, num_tokens, logits, decodes_first=first)


class OnOneMachine:
    """Runs batches as on a GPU, where a step that has a graph launches nothing."""

    def __init__(self, machine: Machine, limits: Limits, path: AttentionPath) -> None:
        self.limits, self.path = limits, path
        self.keys = GraphKeys(
            limits.max_num_seqs, limits.max_num_batched_tokens, machine.rows.longest, path
        )
        self._machine = machine
        self._captured: set[StepShape] = set()

    def warm_up(self) -> None:
        for batch in warm_up_batches(self.limits, self.path):
            self._machine.runner.run(batch)
        for key in self.keys.beforehand():
            self.capture(key)

    def run(self, batch: Batch) -> None:
        key = self.keys.of(batch)
        if key is None:
            self._machine.runner.run(batch)
        elif key not in self._captured:
            self.capture(key)

    def capture(self, key: StepShape) -> None:
        """Launch what would be captured."""
        rows, step, inputs = self._machine.rows, self._machine.forward, StepInputs(key)
        memory = torch.zeros(inputs.size, dtype=torch.int64)
        inputs.write(memory.numpy(), EMPTY_BATCH, rows)
        step.logits(*inputs.read(memory, rows), None)
        self._captured.add(key)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not launched here")
def test_one_layer_launches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a warm-up needs no more of them."""
    machine = open_machine(
        tiny(64), Schedule(), dtype="bfloat16", replays=True, kernels=triton_kernels()
    )
    machine.decoder.ops = WithoutRope(load_ops("triton"))
    found: list[set[str]] = []
    for step in (machine.forward, machine.forward.first_layer()):
        with machine.rows.in_block_0(), recorded_keys(monkeypatch) as keys:
            ModelRunner(step, None, breakdown=False).run(largest_batch(Limits(4, 30, 64)))
        found.append(keys)
    assert found[0] == found[1]
    assert len(found[0]) > 3


CASES: dict[str, tuple[Any, tuple[int, int, int], Limits]] = {
    "auto varlen": (("auto", "nhd", "varlen"), (8, 2, 128), Limits(70, 300, 9000)),
    "auto split": (("auto", "nhd", "split"), (6, 2, 64), Limits(40, 300, 5000)),
    "auto packed drafts": (("auto", "packed", "varlen", 3), (4, 4, 64), Limits(20, 300, 600)),
    "split drafts": (("auto", "nhd", "split", 2), (7, 1, 128), Limits(20, 100, 300)),
    "v1": (("v1", "nhd", "varlen"), (2, 1, 64), Limits(9, 100, 5000)),
    "v2 split": (("v2", "packed", "split"), (3, 1, 80), Limits(13, 300, 9001)),
    "article": (("article", "packed", "varlen"), (32, 8, 64), Limits(20, 290, 9000)),
    "one by one": (("auto", "nhd", "varlen"), (2, 2, 64), Limits(1, 40, 90)),
}


SOME_WITHOUT_GRAPH = {"auto varlen", "auto packed drafts", "article"}
"""Cases in which the largest mixed batches have no graph, while smaller ones of their kind have."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted on a GPU")
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "bfloat16") for case in CASES), ("auto varlen", "float32")]
)
def test_no_kernel_is_new_after_the_warm_up(
    case: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, heads, limits = CASES[case]
    path = AttentionPath(*names)
    schedule = Schedule(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_gpu_blocks=2,
    )
    machine = open_machine(
        shape(*heads), schedule, path=path, dtype=dtype, replays=True, kernels=triton_kernels()
    )
    machine.decoder.ops = WithoutRope(load_ops("triton"))
    if case in SOME_WITHOUT_GRAPH:
        monkeypatch.setattr(graph_keys, "MAX_MIXED_TOKENS", 230)
    on = OnOneMachine(machine, limits, path)
    rng = np.random.default_rng(0)
    with machine.rows.in_block_0(), recorded_keys(monkeypatch) as keys:
        on.warm_up()
        warm = set(keys)
        for _ in range(NUM_BATCHES):
            on.run(random_batch(rng, limits, path))
    assert {key.split(":")[0] for key in warm} >= {"_rms_norm_kernel", "attention_kernel"}
    assert not sorted(keys - warm)
