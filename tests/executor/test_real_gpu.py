"""On a GPU, with the Triton kernels: the tokens are those of the CPU and of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")

from simserve.config.build_workload import build_workload  # noqa: E402
from simserve.config.loader import load_config  # noqa: E402
from simserve.config.presets import load_decoder_shape  # noqa: E402
from simserve.segments import tokens  # noqa: E402
from simserve.types import TraceRequest  # noqa: E402
from tests.executor.served import Schedule, open_machine, serve  # noqa: E402
from tests.executor.test_real_schedules import (  # noqa: E402
    REQUESTS,
    recomputed,
    sharpen,
    tiny,
)

pytestmark = pytest.mark.gpu

SHAPE = tiny(head_dim=64)
SCHEDULES = {
    "chunks": Schedule(max_num_batched_tokens=9, caching=False),
    "chunks, split": Schedule(max_num_batched_tokens=9, mixed="split"),
    "hits": Schedule(max_num_seqs=2, block_size=4),
    "preemption, blocks of 1": Schedule(block_size=1, num_gpu_blocks=43),
    "packed": Schedule(max_num_batched_tokens=9, kv_layout="packed"),
    "v1": Schedule(attention="v1"),
    "v2, packed, split": Schedule(
        attention="v2", kv_layout="packed", mixed="split", max_num_batched_tokens=9
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_are_those_of_a_full_recompute(name: str) -> None:
    schedule = SCHEDULES[name]
    machine = open_machine(SHAPE, schedule, device="cuda", dtype="float32", breakdown=True)
    sharpen(machine.decoder)
    got, data = serve(machine, schedule, REQUESTS)
    assert got == {one.request_id: recomputed(SHAPE, one) for one in REQUESTS}
    assert bool(data.requests.num_preemptions.sum()) == name.startswith("preemption")
    parts = data.steps.parts
    assert not parts["first_shape"].any(), "the warm-up compiles and captures everything"
    spent = parts["linear_s"] + parts["kv_write_s"] + parts["attention_s"] + parts["head_s"]
    assert spent == pytest.approx(parts["forward_s"])
    assert min(parts["attention_s"].min(), parts["linear_s"].min()) > 0


def quickstart(repo_root: Path, num_requests: int) -> list[TraceRequest]:
    """The first requests of the quick start; its long documents are left out."""
    config = yaml.safe_load((repo_root / "configs" / "quickstart.yaml").read_text())
    synthetic = config["workload"]["synthetic"]
    synthetic["num_requests"] = num_requests
    synthetic["classes"] = [one for one in synthetic["classes"] if one["name"] == "chat"]
    source = build_workload(load_config(config), seed=0).source
    return [source.take() for _ in range(num_requests)]


def test_tokens_of_the_quick_start_are_those_of_generate(repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.08,
        eos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM(config).cuda().eval()
    model.save_pretrained(tmp_path)
    requests = quickstart(repo_root, 10)
    schedule = Schedule(
        max_num_batched_tokens=2048, max_num_seqs=16, max_model_len=4096, num_gpu_blocks=2000
    )
    machine = open_machine(
        load_decoder_shape({"config": str(tmp_path)}),
        schedule,
        device="cuda",
        dtype="float32",
        weights=tmp_path,
    )
    got, data = serve(machine, schedule, requests)
    assert data.steps.prefix_cache_hits.sum() > 0
    for one in requests:
        prompt = torch.from_numpy(tokens(one.prompt, 1000))[None].cuda()
        generated = model.generate(
            prompt, do_sample=False, max_new_tokens=one.output_len, min_new_tokens=one.output_len
        )
        assert got[one.request_id] == generated[0, one.prompt_len :].tolist()
