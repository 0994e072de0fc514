"""`executor: {kind: real, device: cpu}` from a configuration to a run directory, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simserve import api
from simserve.config.build_real import open_machine
from simserve.config.loader import LoadedConfig, load_config
from simserve.errors import CapacityError, ConfigError
from simserve.metrics.rundir import read_run
from tests.executor.decoders import tiny_config


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """Load a configuration of a tiny model, some keys of it replaced."""
    config_json = tiny_config("qwen3", head_dim=12, torch_dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config_json))

    def load(*overrides: str) -> LoadedConfig:
        config = {
            "model": {"config": "config.json"},
            "workload": {
                "synthetic": {
                    "num_requests": 6,
                    "arrival": {"kind": "poisson", "rate": 100},
                    "prompt_len": {"kind": "uniform", "min": 4, "max": 40},
                    "output_len": {"kind": "uniform", "min": 1, "max": 6},
                }
            },
            "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 64},
            "kv_cache": {"num_gpu_blocks": 20},
            "executor": {"kind": "real", "device": "cpu", "dtype": "float32"},
        }
        return load_config(config, overrides, base_dir=tmp_path)

    return load


def test_a_run_directory(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shadow = "executor.shadow={cost: {kind: formula, base_s: 0.5}}"
    loaded = tiny(shadow, "executor.breakdown=true", "metrics.plot=false")
    written = api.run_to_directory(loaded, out=tmp_path / "run")
    summary = written.summary
    assert summary["status"] == "completed"
    assert summary["completed"] == 6
    assert summary["backend"] == "simserve-real"
    assert summary["timing"] == "measured"
    assert summary["executor.attention"] == "auto"
    facts = json.loads((tmp_path / "run" / "env.json").read_text())["executor"]
    assert {"device": "cpu", "dtype": "float32", "kv_layout": "nhd", "mixed": "varlen"}.items() <= (
        facts.items()
    )
    steps = read_run(tmp_path / "run").steps
    assert (steps["parts.shadow_s"] == 0.5).all()
    named = ("schedule", "update", "prepare", "forward", "sample", "sync")
    total = steps[[f"parts.{name}_s" for name in named]].sum(axis=1)
    assert total.to_numpy() == pytest.approx(steps["duration_s"].to_numpy())


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("kv_cache.num_gpu_blocks=auto", "kv_cache.num_gpu_blocks", "must be given"),
        ("kv_cache.dtype=fp8_e5m2", "kv_cache.dtype", "float32"),
        ("executor.weights=nowhere", "executor.weights", "no *.safetensors here"),
        ("executor={kind: real, device: cpu, kv_layout: packed}", "executor.kv_layout", "use nhd"),
    ],
)
def test_what_the_machine_cannot_do(tiny: Any, override: str, path: str, words: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError) as caught:
        open_machine(tiny(override))
    (problem,) = caught.value.problems
    assert problem.path == path
    assert words in problem.message


def test_no_gpu(tiny: Any) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"executor\.device: torch sees no CUDA GPU here; run"):
        open_machine(tiny("executor.device=cuda"))


def test_no_torch(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simserve.executor.real.machine", None)
    with pytest.raises(ConfigError, match=r"executor\.kind: real needs torch and triton .*pip"):
        open_machine(tiny())


SPECULATIVE = "scheduler.speculative={method: ngram, num_speculative_tokens: 2, acceptance: 0.5}"
GROUPS = "kv_cache.groups=[{type: full}, {type: sliding_window, window: 8}]"


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ([GROUPS], "kv_cache.groups"),
        (["executor.tokens=sampled", "scheduler.policy=priority"], "executor.tokens"),
    ],
)
def test_what_is_only_simulated(tiny: Any, overrides: list[str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_machine(tiny(*overrides))
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("executor.kind=reel", "did you mean 'real'?"),
        ("executor.dtype=float64", None),
        ("executor.attention=v1", "attention v1 is a GPU kernel"),
    ],
)
def test_keys_that_do_not_go_together(tiny: Any, override: str, words: str | None) -> None:
    if words is None:
        assert tiny(override).config.executor.dtype == "float64"
        return
    with pytest.raises(ConfigError) as caught:
        tiny(override)
    assert words in str(caught.value)


def test_keys_of_the_other_kind_are_unknown(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="'device' goes with another kind"):
        tiny("executor.kind=simulated", "executor.dtype=auto")


def test_speculation_and_preemption(tiny: Any) -> None:
    """Dictated tokens, made-up acceptance, a pool for one request and a half."""
    pytest.importorskip("torch")
    loaded = tiny(SPECULATIVE, "kv_cache.num_gpu_blocks=6", "executor.mixed=split")
    summary = api.run(loaded).summary_dict
    assert summary["completed"] == 6


def test_weights_of_a_draft_model_that_are_not_there(tiny: Any) -> None:
    pytest.importorskip("torch")
    draft = "{method: draft_model, draft_model: {config: config.json}, num_speculative_tokens: 1}"
    loaded = tiny(
        f"scheduler.speculative={draft}",
        "executor.tokens=sampled",
        "executor.draft_weights=nowhere",
    )
    with pytest.raises(ConfigError, match=r"no \*.safetensors here") as caught:
        open_machine(loaded)
    assert [problem.path for problem in caught.value.problems] == ["executor.draft_weights"]


def test_an_fp8_cache(tiny: Any) -> None:
    pytest.importorskip("torch")
    assert api.run(tiny("kv_cache.dtype=fp8_e4m3")).summary_dict["completed"] == 6


@pytest.mark.parametrize("mixed", ["varlen", "split"])
def test_warm_up_stays_within_the_limits(mixed: Any) -> None:
    pytest.importorskip("torch")
    from simserve.executor.real.attention import AttentionPath
    from simserve.executor.real.warm_up import Limits, warm_up_batches

    path = AttentionPath("auto", "nhd", mixed, num_draft_tokens=2)
    for limits in ((4, 8192, 64), (256, 2048, 4096), (1, 1, 1), (3, 3, 100), (8, 20, 2)):
        max_num_seqs, max_num_batched_tokens, max_model_len = limits
        for batch in warm_up_batches(Limits(*limits), path):
            assert 1 <= len(batch.slots) <= max_num_seqs
            assert batch.num_tokens.min() >= 1
            assert batch.starts.min() >= 0
            assert batch.seq_lens.max() <= max_model_len
            assert batch.query_start_loc[-1] <= max_num_batched_tokens


def use_of(**gib: float) -> Any:
    from simserve.executor.real.memory import MemoryUse

    return MemoryUse(**{name: int(size * 2**30) for name, size in gib.items()})


def test_blocks_that_fit() -> None:
    """Within the share, and within what is free: other processes count against the latter."""
    pytest.importorskip("torch")
    from simserve.executor.real.memory import blocks_that_fit

    block = 2**20
    alone = use_of(total=80, own_now=16, own_peak=18, others=0.5)
    assert blocks_that_fit(alone, block, 0.9) == 54 * 1024
    assert blocks_that_fit(alone, block, 1.0) == int(59.5 * 1024)
    crowded = use_of(total=80, own_now=16, own_peak=18, others=48)
    assert blocks_that_fit(crowded, block, 0.9) == 12 * 1024
    full = use_of(total=80, own_now=16, own_peak=18, others=60)
    for share in (0.9, 1.0):
        with pytest.raises(CapacityError, match=r"18\.00 GiB of it, and others .* hold 60\.00 GiB"):
            blocks_that_fit(full, block, share)


def test_without_a_gpu_no_triton_is_needed() -> None:
    pytest.importorskip("torch")
    code = "import sys; sys.modules['triton'] = None; import simserve.executor.real.machine"
    subprocess.run([sys.executable, "-c", code], check=True)
