"""`simserve run` of a real executor: its options, the table at the end, and runs on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from simserve import api
from simserve.cli.main import app
from simserve.fidelity.validate import real_gpu
from simserve.fidelity.validate.percentile_table import Compared

CONFIG = """
model: llama-3.1-8b
workload: {synthetic: {num_requests: 3, output_len: {kind: constant, value: 2}}}
executor: {cost: {kind: formula, base_s: 0.01}}
"""
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "dtype": "float32",
}
TINY_CONFIG = """
model: {config: config.json}
workload:
  synthetic:
    num_requests: 4
    prompt_len: {kind: constant, value: 9}
    output_len: {kind: constant, value: 3}
executor: {kind: real, device: cpu, shadow: {cost: {kind: formula, base_s: 0.01}}}
kv_cache: {num_gpu_blocks: 20}
scheduler: {max_num_seqs: 4, max_num_batched_tokens: 32}
metrics: {plot: false}
"""


class Fake:
    """Stands for the run and its validation, and notes what they are asked."""

    def __init__(self) -> None:
        self.loaded: Any = None
        self.validated = 0
        self.status = "completed"
        self.warning: str | None = None

    def run_to_directory(self, loaded: Any, *, out: Path, progress: Any) -> SimpleNamespace:
        self.loaded = loaded
        progress(1.5, 3, 3)
        summary = {"status": self.status, "timing": "measured", "duration": 1.5}
        return SimpleNamespace(summary=summary, directory=out, picture=None, warnings=())

    def validate(self, loaded: Any, real: Any, *, progress: Any) -> real_gpu.Validation:
        assert loaded is self.loaded
        self.validated += 1
        progress(1.25, 3, 3)
        return real_gpu.Validation("real: GPU", [Compared("k", "TTFT p50 (ms)", 8.0, 10.0)])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    fake = Fake()
    monkeypatch.setattr(api, "run_to_directory", fake.run_to_directory)
    monkeypatch.setattr(real_gpu, "validate", fake.validate)
    monkeypatch.setattr(real_gpu, "compile_warning", lambda directory: fake.warning)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return fake


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["run", *arguments])


def test_real_gpu_is_an_override_that_keeps_the_cost_model(fake: Fake) -> None:
    outcome = invoke("c.yaml", "--real-gpu", "-o", "executor.attention=v2")
    assert outcome.exit_code == 0, outcome.output
    executor = fake.loaded.config.executor
    assert (executor.kind, executor.device, executor.attention) == ("real", "cuda", "v2")
    assert executor.cost.base_s == 0.01


def test_a_real_run_ends_with_the_table(fake: Fake) -> None:
    outcome = invoke("c.yaml", "--real-gpu")
    assert outcome.stdout.endswith(
        "\nreal: GPU\n\n"
        "|               | real | simulated |   error |\n"
        "| ------------- | ---: | --------: | ------: |\n"
        "| TTFT p50 (ms) | 8.00 |     10.00 | +25.0 % |\n\n"
    )
    assert "measured time" in outcome.stdout
    assert outcome.stderr.splitlines() == [
        "1.5 s measured, 3 of 3 requests",
        "1.2 s simulated, 3 of 3 requests",
    ]


def test_steps_that_compiled_are_warned_of(fake: Fake) -> None:
    fake.warning = "2 of 8 steps"
    assert "\nwarning: 2 of 8 steps\n" in invoke("c.yaml", "--real-gpu", "--no-sim").stderr
    assert invoke("c.yaml", "--real-gpu", "--quiet").output == ""


def test_no_sim_leaves_the_simulation_out(fake: Fake) -> None:
    assert invoke("c.yaml", "--real-gpu", "--no-sim").exit_code == 0
    assert not fake.validated
    outcome = invoke("c.yaml", "--no-sim")
    assert outcome.exit_code == 2
    assert "goes with --real-gpu or executor.kind: real" in outcome.stderr


def test_an_interrupted_run_is_not_compared(fake: Fake) -> None:
    fake.status = "interrupted"
    assert invoke("c.yaml", "--real-gpu").exit_code == 130
    assert not fake.validated


def test_a_simulated_run_is_not_compared(fake: Fake) -> None:
    assert invoke("c.yaml", "--quiet").output == ""
    assert not fake.validated
    assert invoke("c.yaml", "--real-gpu", "--quiet").output == ""
    assert fake.validated


def test_no_gpu_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "c.yaml").write_text(CONFIG)
    outcome = invoke(str(tmp_path / "c.yaml"), "--real-gpu", "--out", str(tmp_path / "run"))
    assert outcome.exit_code == 2
    assert "torch sees no CUDA GPU" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "c.yaml").write_text(TINY_CONFIG)
    return tmp_path


def test_a_run_on_the_cpu_is_written_beside_its_simulation(tiny: Path) -> None:
    pytest.importorskip("torch")
    out = tiny / "run"
    outcome = invoke(str(tiny / "c.yaml"), "--out", str(out))
    assert outcome.exit_code == 0, outcome.output
    real, simulated = (
        json.loads((folder / "summary.json").read_text())[0] for folder in (out, out / "simulated")
    )
    assert real["timing"] == "measured"
    assert simulated["timing"] == "formula"
    for key in ("completed", "num_gpu_blocks", "total_output_tokens", "decisions"):
        assert real[key] == simulated[key]
    rows = {row["key"]: row for row in json.loads((out / "validation.json").read_text())["rows"]}
    assert rows["p50_ttft_ms"]["real"] == real["p50_ttft_ms"]
    assert rows["p50_ttft_ms"]["simulated"] == simulated["p50_ttft_ms"]
    assert rows["shadow_s"]["simulated"] == pytest.approx(0.01 * real["num_steps"])
    assert "real: cpu, attention auto" in outcome.stdout


def test_drafts_of_a_model_are_simulated_as_they_were_accepted(tiny: Path) -> None:
    """The model drafts for itself: its random weights are those of the same seed."""
    pytest.importorskip("torch")
    speculative = "{method: draft_model, draft_model: {config: .}, num_speculative_tokens: 2}"
    overrides = (
        f"scheduler.speculative={speculative}",
        "scheduler.max_model_len=64",
        "executor={kind: real, device: cpu, tokens: sampled, draft_weights: random}",
        "workload.synthetic.output_len.value=7",
    )
    arguments = [word for one in overrides for word in ("-o", one)]
    outcome = invoke(str(tiny / "c.yaml"), "--out", str(tiny / "run"), *arguments)
    assert outcome.exit_code == 0, outcome.output
    for folder in (tiny / "run", tiny / "run" / "simulated"):
        (summary,) = json.loads((folder / "summary.json").read_text())
        assert summary["spec_decode_num_accepted_tokens"] == 4 * 4
        assert summary["spec_decode_draft_acceptance_rate"] == 1
        assert 0 < summary["spec_decode_draft_share"] < 1


def test_a_step_longer_than_the_model_is_an_error(tiny: Path) -> None:
    arguments = ["bench", "step", "--model", str(tiny / "config.json"), "--case", "1@120"]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2
    assert outcome.stderr == (
        "--case: a request grows to 146 tokens, more than scheduler.max_model_len = 128\n"
    )


def test_steps_are_measured_on_the_cpu(tiny: Path) -> None:
    pytest.importorskip("torch")
    arguments = [
        "bench", "step", "--model", str(tiny / "config.json"), "--device", "cpu",
        "--case", "3*1@17", "--case", "mix=1@30,12", "--num-iters", "2", "--num-iters-warmup", "1",
        "-o", "kv_cache.num_gpu_blocks=20", "--json", str(tiny / "steps.json"),
    ]  # fmt: skip
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads((tiny / "steps.json").read_text())["rows"]
    assert [(row["case"], row["num_requests"], row["num_tokens"]) for row in rows] == [
        ("3*1@17", 3, 3),
        ("mix", 2, 13),
    ]
    for row in rows:
        assert len(row["samples_s"]) == 2
        assert min(row["samples_s"]) > 0
        parts = row["parts_samples"]
        total = [sum(parts[f"{name}_s"][i] for name in ("prepare", "forward", "sample", "sync"))
                 for i in range(2)]  # fmt: skip
        assert total == pytest.approx(row["samples_s"], rel=1e-6)
    assert "| mix " in outcome.stdout
