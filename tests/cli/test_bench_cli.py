"""`simserve bench` around the measuring: options, tables, files, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import simserve.executor.real.bench as room
from simserve.cli.main import app
from simserve.executor.real.bench import gpu
from simserve.executor.real.bench.kernel_report import KernelRow

LAUNCH = {
    "kernel": "_split_kernel",
    "tile": {"tile": 64},
    "num_warps": 4,
    "num_stages": 3,
    "registers": 128,
    "spills": 0,
    "shared_bytes": 2048,
    "programs_per_sm": 4,
    "occupancy": 0.25,
}


class FakeBench:
    """Stands for the modules that need torch: notes what it is asked, and answers with rows."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.failure: str | None = None
        self.error: Exception | None = None

    def measure_ceilings(self, timer: Any) -> SimpleNamespace:
        fields = {"read_gb_s": 4000.0, "matmul_tflop_s": 500.0}
        return SimpleNamespace(**fields, _asdict=lambda: fields)

    def measure_kernels(self, cases: Any, **options: Any) -> Iterator[KernelRow]:
        self.asked = {"cases": [case.name for case in cases], **options}
        for case in cases:
            yield KernelRow(
                case=case.name,
                path="auto",
                layout="nhd",
                kv_dtype="bfloat16",
                num_bytes=4_000_000,
                flops=100_000_000,
                samples_us=() if self.failure else (10.0,),
                failure=self.failure,
            )
            if self.error is not None:
                raise self.error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBench:
    bench = FakeBench()
    parts = {
        "ceilings": {"measure_ceilings": bench.measure_ceilings},
        "kernels": {"measure_kernels": bench.measure_kernels},
        "timing": {"time_graph": None},
    }
    for name, attributes in parts.items():
        module = ModuleType(f"{room.__name__}.{name}")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(room, name, module, raising=False)
    monkeypatch.setattr(gpu, "require_gpu", lambda what: None)
    monkeypatch.chdir(tmp_path)
    return bench


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_kernels_are_chosen_shown_and_written(fake: FakeBench, tmp_path: Path) -> None:
    outcome = invoke(
        "kernels", "--cases", "decode b1 ctx512, kv_write 6*", "--paths", "auto,kv_write",
        "--layouts", "nhd,packed", "--json", "new/k.json",
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    assert fake.asked == {
        "cases": ["decode b1 ctx512", "kv_write 64"],
        "ways": ("auto", "kv_write"),
        "layouts": ["nhd", "packed"],
    }
    assert "4,000 GB/s read, 500 TFLOP/s" in outcome.stdout
    assert "| decode b1 ctx512 | auto | nhd    | 10.0 |  400 |" in outcome.stdout
    assert "kv_write 64 auto nhd: 10.0 µs\n" in outcome.stderr
    written = json.loads((tmp_path / "new" / "k.json").read_text())
    assert written["command"] == [
        "simserve", "bench", "kernels", "--cases", "decode b1 ctx512, kv_write 6*",
        "--paths", "auto,kv_write", "--layouts", "nhd,packed",
    ]  # fmt: skip
    assert written["ceilings"]["read_gb_s"] == 4000.0
    assert [row["samples_us"] for row in written["rows"]] == [[10.0], [10.0]]
    assert set(written) == {"command", "date", "environment", "ceilings", "rows"}


def test_a_failure_is_shown_and_ends_with_1(fake: FakeBench) -> None:
    fake.failure = "error 2.0e-01 against float64"
    outcome = invoke("kernels", "--cases", "decode b1 ctx512")
    assert outcome.exit_code == 1
    assert "| error 2.0e-01 against float64 |" in outcome.stdout


def test_what_was_measured_before_a_crash_is_kept(fake: FakeBench, tmp_path: Path) -> None:
    fake.error = RuntimeError("device lost")
    outcome = invoke("kernels", "--cases", "decode b1*", "--json", "k.json")
    assert isinstance(outcome.exception, RuntimeError)
    assert len(json.loads((tmp_path / "k.json").read_text())["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cases", "prefil 8192"), "mean 'prefill 8192'"),
        (("--paths", "v3"), "--paths: 'v3' is none of"),
        (("--layouts", "nhd,hnd"), "--layouts: 'hnd' is neither nhd nor packed"),
        (("--json", "."), "cannot be written"),
        (("--json", "file/k.json"), "file/k.json: cannot be written"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    fake: FakeBench, tmp_path: Path, arguments: tuple[str, str], message: str
) -> None:
    (tmp_path / "file").touch()
    outcome = invoke("kernels", *arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert not fake.asked


def test_no_torch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    outcome = invoke("kernels")
    assert outcome.exit_code == 2
    assert outcome.stderr == (
        "simserve bench kernels needs torch and triton, not installed here: "
        "pip install 'simserve[gpu]'\n"
    )


def test_no_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    torch.__version__ = "2.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    outcome = invoke("kernels")
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("simserve bench kernels needs a CUDA GPU, and torch 2.9 sees")
    assert len(outcome.stderr.splitlines()) == 1


def test_a_step_that_is_no_shape_is_an_error() -> None:
    outcome = invoke("step", "--case", "64x1")
    assert outcome.exit_code == 2
    assert outcome.stderr == (
        "--case 64x1: '64x1' is not [N*]Q[@K[~S]], such as 64*1@2048, 8192 or 2048@30720\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lama-3.1-8b"), "--model: no model preset is called 'lama-3.1-8b' (did you"),
        (("--model", "absent/config.json"), "--model: absent/config.json: cannot read this config"),
        (("--device", "gpu"), "--device: 'gpu' is not one of cuda, cpu"),
        (("-o", "executor.kv_layout=hnd"), "-o executor.kv_layout=hnd: executor.kv_layout: 'hnd' "),
        (
            ("--device", "cpu", "-o", "executor.max_logprobs=4"),
            "-o executor.max_logprobs=4: executor.max_logprobs: has no effect with executor.tokens",
        ),
    ],
)
def test_mistakes_in_options_of_a_step_name_the_option(
    arguments: tuple[str, str], message: str
) -> None:
    outcome = invoke("step", "--case", "8", *arguments)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(message)
    assert len(outcome.stderr.splitlines()) == 1
