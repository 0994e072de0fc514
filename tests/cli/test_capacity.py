from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.config.build import with_pool_size
from simserve.config.loader import load_config


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["capacity", *arguments])
    return result.exit_code, result.output


def test_the_table_names_the_shape_and_the_dtype_it_holds_for() -> None:
    code, output = invoke("--model", "llama-3.1-8b", "--gpu", "h200")
    assert code == 0
    assert (
        "hold for 32 layers, 8 KV heads, head_dim 128, weights in bfloat16, KV in bfloat16"
        in output
    )
    assert "131,072 bytes a token (128 KiB), 4.00 GiB for 32,768 tokens" in output
    for term in ("weights", "activations", "CUDA graphs", "partition buffers", "alignment"):
        assert term in output
    assert "the null block included" in output


@pytest.mark.parametrize("gpu", ["h200", "a100", "l40s"])
def test_it_says_what_a_run_has(gpu: str) -> None:
    _, output = invoke("--gpu", gpu, "--json")
    workload = {"synthetic": {"num_requests": 1}}
    loaded = load_config({"model": "llama-3.1-8b", "gpu": gpu, "workload": workload})
    num_gpu_blocks = with_pool_size(loaded).config.kv_cache.num_gpu_blocks
    assert json.loads(output)["num_gpu_blocks"] == num_gpu_blocks


def test_json_adds_up_and_dtypes_count(tmp_path: Path) -> None:
    code, output = invoke("--dtype", "fp8", "--kv-cache-dtype", "fp8_e5m2", "--json")
    fields = json.loads(output)
    assert code == 0
    assert (fields["dtype"], fields["kv_dtype"]) == ("fp8", "fp8_e5m2")
    assert fields["kv_bytes_per_token"] == 65536
    assert fields["kv_scale_bytes"] == 256
    assert fields["num_usable_blocks"] == fields["num_gpu_blocks"] - 1
    terms = [k for k in fields if k.endswith("_bytes") and not k.startswith(("gpu", "budget"))]
    assert sum(fields[term] for term in terms) == fields["budget_bytes"]


def test_a_config_json_is_read(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shape = {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    config.write_text(json.dumps(shape))
    code, output = invoke("--model", str(config), "--json")
    assert code == 0
    assert json.loads(output)["kv_bytes_per_token"] == 262144


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3.1-70b", "--gpu", "h100"], "leaves no room for a KV cache"),
        (["--gpu", "rtx4090", "--max-model-len", "131072"], "max_model_len 131072 of llama-3.1-8b"),
        (["--gpu", "h20"], "did you mean 'h200'?"),
        (["--max-num-batched-tokens", "9" * 20], "less than or equal to 1000000000"),
        (["--kv-cache-dtype", "fp9"], "dtype 'fp9' is not known"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization must be above 0"),
    ],
)
def test_what_does_not_fit_ends_with_its_numbers(arguments: list[str], message: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert message in output
