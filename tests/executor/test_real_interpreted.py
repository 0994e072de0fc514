"""The whole executor on the Triton kernels, interpreted on the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():  # before anything imports triton, whose library is decorated then
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from simserve.executor.real.attention import WithoutRope  # noqa: E402
from simserve.executor.real.kernels import triton_kernels  # noqa: E402
from simserve.executor.real.ops import load_ops  # noqa: E402
from tests.executor.served import Schedule, open_machine, request, serve  # noqa: E402
from tests.executor.test_real_schedules import recomputed, sharpen, tiny  # noqa: E402
from tests.interpreter import hasten  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)

REQUESTS = [request("a", 0.0, (("system", 4), ("x", 3)), 2), request("b", 0.0, 3, 3)]


@pytest.mark.parametrize(
    "paths",
    [
        {"mixed": "split", "attention": "auto", "kv_layout": "nhd"},
        {"mixed": "varlen", "attention": "article", "kv_layout": "packed"},
    ],
    ids=lambda paths: " ".join(paths.values()),
)
def test_tokens_are_those_of_a_full_recompute(paths: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU's own tests do more")
    hasten()
    shape = tiny(head_dim=64)
    shape = replace(shape, model=replace(shape.model, num_hidden_layers=1))
    schedule = Schedule(max_num_batched_tokens=6, block_size=4, num_gpu_blocks=8, **paths)
    machine = open_machine(shape, schedule, dtype="float32", kernels=triton_kernels())
    machine.decoder.ops = WithoutRope(load_ops("triton"))
    sharpen(machine.decoder)
    got, _ = serve(machine, schedule, REQUESTS)
    assert got == {one.request_id: recomputed(shape, one) for one in REQUESTS}
